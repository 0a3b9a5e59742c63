"""A checkpoint, described without reading its weights. No torch.

A run's folder holds config.yaml and its checkpoints, step_*/, each with a manifest. `ssvit.loading.finding` finds
the same facts in a file of another project's weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ssvit.checkpoints import manifest
from ssvit.checkpoints.run_folder import reported_run
from ssvit.options import OptionError

if TYPE_CHECKING:
    from torch import Tensor

PRETRAIN, FINETUNE = STAGES = ("pretrain", "finetune")
SCRATCH = "scratch"  # in place of a checkpoint: random weights


class Foreign(Protocol):
    """An encoder in a file of another project, as `ssvit.exchange.reading.Foreign`."""

    @property
    def name(self) -> str:
        """The name of its repository, or of the file without its suffix."""
        ...

    def weights(self) -> dict[str, "Tensor"]:
        """Return its state, by ssvit's names."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, or a foreign file."""

    path: Path  # its folder, or the file
    facts: Mapping[str, Any]  # its manifest, or for a foreign file what stands for one
    foreign: Foreign | None = None  # the encoder in a foreign file

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Return the checkpoint in its folder, or the newest one in that of its run.

        Raises:
            OptionError: There is no checkpoint.
            CheckpointError: It is damaged.
        """
        if (folder := folder_of(Path(path))) is None:
            raise OptionError("checkpoint", path, "must be the folder of a checkpoint (step_…) or of its run")
        return cls(folder, manifest.read(folder))

    @property
    def step(self) -> int:
        """The updates that it was trained for, 0 for a foreign file."""
        return self.facts["step"]

    @property
    def encoder(self) -> dict[str, Any]:
        """The arguments of its encoder."""
        return self.facts["encoder"]

    @property
    def backbone(self) -> str:
        """The name of the encoder among the trained modules."""
        return self.facts.get("backbone", "encoder")

    @property
    def has_classifier(self) -> bool:
        """Whether it names classes."""
        return "classifier" in self.facts

    @property
    def checksum(self) -> str:
        """The sha256 by which it is known."""
        return self.facts["seal"]

    @property
    def name(self) -> str:
        """The name of its run, or of a foreign file."""
        return self.foreign.name if self.foreign else self.path.parent.name

    def home(self, outputs: str | Path) -> Path:
        """The folder for what is made of it: that of its run, or one in the folder of all runs."""
        return Path(outputs, self.name) if self.foreign else self.path.parent


def folder_of(path: Path) -> Path | None:
    """Return the folder of a checkpoint, or of the newest one in the folder of its run; None if there is none.

    The folder of a comparison stands for its first pre-trained run. OSError if the folder cannot be listed.
    """
    if (path / "manifest.json").is_file():
        return path
    checkpoints = path.is_dir() and (manifest.complete(path) or manifest.complete(reported_run(path)))
    return checkpoints[-1] if checkpoints else None
