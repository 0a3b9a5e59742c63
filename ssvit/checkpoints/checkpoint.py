"""Describe a checkpoint without reading its weights. No torch.

A run folder contains config.yaml and checkpoints, step_*/, each with a manifest. `ssvit.loading.finding` provides the
same description for files of foreign weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssvit.checkpoints.configuration import Configuration
from ssvit.checkpoints.manifest import complete, read_manifest
from ssvit.checkpoints.run_folder import reported_run
from ssvit.config.dotted import at
from ssvit.errors import OptionError, UserError

if TYPE_CHECKING:
    from torch import Tensor

PRETRAIN, FINETUNE = "pretrain", "finetune"  # stages
SCRATCH = "scratch"  # value of checkpoint= for random weights


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with a verified manifest, a file of foreign weights, or an exported graph."""

    path: Path  # folder of the checkpoint, or the file
    manifest: Mapping[str, Any]  # the manifest, or equivalent entries of a file
    foreign: Callable[[], dict[str, "Tensor"]] | None = None  # reads the weights of a foreign file
    graph: Any = None  # onnxruntime session of an exported graph

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Open the checkpoint in a folder, or the newest one in the folder of its run.

        Raises:
            OptionError: There is no checkpoint.
            CheckpointError: The manifest is damaged.
        """
        if (folder := checkpoint_folder(Path(path))) is None:
            raise OptionError("checkpoint", path, "must be the folder of a checkpoint (step_…) or of its run")
        return cls(folder, read_manifest(folder))

    @property
    def describes_images(self) -> bool:
        """Return whether image size and pixel format are those of a run; another project's file contains neither."""
        return self.foreign is None or "view" in self.manifest

    @property
    def step(self) -> int:
        """Return the number of updates of the training; 0 for a foreign file."""
        return self.manifest["step"]

    @property
    def encoder(self) -> dict[str, Any]:
        """Return the arguments of the encoder."""
        return self.manifest["encoder"]

    @property
    def backbone(self) -> str:
        """Return the name of the encoder's module within the trained model."""
        return self.manifest.get("backbone", "encoder")

    @property
    def has_classifier(self) -> bool:
        """Return whether the checkpoint contains a classifier."""
        return "classifier" in self.manifest

    @property
    def has_segmenter(self) -> bool:
        """Return whether the checkpoint contains a segmentation model."""
        return "segmenter" in self.manifest

    @property
    def checksum(self) -> str:
        """Return the sha256 of the manifest, or of the file of an exported graph, which identifies the checkpoint."""
        return self.manifest["seal"]

    @property
    def precision(self) -> str | None:
        """Return the precision of an exported graph, 32 or int8; None for weights, whose precision can be chosen."""
        return None if self.graph is None else self.manifest.get("precision")

    @property
    def name(self) -> str:
        """Return the name of the run, or of the foreign file."""
        return self.manifest["name"] if self.foreign else self.path.parent.name

    @property
    def run_folder(self) -> Path | None:
        """Return the folder of the run; None for a foreign file."""
        return None if self.foreign else self.path.parent

    def home(self, outputs: str | Path) -> Path:
        """Return the output folder for this checkpoint: the run folder, or a folder in `outputs` for a foreign file."""
        return self.run_folder or Path(outputs, self.name)


def stages_of(checkpoint: Checkpoint) -> list[tuple[Path, Mapping[str, Any], int]] | None:
    """Return folder, options and last step of the run of a checkpoint and of the runs that it continues, last first.

    The result is None if one of them is unknown, such as the training of another project's weights.
    """
    stages: list[tuple[Path, Mapping[str, Any], int]] = []
    start: Checkpoint | None = checkpoint
    try:
        while start:
            if start.run_folder is None:
                return None
            values = Configuration.read(start.run_folder / "config.yaml").values
            stages.append((start.run_folder, values, start.step))
            path = at(values, "encoder.path")
            start = Checkpoint.open(path) if path else None
    except (UserError, OSError):
        return None
    return stages


def checkpoint_folder(path: Path) -> Path | None:
    """Return the folder of a checkpoint, or of the newest one in the folder of its run; None if there is none.

    For the folder of a comparison, this is a checkpoint of the run of `reported_run`. Raises OSError if the folder
    cannot be listed.
    """
    if (path / "manifest.json").is_file():
        return path
    checkpoints = path.is_dir() and (complete(path) or complete(reported_run(path)))
    return checkpoints[-1] if checkpoints else None
