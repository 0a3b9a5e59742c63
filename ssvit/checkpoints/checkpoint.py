"""Which checkpoint a user means, and what it is: one of ours, or a file of another framework's weights. No torch.

A run's folder holds config.yaml and step_*/ (its checkpoints), each with a manifest; of a foreign file
`ssvit.exchange.reading` finds out what a manifest would say.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ssvit.checkpoints import manifest
from ssvit.checkpoints.configuration import Configuration
from ssvit.exchange import files, reading
from ssvit.exchange.reading import TOLD, Foreign
from ssvit.options import OptionError, UserError, within

PRETRAIN, FINETUNE = STAGES = ("pretrain", "finetune")
NEWEST = "newest"
_SHOWN = 3  # other runs that are named beside the newest


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found and verified.

    path: its folder, or the foreign file. facts: what its manifest says. foreign: what was found in the file, None for
    a checkpoint of ours.
    """

    path: Path
    facts: Mapping[str, Any]
    foreign: Foreign | None = None

    @classmethod
    def open(cls, asked: str | Path, told: Mapping[str, Any] | None = None) -> "Checkpoint":
        """The checkpoint at a path: its folder itself, or a run's, for the newest in it; a foreign file.

        told: options that may hold what a foreign file does not tell (`reading.TOLD`), None where the user leaves it
        open. OptionError if there is no checkpoint, or what it holds must be told; CheckpointError if it is damaged;
        ForeignError if it is in no layout that is known.
        """
        path = _located(asked)
        given = {name: told[name] for name in TOLD if told and told.get(name) is not None}
        if path.is_file():
            foreign, facts = _read_foreign(path, _version(path), json.dumps(given, default=list))
            return cls(path, facts, foreign)
        for name, value in given.items():
            raise OptionError(name, value, "is told of foreign files alone; a checkpoint of ours has its own")
        return cls(path, manifest.read(path))

    @property
    def is_foreign(self) -> bool:
        """Whether it is a file of another framework's weights."""
        return self.foreign is not None

    @property
    def step(self) -> int:
        """The updates that it was trained for; 0 of a foreign file."""
        return self.facts["step"]

    @property
    def encoder(self) -> dict[str, Any]:
        """The arguments of its encoder."""
        return self.facts["encoder"]

    @property
    def backbone(self) -> str:
        """The module of what was trained that is its encoder."""
        return self.facts.get("backbone", "encoder")

    @property
    def has_classifier(self) -> bool:
        """Whether it names classes."""
        return "classifier" in self.facts

    @property
    def checksum(self) -> str:
        """The sha256 that tells it from all others."""
        return self.facts["seal"]

    @property
    def name(self) -> str:
        """What to call it: the name of its run, or of the file without its suffix."""
        return self.path.stem if self.is_foreign else self.path.parent.name

    def home(self, outputs: str | Path) -> Path:
        """The folder for what is made of it: that of its run, or one in the folder of all runs."""
        return Path(outputs, self.path.stem) if self.is_foreign else self.path.parent


@lru_cache(maxsize=4)
def _read_foreign(path: Path, version: tuple[tuple[str, int, int], ...], told: str) -> tuple[Foreign, dict[str, Any]]:
    """A foreign file and what stands for its manifest, read once for each version of it."""
    foreign = reading.read(path, json.loads(told))
    return foreign, foreign.facts


def _version(path: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes with a file, or with those beside it that describe it."""
    described = [(file, file.stat()) for file in (path, *sorted(path.parent.glob("*.json")))]
    return tuple((file.name, status.st_size, status.st_mtime_ns) for file, status in described)


def find(
    asked: str, *, outputs: str, stage: str, say: Callable[[str], None], told: Mapping[str, Any] | None = None
) -> Checkpoint:
    """The checkpoint that a user means by the option checkpoint=`asked`.

    newest: the last one of the finished run of that stage under `outputs` that was written last; `say` is told which
    that is, and what else there is. Otherwise a path, as `Checkpoint.open` takes it, and told. OptionError if there is
    none.
    """
    if asked == NEWEST:
        if outputs in (None, "", "null"):
            raise OptionError("outputs", outputs, "must be the folder of all runs")
        path = _newest(Path(outputs), stage, say)
    else:
        path = _located(asked)
    with within("encoder"):  # whose options are told
        return Checkpoint.open(path, told)


def _located(asked: str | Path) -> Path:
    """The folder of the checkpoint at a path, or the foreign file. OptionError if there is none."""
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
        if not (found := manifest.complete(path)):
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
            path = manifest.complete(file.parent)[-1]
            facts, config = manifest.read(path), Configuration.read(file).values
            step, steps = facts["step"], config["recipe"]["steps"]
            written = (path / "manifest.json").stat().st_mtime
        except (UserError, OSError, LookupError, TypeError):
            continue
        if facts.get("stage") != stage:
            continue
        scratch = stage == FINETUNE and facts.get("start") == "scratch"
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
