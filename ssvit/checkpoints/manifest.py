"""What a checkpoint says of itself, and which checkpoint a user means: read without torch.

A run's folder holds config.yaml and step_*/ (its checkpoints); each of these has a manifest.json with the step, what
was trained ("encoder", "stage", …), and a sha256 of every file and of itself, the seal. A file of another framework's
weights is a checkpoint too, whose manifest is what `ssvit.exchange` finds in it.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssvit.atomic_io import read_manifest, seal
from ssvit.checkpoints import configuration
from ssvit.checkpoints.configuration import Configuration
from ssvit.exchange import files, reading
from ssvit.options import OptionError, UserError

SCHEMA = 2
_SHOWN = 3  # other runs that are named beside the newest
PRETRAIN, FINETUNE = STAGES = ("pretrain", "finetune")


class CheckpointError(UserError):
    """A checkpoint cannot be written, or cannot be trusted."""


def read(path: Path, told: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The verified manifest of the checkpoint in a folder. CheckpointError says what is wrong with it.

    Of a foreign file, what stands for one; told: options that may hold those of `reading.TOLD`. ForeignError or
    OptionError if it cannot be read, or what it holds must be told.
    """
    if path.is_file():
        return reading.read(path, told or {}).facts
    for name in reading.TOLD:
        if told and told.get(name) is not None:
            raise OptionError(name, told[name], "is told of foreign files alone; a checkpoint of ours has its own")
    try:
        manifest, _ = read_manifest(path / "manifest.json")
        if manifest["seal"] != seal(manifest):
            raise ValueError
        if manifest["schema"] != SCHEMA:
            raise CheckpointError(f"{path}: has schema {manifest['schema']}, this version reads {SCHEMA}")
        sums = manifest["sha256"]
        if "model.safetensors" not in sums or not all(re.fullmatch(r"\w+\.safetensors", file, re.A) for file in sums):
            raise ValueError
        if isinstance(manifest["step"], bool) or not isinstance(manifest["step"], int) or manifest["step"] < 0:
            raise ValueError
        for name in ("encoder", "view"):  # what becomes a part of a configuration
            if found := configuration.foreign(manifest.get(name, {})):
                raise CheckpointError(f"{path}: {name}.{found}: may hold values only; nothing was run")
        return manifest
    except OSError as error:
        raise CheckpointError(f"{path}: no readable manifest.json ({error.strerror}), so it is no checkpoint") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path / 'manifest.json'}: is damaged") from None


def places(run: Path) -> dict[Path, int]:
    """What bears a checkpoint's name in a run's folder, be it one or not, and the step in the name.

    OSError if the folder cannot be listed: it must not pass for an empty one.
    """
    names = {name: re.fullmatch(r"step_(\d+)", name, re.A) for name in os.listdir(run)}
    return {run / name: int(match[1]) for name, match in names.items() if match}


def completed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with what those of the first edition do not say, as it then was: its dropout was of attention weights
    too.
    """
    unsaid = {
        "encoder": {"attention_dropout": manifest.get("encoder", {}).get("dropout"), "gelu": "exact"},
        "classifier": {"loss": "softmax"},
        "view": {"fit": "cover"},
    }
    return {**manifest, **{name: own | manifest[name] for name, own in unsaid.items() if name in manifest}}


def complete(run: Path) -> list[Path]:
    """The checkpoints in a run's folder, the newest last, which their manifests tell, however they are named.

    One whose manifest cannot be trusted has its place by its name. OSError if the folder cannot be listed.
    """
    named = {path: step for path, step in places(run).items() if path.is_dir()}
    steps = {path: step_of(path, otherwise=step) for path, step in named.items()}
    # Of two of the same step (one is a copy) the one that is named by it is the later.
    return sorted(steps, key=lambda path: (steps[path], steps[path] == named[path], path.name))


def step_of(path: Path, otherwise: int) -> int:
    """The step that a checkpoint's verified manifest tells, or `otherwise` where there is none."""
    try:
        return read(path)["step"]
    except UserError:
        return otherwise


def find(asked: str, *, outputs: str, stage: str, say: Callable[[str], None]) -> Path:
    """The folder of the checkpoint that a user means by the option checkpoint=`asked`.

    newest: the last one of the finished run of that stage under `outputs` that was written last; `say` is told which
    that is, and what else there is. Otherwise a path: a checkpoint's folder, or a run's, for its newest; a foreign
    file. OptionError if there is none.
    """
    if asked == "newest":
        if outputs in (None, "", "null"):
            raise OptionError("outputs", outputs, "must be the folder of all runs")
        return _newest(Path(outputs), stage, say)
    return located(asked)


def located(asked: str | Path) -> Path:
    """The checkpoint at a path: its folder itself, or a run's, for the newest in it; a foreign file.

    OptionError if there is none.
    """
    path = Path(str(asked))
    try:
        if (path / "manifest.json").is_file():
            return path
        if path.is_file():
            files.check(path)
            return path
        if not path.is_dir():
            right = "no such folder; give that of a checkpoint (step_…) or of its run, or a file of foreign weights"
            raise OptionError("checkpoint", asked, right)
        if not (found := complete(path)):
            raise OptionError("checkpoint", asked, "holds no checkpoint (a folder step_…)")
    except OSError as error:
        raise OptionError("checkpoint", asked, f"cannot be read ({error.strerror})") from None
    return found[-1]


@dataclass(frozen=True, order=True)
class _Run:
    """A run under the folder of all: when it was last written, its newest checkpoint, and what became of it.

    passed: why it is not what a user means by the newest, "" if it may be. scratch: it began with random weights.
    """

    written: float
    path: Path
    scratch: bool
    passed: str


def _runs(outputs: Path, stage: str) -> Iterator[_Run]:
    """The runs of a stage; what is damaged, or no run of ours, is passed over."""
    for file in outputs.rglob("config.yaml"):
        try:
            path = complete(file.parent)[-1]
            manifest, config = read(path), Configuration.read(file).values
            step, steps = manifest["step"], config["recipe"]["steps"]
            written = (path / "manifest.json").stat().st_mtime
        except (UserError, OSError, LookupError, TypeError):
            continue
        if manifest.get("stage") != stage:
            continue
        scratch = stage == FINETUNE and manifest.get("start") == "scratch"
        passed = ""
        if step != steps:
            passed = f"at step {step} of {steps}"
        elif scratch and config.get("compare"):
            passed = "the arm of a comparison that began with random weights"
        elif config.get("sweep") and config.get("development") is not None:
            passed = "trained to choose a learning rate"
        yield _Run(written, path, scratch, passed)


def _newest(outputs: Path, stage: str, say: Callable[[str], None]) -> Path:
    what = "pre-training" if stage == PRETRAIN else "fine-tuning"
    found = sorted(_runs(outputs, stage), reverse=True)
    # A classifier that began with random weights is meant only where there is no other.
    results = sorted((run for run in found if not run.passed), key=lambda run: run.scratch)
    if not results:
        if not found:
            right = f"run tools/{stage}.py first, or give checkpoint=PATH"
            raise UserError(f"there is no {what} run under {outputs}: {right}")
        first = f"{found[0].path.parent} is {found[0].passed}"
        raise UserError(f"no {what} run under {outputs} is finished ({first}): let it finish, or give checkpoint=PATH")
    best, *others = results
    rest = [f"{run.path.parent} (began with random weights)" if run.scratch else str(run.path.parent) for run in others]
    rest += [f"{run.path.parent} ({run.passed})" for run in found if run.passed]
    more = f", and {len(rest) - _SHOWN} more" if len(rest) > _SHOWN else ""
    say(
        f"{best.path}: of the {what} run that was finished last"
        + (f"; there are also {', '.join(rest[:_SHOWN])}{more}" if rest else "")
    )
    return best.path
