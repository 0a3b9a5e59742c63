"""Load the encoders of against=[RUN,FILE,{path:FILE,image_size:224}]. This module does not import torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.data.sources.decode_options import PixelFormat
from ssvit.errors import OptionError, pair, within
from ssvit.evaluation.baselines import PIXELS, RANDOM
from ssvit.evaluation.options import FeatureSpec
from ssvit.evaluation.report.options import Evaluate
from ssvit.loading.options import LoadEncoder, pixel_format


@dataclass(frozen=True)
class Other:
    """Describe an encoder for comparison.

    Attributes:
        name: Name of the encoder.
        loading: Options of the encoder.
        specs: Descriptions of its features.
        source: Options of the data set, whose files are decoded in the pixel format of the encoder.
    """

    name: str
    loading: LoadEncoder
    specs: Sequence[FeatureSpec]
    source: Any

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
        layers, pooling = [spec.layer for spec in self.specs], self.specs[-1].pooling
        size = list(self.image_size)
        return {"path": str(self.loading.path), "image_size": size, "pooling": pooling, "layers": layers}


def fitted(entry: Mapping[str, Any], source: Any, images: Mapping[str, Any]) -> tuple[LoadEncoder, Any]:
    """Return the options of an encoder for some images, and those of the images in its pixel format.

    Photographs are decoded in grey or in colour, as the encoder requires. Other images have the channels and range of a
    run; all other weights are converted to the images.

    Args:
        entry: Options of the encoder that are set.
        source: Options of the data set.
        images: Options of an encoder whose weights are converted: channels, image_mean and image_std.
    """
    loading = LoadEncoder(**entry)
    checkpoint = loading.checkpoint()
    pixels = pixel_format(checkpoint)
    if (
        isinstance(source, PixelFormat)
        and loading.channels in (None, pixels.channels)
        and (checkpoint.describes_images or (source.range is None and {source.channels, pixels.channels} <= {1, 3}))
    ):
        return loading, source.changed(channels=pixels.channels, range=pixels.range)
    return LoadEncoder(**{**images, **entry}), source


def others(options: Evaluate, evaluated: Checkpoint) -> list[Other]:
    """Return the encoders of the option `against`, named by run or file, or by path if names are not unique.

    Args:
        options: Options of the evaluation.
        evaluated: The evaluated checkpoint.

    Raises:
        OptionError: If an entry is invalid, repeated, or lacks one of the layers.
    """
    opened: list[tuple[LoadEncoder, Checkpoint, Any]] = []
    source = options.data
    images = {name: getattr(options.encoder, name, None) for name in ("channels", "image_mean", "image_std")}
    for entry in options.against or ():
        with within("against"):
            entry = {"path": entry} if isinstance(entry, str) else entry
            loading, decoded = fitted(entry, source, images)
            checkpoint = loading.checkpoint()
            loading.loaded()
        if checkpoint.path in [evaluated.path, *(other.path for _, other, _ in opened)]:
            raise OptionError("against", str(loading.path), "must be another checkpoint, listed once")
        opened.append((loading, checkpoint, decoded))
    count = Counter([evaluated.name, RANDOM, PIXELS, *(checkpoint.name for _, checkpoint, _ in opened)])
    compared = []
    for loading, checkpoint, decoded in opened:
        name = checkpoint.name if count[checkpoint.name] == 1 else str(checkpoint.path)
        try:
            with within("features"):
                specs = options.features.specs(checkpoint.encoder | loading.changes)
        except OptionError as error:
            raise OptionError(error.name, error.value, f"{error.expectation} ({name})") from None
        compared.append(Other(name, loading, specs, decoded))
    return compared
