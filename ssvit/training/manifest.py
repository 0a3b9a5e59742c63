"""What a checkpoint says of itself, and which checkpoint a user means: read without torch.

A run's folder holds config.yaml and step_*/ (its checkpoints); each of these has a manifest.json with the step, what
was trained ("encoder", "stage", …), and a sha256 of every file and of itself, the seal. A file of another framework's
weights is a checkpoint too, whose manifest is what `ssvit.exchange` finds in it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ssvit import rules
from ssvit.durable import seal
from ssvit.exchange import files, reading
from ssvit.options import OptionError, UserError, one_of

SCHEMA = 2
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
        manifest = json.loads((path / "manifest.json").read_bytes())
        if manifest["seal"] != seal(manifest):
            raise ValueError
        if manifest["schema"] != SCHEMA:
            raise CheckpointError(f"{path}: has schema {manifest['schema']}, this version reads {SCHEMA}")
        if not isinstance(manifest["sha256"], dict):
            raise ValueError
        return manifest
    except OSError as error:
        raise CheckpointError(f"{path}: no readable manifest.json ({error.strerror}), so it is no checkpoint") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path / 'manifest.json'}: is damaged") from None


def complete(run: Path) -> list[Path]:
    """The checkpoints in a run's folder, the newest last."""
    return sorted(path for path in run.glob("step_*") if path.name.removeprefix("step_").isdigit())


def find(asked: str, *, outputs: str, stage: str) -> Path:
    """The folder of the checkpoint that a user means by the option checkpoint=`asked`.

    newest: the last one of the finished run of that stage under `outputs` that was written last. Otherwise a path: a
    checkpoint's folder, or a run's, for its newest; a foreign file. OptionError if there is none.
    """
    return _newest_finished(Path(outputs), stage) if asked == "newest" else located(asked)


def located(asked: str | Path) -> Path:
    """The checkpoint at a path: its folder itself, or a run's, for the newest in it; a foreign file.

    OptionError if there is none.
    """
    path = Path(str(asked))
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
    return found[-1]


def _newest_finished(outputs: Path, stage: str) -> Path:
    finished, unfinished = [], []
    for config in outputs.rglob("config.yaml"):
        for path in complete(config.parent)[-1:]:
            try:
                manifest, steps = read(path), yaml.safe_load(config.read_text())["recipe"]["steps"]
            except (CheckpointError, yaml.YAMLError, OSError, KeyError, TypeError):
                continue  # damaged, or no run of ours: then it is not the one that is meant
            if manifest.get("stage") == stage:
                written = (path / "manifest.json").stat().st_mtime
                (finished if manifest["step"] == steps else unfinished).append((written, path, steps))
    if finished:
        return max(finished)[1]
    what = "pre-training" if stage == PRETRAIN else "fine-tuning"
    if unfinished:
        _, path, steps = max(unfinished)
        begun = f"{path.parent} is at step {int(path.name.removeprefix('step_'))} of {steps}"
        raise UserError(f"no {what} run under {outputs} is finished ({begun}): let it finish, or give checkpoint=PATH")
    raise UserError(f"there is no {what} run under {outputs}: run tools/{stage}.py first, or give checkpoint=PATH")


def check_encoder(*, path: Any, resize: Any, announce: bool, **changes: Any) -> None:
    """OptionError unless the encoder of a checkpoint can be built with `changes`, of those in `rules.CHANGEABLE`.

    Those of a foreign file may hold what is told of it too.
    """
    one_of("resize", resize, rules.RESIZE)
    path = Path(path)
    trained = read(path, changes)["encoder"]
    rules.encoder(**{**trained, **untold(path, changes)})


def untold(path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without those that tell what a foreign file does not; of a checkpoint of ours they change nothing."""
    told = {name for name in reading.TOLD if path.is_file() or options.get(name) is None}
    return {name: value for name, value in options.items() if name not in told}
