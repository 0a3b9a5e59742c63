"""The features of pictures, for the commands that store them. Loads torch only when they are computed."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import yaml

from ssvit.checkpoints.checkpoint import PRETRAIN, Checkpoint
from ssvit.checkpoints.configuration import Configuration, ConfigurationError
from ssvit.checkpoints.finding import find
from ssvit.checkpoints.loading_options import eval_transform, pixel_format
from ssvit.config.command_line import CommandLine
from ssvit.config.composed import Config
from ssvit.config.declaration import find as find_options
from ssvit.data.decode_options import PixelFormat, bands
from ssvit.evaluation.features_options import readings
from ssvit.options import OptionError, within

if TYPE_CHECKING:
    from ssvit.data.source import Data
    from ssvit.retrieval.gallery import Describer


def check(config: Config, features: Mapping[str, Any]) -> "tuple[Checkpoint, Callable[..., Describer], PixelFormat]":
    """Find the checkpoint and check which features of it are asked for, of one layer alone.

    Returns the checkpoint, what loads its encoder and makes its `Describer`, with the options of that, and what the
    encoder takes of image files.
    """
    plain, say = config.values, config.line.say
    checkpoint = find(plain["checkpoint"], outputs=plain["outputs"], stage=PRETRAIN, options=plain["encoder"], say=say)
    with within("features"):
        found = readings(checkpoint.encoder, **features)
    if len(found) > 1:
        raise OptionError("features.layer", features["layer"], "must be one")
    say(f"features: layer {found[0].layer} of {checkpoint.encoder.get('depth', 1)}, {found[0].pooling}")
    transform, pixels = eval_transform(checkpoint), pixel_format(checkpoint)
    shown = _shown(plain["data"], checkpoint)
    bands("data.shown", shown, pixels.channels)

    def make(**options: Any) -> "Describer":
        from ssvit.checkpoints.loading import load_encoder
        from ssvit.data.augment.crop import CenterCrop
        from ssvit.evaluation.features import Frozen
        from ssvit.figures.display import use_bands
        from ssvit.retrieval.gallery import Describer

        use_bands({**checkpoint.encoder, "range": pixels.range, "shown": shown})
        frozen = Frozen(load_encoder(checkpoint.path, **plain["encoder"]), found, identity=checkpoint.checksum[:16])
        return Describer(frozen, CenterCrop(**vars(transform)), **options)

    return checkpoint, make, pixels


def needs_standardizing(checkpoint: Checkpoint, line: CommandLine) -> bool:
    """Return whether the objective of a checkpoint's run declares so; false for weights without their run."""
    try:
        run = Configuration.read(checkpoint.path.parent / "config.yaml")
    except (FileNotFoundError, ConfigurationError):
        return False
    builder = ""
    for file in line.with_bases(f"objective/{run.choices.get('objective')}"):
        builder = (yaml.safe_load(file.read_text()) or {}).get("objective", {}).get("_target_", builder)
    return getattr(find_options(builder), "needs_standardizing", False)


def data_set(config: Config, pixels: PixelFormat) -> "Data":
    """Build a data set whose images are read as an encoder takes them."""
    options = vars(pixels) if "channels" in config.value("data.source") else {}
    return config.build("data.source", **options)


def _shown(data: Mapping[str, Any] | None, checkpoint: Checkpoint) -> Any:
    """The channels that pictures show: those of the data set that is named, or else of the run's own."""
    if data is None:
        with suppress(FileNotFoundError):  # weights without their run
            data = Configuration.read(checkpoint.path.parent / "config.yaml").values.get("data")
    return (data or {}).get("shown", [0, 1, 2])
