"""ssvit from Python: the commands as functions, and trained models applied to pictures.

Every option of a command is a keyword argument. An option with a dot is given as a dictionary (recipe={"lr": 1e-3}) or
by its name (**{"recipe.lr": 1e-3}); options of the recipe also by their last part (lr=1e-3). A failure is a `UserError`
with the line that the command prints. Environment, signal handlers and torch's random state do not change.
"""

import contextlib
import json
import numbers
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssvit import cli
from ssvit.checkpoints.run_folder import reported_run, rows
from ssvit.options import OptionError, UserError
from ssvit.training.recipe import Recipe

if TYPE_CHECKING:
    from ssvit.inference import Classifier, Encoder

# Names that may stand alone for a command that trains.
_SHORT = {name: f"recipe.{name}" for name in Recipe.model_fields}
_SHORT |= {"image_size": "data.image_size", "patch_size": "encoder.patch_size"}
_BARE = re.compile(r"[\w./+-]+", re.ASCII)  # what Hydra takes as it is written
_NUMBER_OR_WORD = re.compile(r"[\d+.-].*|null|true|false|nan|inf", re.IGNORECASE)  # what it takes for no string


@dataclass(frozen=True)
class Run:
    """A run: `folder` holds its checkpoints, metrics and figures."""

    folder: Path

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, each with its "step"; of a comparison those of its first pre-trained run."""
        return rows(reported_run(self.folder))

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: value for row in self.history for name, value in row.items() if value is not None}

    @property
    def figures(self) -> dict[str, Path]:
        """Its pictures, by name."""
        return {file.stem: file for file in sorted(self.folder.glob("*.png"))}

    @property
    def comparison(self) -> dict[str, Any] | None:
        """The result of compare=scratch or sweep=table4; None for a single run."""
        for name in ("comparison.json", "sweep.json"):
            if (self.folder / name).is_file():
                return json.loads((self.folder / name).read_text())
        return None

    def encoder(self, **options: Any) -> "Encoder":
        """Its encoder, as `load` gives it."""
        return load(self.folder, **options)

    def classifier(self, **options: Any) -> "Classifier":
        """Its classifier, as `load_classifier` gives it."""
        return load_classifier(self.folder, **options)


@dataclass(frozen=True)
class Evaluation:
    """A report on frozen features: `folder` holds report.html, report.json and figures."""

    folder: Path

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The content of report.json."""
        return json.loads((self.folder / "report.json").read_text())

    @property
    def figures(self) -> dict[str, Path]:
        """Its pictures, by name."""
        return {file.stem: file for file in sorted(self.folder.rglob("*.png"))}

    @property
    def page(self) -> Path:
        """The report as one HTML file."""
        return self.folder / "report.html"


def pretrain(
    data: str | Path | None = None,
    *,
    checkpoint: "str | Path | Run | None" = None,
    verbose: bool = True,
    config_dir: str | Path | None = None,
    **options: object,
) -> Run:
    """Pre-train: the command `ssvit pretrain`. data: a data set's name, or a folder of images.

    checkpoint: a run, or a file of another project's weights, to start from; None: random weights. With a run and
    without data, the images are the run's. verbose: whether anything is printed. config_dir: a folder with your own
    configurations.
    """
    return Run(_call("pretrain", {"data": data, "checkpoint": checkpoint} | options, verbose, config_dir))


def finetune(
    checkpoint: "str | Path | Run | None" = None,
    *,
    data: str | Path | None = None,
    verbose: bool = True,
    config_dir: str | Path | None = None,
    **options: object,
) -> Run:
    """Fine-tune a classifier: the command `ssvit finetune`.

    checkpoint: a run, its name, or a file of another project's weights; None: the newest run.
    """
    return Run(_call("finetune", {"checkpoint": checkpoint, "data": data} | options, verbose, config_dir))


def evaluate(
    checkpoint: "str | Path | Run | None" = None,
    *,
    data: str | Path | None = None,
    verbose: bool = True,
    config_dir: str | Path | None = None,
    **options: object,
) -> Evaluation:
    """Measure frozen features: the command `ssvit evaluate`. checkpoint: as in `finetune`."""
    return Evaluation(_call("evaluate", {"checkpoint": checkpoint, "data": data} | options, verbose, config_dir))


def load(checkpoint: "str | Path | Run" = "newest", *, outputs: str | Path = "outputs", **options: Any) -> "Encoder":
    """A pre-trained encoder that takes pictures: paths, PIL images, arrays or tensors of any size.

    checkpoint: a run's folder or its name in `outputs`, a file of another project's weights, or newest. options:
    device, batch_size, and those of the encoder (image_size, resize, …).
    """
    from ssvit import inference
    from ssvit.checkpoints.checkpoint import PRETRAIN
    from ssvit.loading.finding import find

    asked = _checkpoint(checkpoint, outputs)
    return inference.encoder(find(asked, outputs=str(outputs), stage=PRETRAIN, say=_quiet), **options)


def load_classifier(
    checkpoint: "str | Path | Run" = "newest", *, outputs: str | Path = "outputs", **options: Any
) -> "Classifier":
    """A fine-tuned classifier that takes pictures; arguments as in `load`."""
    from ssvit import inference
    from ssvit.checkpoints.checkpoint import FINETUNE
    from ssvit.loading.finding import find

    asked = _checkpoint(checkpoint, outputs)
    return inference.classifier(find(asked, outputs=str(outputs), stage=FINETUNE, say=_quiet), **options)


def _quiet(line: str) -> None:
    """Nothing is said of which checkpoint is the newest."""


def _checkpoint(given: "str | Path | Run", outputs: Any) -> str:
    """What the option checkpoint= takes: a path, which may be that of a run of this name in `outputs`."""
    if isinstance(given, Run):
        return str(given.folder)
    if not isinstance(given, str | os.PathLike):
        raise OptionError("checkpoint", given, "must be a run, a path or newest")
    named = Path(outputs) / given
    return str(named if not Path(given).exists() and named.exists() else given)


def _call(command: str, options: dict[str, Any], verbose: bool, config_dir: str | Path | None) -> Path:
    """Run a command and return the folder that it leaves."""
    if options.get("checkpoint") is not None:
        options["checkpoint"] = _checkpoint(options["checkpoint"], options.get("outputs", "outputs"))
    if command in ("pretrain", "finetune"):
        options = {_SHORT.get(name, name): value for name, value in options.items()}
    arguments = [f"{name}={_written(value)}" for name, value in _flat(options) if value is not None or "." in name]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_same_random_state())
        if not verbose:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        return cli.find(command).call(arguments, config_dir=config_dir)


def _flat(options: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """Options by their full names; a dictionary within a group's is the value of one, or changes a part of it."""
    for name, value in options.items():
        if isinstance(value, Mapping) and "." not in name:
            yield from ((f"{name}.{inner}", of) for inner, of in value.items())
        else:
            yield name, value


def _written(value: object) -> str:
    """A value as the command line takes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{_written(of)}' for name, of in value.items())}}}"
    if isinstance(value, numbers.Real):  # NumPy's numbers, too
        return repr(int(value) if isinstance(value, numbers.Integral) else float(value))
    if isinstance(value, Run):
        value = value.folder
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise UserError(
            f"{value!r}: an option must be a string, a path, a run, a number, a flag, None, a list or a dictionary"
        )
    if _BARE.fullmatch(text) and not _NUMBER_OR_WORD.fullmatch(text):
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + (found[2] and "\\'"), text) + "'"


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Put torch's random state and threads back at the end, where torch is loaded already."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads(threads)
