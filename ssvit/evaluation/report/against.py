"""Load the encoders of against=[RUN,FILE,{path:FILE,image_size:224}]. This module does not import torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.evaluation.baselines import PIXELS, RANDOM
from ssvit.evaluation.features_options import Reading
from ssvit.evaluation.report.options import Evaluate
from ssvit.loading.encoder_options import LoadEncoder
from ssvit.options import OptionError, pair, within


@dataclass(frozen=True)
class Other:
    """Describe an encoder for comparison, and the readings of its features."""

    name: str
    loading: LoadEncoder
    readings: Sequence[Reading]

    @property
    def image_size(self) -> tuple[int, int]:
        """Return height and width of the encoder's images: the configured ones, or else the size of its training."""
        return pair("image_size", self.loading.loaded().image_size)

    @property
    def checksum(self) -> str:
        """Return the checksum that identifies the encoder's checkpoint."""
        return self.loading.checkpoint().checksum

    @property
    def metadata(self) -> dict[str, Any]:
        """Return path, image size and features of the encoder as plain data."""
        layers, pooling = [reading.layer for reading in self.readings], self.readings[-1].pooling
        size = list(self.image_size)
        return {"path": str(self.loading.path), "image_size": size, "pooling": pooling, "layers": layers}


def others(options: Evaluate, evaluated: Checkpoint) -> list[Other]:
    """Return the encoders of the option `against`, named by run or file, or by path if names are not unique.

    Args:
        options: Options of the evaluation.
        evaluated: The evaluated checkpoint.

    Raises:
        OptionError: If an entry is invalid, repeated, or lacks one of the layers.
    """
    opened: list[tuple[LoadEncoder, Checkpoint]] = []
    images = {name: getattr(options.encoder, name, None) for name in ("channels", "image_mean", "image_std")}
    for entry in options.against or ():
        with within("against"):
            loading = LoadEncoder(**{**images, **({"path": entry} if isinstance(entry, str) else entry)})
            checkpoint = loading.checkpoint()
            loading.loaded()
        if checkpoint.path in [evaluated.path, *(other.path for _, other in opened)]:
            raise OptionError("against", str(loading.path), "must be another checkpoint, listed once")
        opened.append((loading, checkpoint))
    count = Counter([evaluated.name, RANDOM, PIXELS, *(checkpoint.name for _, checkpoint in opened)])
    compared = []
    for loading, checkpoint in opened:
        name = checkpoint.name if count[checkpoint.name] == 1 else str(checkpoint.path)
        try:
            with within("features"):
                readings = options.features.readings(checkpoint.encoder | loading.changes)
        except OptionError as error:
            raise OptionError(error.name, error.value, f"{error.expectation} ({name})") from None
        compared.append(Other(name, loading, readings))
    return compared
