"""The features of pictures, for the commands that store them. Loads torch only when they are computed."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ssvit.checkpoints.checkpoint import PRETRAIN, find
from ssvit.checkpoints.options import eval_transform, pixel_format
from ssvit.cli.launch import Plain, say
from ssvit.data.options import PixelFormat
from ssvit.evaluation.options import readings
from ssvit.options import OptionError, within

if TYPE_CHECKING:
    from ssvit.retrieval.gallery import Describer


def check(plain: Plain, features: Mapping[str, Any]) -> "tuple[Callable[..., Describer], PixelFormat]":
    """Find the checkpoint and check which features of it are asked for, of one layer alone.

    Returns what loads the encoder and makes its `Describer`, with the options of that, and what the encoder takes of
    image files.
    """
    checkpoint = find(plain["checkpoint"], outputs=plain["outputs"], stage=PRETRAIN, options=plain["encoder"], say=say)
    with within("features"):
        found = readings(checkpoint.encoder, **features)
    if len(found) > 1:
        raise OptionError("features.layer", features["layer"], "must be one")
    transform, pixels = eval_transform(checkpoint), pixel_format(checkpoint)

    def make(**options: Any) -> "Describer":
        from ssvit.checkpoints.storage import load_encoder
        from ssvit.data.augment.crop import CenterCrop
        from ssvit.evaluation.features import Frozen
        from ssvit.figures.style import use_bands
        from ssvit.retrieval.gallery import Describer

        use_bands({**checkpoint.encoder, "range": pixels.range, "shown": [0, 1, 2]})
        frozen = Frozen(load_encoder(checkpoint.path, **plain["encoder"]), found, identity=checkpoint.checksum[:16])
        return Describer(frozen, CenterCrop(**vars(transform)), **options)

    return make, pixels
