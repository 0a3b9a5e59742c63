"""Find the checkpoint that a user requests: one of ssvit, or a file of foreign weights. No torch."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ssvit.checkpoints import manifest
from ssvit.checkpoints.checkpoint import FINETUNE, PRETRAIN, Checkpoint, folder_of
from ssvit.checkpoints.configuration import Configuration
from ssvit.exchange.reading_options import FOREIGN_OPTIONS, FORMATS, HUB
from ssvit.options import OptionError, UserError, within

NEWEST = "newest"
_SHOWN = 3  # runs that are listed in addition to the newest


def open_checkpoint(path: str | Path, options: Mapping[str, object] | None = None) -> Checkpoint:
    """Open the checkpoint at a path: its folder, the folder of its run (for the newest), or a foreign file.

    Args:
        path: The path, or hf://OWNER/NAME for foreign weights on the Hugging Face Hub.
        options: As for `ssvit.exchange.reading.read`.

    Raises:
        OptionError: There is no checkpoint, or an option is required or not permitted.
        CheckpointError: The checkpoint is damaged.
        ForeignError: The layout of the file is unknown.
    """
    path = _locate(path)
    given = {name: options[name] for name in FOREIGN_OPTIONS if options and options.get(name) is not None}
    if path.is_file():
        from ssvit.loading import foreign

        return foreign.open_file(path, given)
    for name, value in given.items():
        raise OptionError(name, value, "is told of foreign files alone; a checkpoint of ours has its own")
    return Checkpoint(path, manifest.read(path))


def name_of(path: Path) -> str:
    """Return the name of a checkpoint's run, or of a foreign file or its repository."""
    if path.is_dir():
        return path.parent.name

    from ssvit.exchange import hub

    return hub.name(path)


def find(
    which: str, *, outputs: str, stage: str, say: Callable[[str], None], options: Mapping[str, object] | None = None
) -> Checkpoint:
    """Find the checkpoint of the option checkpoint=`which`.

    Args:
        which: As for `open_checkpoint`; or newest, for the finished run of a stage that was written last.
        outputs: Folder of all runs.
        stage: Stage of the run for newest: pretrain or finetune.
        say: Called with a line that names the newest run and other runs.
        options: As for `open_checkpoint`.

    Raises:
        OptionError: There is no checkpoint at the path.
        UserError: No run is finished.
    """
    if which == NEWEST and outputs in (None, "", "null"):
        raise OptionError("outputs", outputs, "must be the folder of all runs")
    path = _newest(Path(outputs), stage, say) if which == NEWEST else _locate(which)
    with within("encoder"):  # group that contains `options`
        return open_checkpoint(path, options)


def _locate(given: str | Path) -> Path:
    """Return the folder of the checkpoint at a path, or the foreign file, which is downloaded if necessary.

    Raises:
        OptionError: There is no checkpoint.
    """
    path = Path(str(given))
    if str(given).startswith(HUB):
        from ssvit.exchange import hub

        path = hub.fetch(str(given))
    try:
        if (folder := folder_of(path)) is not None:
            return folder
        if path.is_file():
            if path.suffix not in FORMATS:
                raise OptionError("checkpoint", path, f"a file of weights ends in {', '.join(FORMATS)}")
            return path
        if not path.is_dir():
            right = "no such folder; give that of a checkpoint (step_…) or of its run, or a file of foreign weights"
            raise OptionError("checkpoint", given, right)
        weights = sorted(file.name for file in path.iterdir() if file.suffix in FORMATS)
        instead = f"; give its file {weights[0]}" if weights else ""
        raise OptionError("checkpoint", given, f"holds no checkpoint (a folder step_…){instead}")
    except OSError as error:
        raise OptionError("checkpoint", given, f"cannot be read ({error.strerror})") from None


class _Run(NamedTuple):
    """A candidate for checkpoint=newest."""

    written: float
    path: Path  # folder of its newest checkpoint
    rank: int  # 0 for a result, 1 if trained from random weights, 2 if never selected
    remark: str


def _runs(outputs: Path, stage: str) -> Iterator[_Run]:
    """Yield the runs of a stage; damaged runs and other files are skipped."""
    for file in outputs.rglob("config.yaml"):
        try:
            path = manifest.complete(file.parent)[-1]
            facts, config = manifest.read(path), Configuration.read(file).values
            step, steps = facts["step"], config["recipe"]["steps"]
            written = (path / "manifest.json").stat().st_mtime
        except (UserError, OSError, LookupError, TypeError):
            continue
        if facts.get("stage") != stage:
            continue
        scratch = stage == FINETUNE and facts.get("start") == "scratch"
        rank, remark = 0, ""
        if step != steps and not facts.get("ended"):
            rank, remark = 2, f"at step {step} of {steps}"
        elif scratch and config.get("compare"):
            rank, remark = 2, "the arm of a comparison that began with random weights"
        elif config.get("sweep") and config.get("development") is not None:
            rank, remark = 2, "trained to choose a learning rate"
        elif scratch:
            rank, remark = 1, "began with random weights"
        yield _Run(written, path, rank, remark)


def _newest(outputs: Path, stage: str, say: Callable[[str], None]) -> Path:
    """Return the newest checkpoint of the last finished run of a stage, and report it with `say`."""
    kind = "pre-training" if stage == PRETRAIN else "fine-tuning"
    runs = sorted(sorted(_runs(outputs, stage), reverse=True), key=lambda run: run.rank)
    if not runs:
        right = f"run the command {stage} first, or give checkpoint=PATH"
        raise UserError(f"there is no {kind} run under {outputs}: {right}")
    best, *others = runs
    if best.rank == 2:
        first = f"{best.path.parent} is {best.remark}"
        raise UserError(f"no {kind} run under {outputs} is finished ({first}): let it finish, or give checkpoint=PATH")
    rest = [f"{run.path.parent} ({run.remark})" if run.remark else str(run.path.parent) for run in others]
    more = f", and {len(rest) - _SHOWN} more" if len(rest) > _SHOWN else ""
    also = f"; there are also {', '.join(rest[:_SHOWN])}{more}" if rest else ""
    say(f"{best.path}: of the {kind} run that was finished last{also}")
    return best.path
