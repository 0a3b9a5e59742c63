"""Provide the commands as Python functions, and trained models that are applied to images.

Every option of a command is a keyword argument. An option with a dot is passed as a dictionary (recipe={"lr": 1e-3}) or
by its name (**{"recipe.lr": 1e-3}); options of the recipe also by their last part (lr=1e-3). A failure raises a
`UserError` with the line that the command prints. Environment, signal handlers and torch's random state do not change.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssvit import cli
from ssvit.checkpoints.checkpoint import FINETUNE, PRETRAIN, Checkpoint
from ssvit.checkpoints.run_folder import last_values, reported_run, rows
from ssvit.config.declaration import Options
from ssvit.errors import OptionError, typed
from ssvit.loading.finding import find_checkpoint
from ssvit.training.recipe import Recipe

if TYPE_CHECKING:
    from ssvit.inference import Classifier, Encoder, Segmenter
    from ssvit.options import Evaluate, Finetune, Pretrain

# Short names of options of the commands that train.
_SHORT = {name: f"recipe.{name}" for name in Recipe.model_fields}
_SHORT |= {"image_size": "data.image_size", "patch_size": "encoder.patch_size"}


@dataclass(frozen=True)
class Run:
    """Provide the results of a training run; `folder` contains its checkpoints, metrics and figures.

    Attributes:
        folder: The run folder.
    """

    folder: Path

    def __fspath__(self) -> str:
        """Return the path of the folder, so that options accept a run."""
        return str(self.folder)

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, each with its "step".

        For compare=scratch, these are the rows of the first pre-trained run; for sweep=table4, those of the run with
        the chosen learning rate.
        """
        return rows(reported_run(self.folder))

    @property
    def metrics(self) -> dict[str, float]:
        """Return the last value of each metric."""
        return last_values(self.history)

    @property
    def figures(self) -> dict[str, Path]:
        """Return the paths of the figures by name."""
        return {file.stem: file for file in sorted(self.folder.glob("*.png"))}

    @property
    def comparison(self) -> dict[str, Any] | None:
        """Return the result of compare=scratch or sweep=table4; None for a single run."""
        for name in ("comparison.json", "sweep.json"):
            if (self.folder / name).is_file():
                return json.loads((self.folder / name).read_text())
        return None

    def encoder(self, **options: Any) -> "Encoder":
        """Load the encoder of this run; options as in `load`."""
        return load(self.folder, **options)

    def classifier(self, **options: Any) -> "Classifier":
        """Load the classifier of this run; options as in `load_classifier`."""
        return load_classifier(self.folder, **options)


@dataclass(frozen=True)
class Evaluation:
    """Provide the results of `evaluate` or `try_images`.

    Attributes:
        folder: Folder with report.html and report.json, and the figures of `try_images`.
    """

    folder: Path

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """Return the content of report.json."""
        return json.loads((self.folder / "report.json").read_text())

    @property
    def figures(self) -> dict[str, Path]:
        """Return the paths of the figures of `try_images` by name; those of `evaluate` are only in `page`."""
        return {file.stem: file for file in sorted(self.folder.rglob("*.png"))}

    @property
    def page(self) -> Path:
        """Return the path of the report as one HTML file."""
        return self.folder / "report.html"


def pretrain(
    data: "str | Path | Pretrain | None" = None,
    *,
    checkpoint: "str | Path | Run | None" = None,
    verbose: bool = True,
    config_dir: str | Path | None = None,
    **options: object,
) -> Run:
    """Pre-train an encoder, as the command `ssvit pretrain`.

    Args:
        data: Name of a data set, or path of a folder of images; None for the default, or the images of the run in
            `checkpoint`. Or all options as one object (`ssvit.options.Pretrain`).
        checkpoint: Run or file of foreign weights to start from; None for random weights.
        verbose: Whether to print the output of the command.
        config_dir: Folder with additional configuration files.
        options: Options of the command.

    Returns:
        The run.

    Raises:
        UserError: The command failed; the message is the line that it prints.
    """
    return Run(_call("pretrain", {"data": data, "checkpoint": checkpoint} | options, verbose, config_dir))


def finetune(
    checkpoint: "str | Path | Run | Finetune | None" = None,
    *,
    data: str | Path | None = None,
    verbose: bool = True,
    config_dir: str | Path | None = None,
    **options: object,
) -> Run:
    """Fine-tune a pre-trained encoder as a classifier, as the command `ssvit finetune`.

    Args:
        checkpoint: Run, name of a run, or file of foreign weights; None for the newest run. Or all options as one
            object (`ssvit.options.Finetune`).
        data: Name of a data set, or path of a folder of images; None for the images of the pre-training run.
        verbose: Whether to print the output of the command.
        config_dir: Folder with additional configuration files.
        options: Options of the command.

    Returns:
        The run.

    Raises:
        UserError: The command failed; the message is the line that it prints.
    """
    return Run(_call("finetune", {"checkpoint": checkpoint, "data": data} | options, verbose, config_dir))


def evaluate(
    checkpoint: "str | Path | Run | Evaluate | None" = None,
    *,
    data: str | Path | None = None,
    verbose: bool = True,
    config_dir: str | Path | None = None,
    **options: object,
) -> Evaluation:
    """Evaluate frozen features, as the command `ssvit evaluate`.

    Args:
        checkpoint: Run, name of a run, or file of foreign weights; None for the newest run. Or all options as one
            object (`ssvit.options.Evaluate`).
        data: Name of a data set, or path of a folder of images; None for the images of the pre-training run.
        verbose: Whether to print the output of the command.
        config_dir: Folder with additional configuration files.
        options: Options of the command.

    Returns:
        The report.

    Raises:
        UserError: The command failed; the message is the line that it prints.
    """
    in_object = all(getattr(given, "report", True) for given in (checkpoint, data))
    if options.get("report", in_object) is False:
        raise OptionError("report", False, "must be True from Python, where the report has the results")
    return Evaluation(_call("evaluate", {"checkpoint": checkpoint, "data": data} | options, verbose, config_dir))


def try_images(
    data: str | Path, *, verbose: bool = True, config_dir: str | Path | None = None, **options: object
) -> Evaluation:
    """Describe images, and measure raw pixels, existing weights and a short pre-training, as the command `ssvit try`.

    Args:
        data: Folder of images.
        verbose: Whether to print the output of the command.
        config_dir: Folder with additional configuration files.
        options: Options of the command.

    Returns:
        The results; the sentence on all of them is `metrics["verdict"]`.

    Raises:
        UserError: The command failed; the message is the line that it prints.
    """
    return Evaluation(_call("try", {"data": data} | options, verbose, config_dir))


def load(checkpoint: "str | Path | Run" = "newest", *, outputs: str | Path = "outputs", **options: Any) -> "Encoder":
    """Load a pre-trained encoder, which accepts paths, PIL images, arrays or tensors of any image size.

    Args:
        checkpoint: Run, folder of a run, its name in `outputs`, file of foreign weights, exported ONNX file, or newest.
        outputs: Folder of all runs.
        options: device, batch_size, precision (auto, bf16 or 32), and options of the encoder (image_size, resize, …).
            The default of image_size is that of the training, but at most 224 for weights of other projects.

    Raises:
        UserError: There is no such checkpoint, or an option has an invalid value.
    """
    from ssvit.inference import Encoder

    return Encoder(_find(checkpoint, outputs, PRETRAIN, options), **options)


def load_classifier(
    checkpoint: "str | Path | Run" = "newest", *, outputs: str | Path = "outputs", **options: Any
) -> "Classifier":
    """Load a fine-tuned classifier, which accepts images as `load` does.

    Args:
        checkpoint: Run, folder of a run, its name in `outputs`, exported ONNX or safetensors file, or newest.
        outputs: Folder of all runs.
        options: device, batch_size, and options of the encoder (image_size, resize, …).

    Raises:
        UserError: There is no such checkpoint, or an option has an invalid value.
    """
    from ssvit.inference import Classifier

    return Classifier(_find(checkpoint, outputs, FINETUNE, options), **options)


def load_segmenter(
    checkpoint: "str | Path | Run" = "newest", *, outputs: str | Path = "outputs", **options: Any
) -> "Segmenter":
    """Load a fine-tuned segmentation model, which accepts images of any size as `load` does.

    Args:
        checkpoint: Run, folder of a run, its name in `outputs`, or newest.
        outputs: Folder of all runs.
        options: device, batch_size, and options of the encoder (image_size, the size of a window; resize, …).

    Raises:
        UserError: There is no such checkpoint, or an option has an invalid value.
    """
    from ssvit.inference import Segmenter

    return Segmenter(_find(checkpoint, outputs, FINETUNE, options), **options)


def _find(checkpoint: "str | Path | Run", outputs: str | Path, stage: str, options: Mapping[str, Any]) -> Checkpoint:
    """Return a checkpoint or an exported graph without printing the path of the newest one."""
    path, precision = _checkpoint(checkpoint, outputs), options.get("precision", "auto")
    return find_checkpoint(
        path, outputs=str(outputs), stage=stage, say=lambda line: None, options=options, precision=precision
    )


def _checkpoint(checkpoint: "str | Path | Run", outputs: Any) -> str:
    """Return the value of the option checkpoint=: a path, or the path of the run of this name in `outputs`."""
    if not isinstance(checkpoint, str | os.PathLike):
        raise OptionError("checkpoint", checkpoint, "must be a run, a path or newest")
    named = Path(outputs, checkpoint)
    return os.fspath(checkpoint if Path(checkpoint).exists() or not named.exists() else named)


def _call(command: str, options: dict[str, Any], verbose: bool, config_dir: str | Path | None) -> Path:
    """Run a command and return its output folder."""
    tree: Options | None = None
    for name in ("checkpoint", "data"):  # parameters of the functions, whose defaults are those of the command
        if isinstance(options.get(name), Options):
            tree = options.pop(name)
        elif options.get(name) is None:
            options.pop(name, None)
    if "checkpoint" in options:
        options["checkpoint"] = _checkpoint(options["checkpoint"], options.get("outputs", "outputs"))
    short = _SHORT if command in ("pretrain", "finetune") else {}
    named = [(short.get(name, name), value) for name, value in options.items()]
    given: dict[str, object] = {}
    for name, value in _flat(named, deep=True):
        if name in given:
            raise OptionError(name, value, f"must be passed only once, and is also {typed(given[name])}")
        given[name] = value
    arguments = [] if config_dir is None else ["--config-dir", str(config_dir)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_same_random_state())
        if not verbose:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        return cli.find_command(command).call(arguments, dict(_flat(named)), tree)


def _flat(options: Iterable[tuple[str, object]], *, deep: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield options by their full names.

    A dictionary inside a group's dictionary is the value of one option, unless `deep`.
    """
    for name, value in options:
        if isinstance(value, Mapping) and (deep or "." not in name):
            yield from _flat(((f"{name}.{key}", option) for key, option in value.items()), deep=deep)
        else:
            yield name, value


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Restore torch's random state and number of threads after the block, if torch has been imported."""
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
