"""The RGB images by which pictures show images of any number of channels.

Letters: c channels, h, w pixels.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor


class Bands(NamedTuple):
    """How images of many channels are shown: those that are red, green and blue, and the ends of each one's scale."""

    shown: Sequence[int]
    low: Tensor  # (c,)
    high: Tensor


_bands: Bands | None = None


def use_bands(data: Mapping[str, Any]) -> None:
    """Show images from now on as the options of their data set tell: channels, range, shown, mean and std.

    Of more than three channels the three `shown` are red, green and blue. These, and images of one or two channels
    that have a range, are scaled so that mean - 2 std is black and mean + 2 std is white, the same in all pictures.
    """
    global _bands
    channels = data.get("channels", 3)
    _bands = None
    if channels == 3 or (channels < 3 and data.get("range") is None):
        return
    mean, std = (torch.tensor(data[name]).float().expand(channels) for name in ("mean", "std"))
    shown = data["shown"] if channels > 3 else range(channels)
    _bands = Bands(list(shown), mean - 2 * std, mean + 2 * std)


def displayed(images: Tensor) -> Tensor:
    """(…, c, h, w), in [0, 1] or uint8, -> (…, 3, h, w) in [0, 1], on the CPU: see `use_bands`.

    Three channels stay as they are. Without `use_bands`, any other number becomes its mean in grey.
    """
    images = images.float().cpu() / (255 if images.dtype == torch.uint8 else 1)
    if images.shape[-3] == 3:
        return images
    if _bands is not None and len(_bands.low) == images.shape[-3]:
        low, high = (end[:, None, None] for end in (_bands.low, _bands.high))
        images = ((images - low) / (high - low)).clamp(0, 1)[..., _bands.shown, :, :]
    return images if images.shape[-3] == 3 else images.mean(-3, keepdim=True).repeat_interleave(3, -3)


def rgb(images: Tensor) -> np.ndarray:
    """(…, c, h, w), in [0, 1] or uint8, -> (…, h, w, 3), as `displayed`."""
    return rearrange(displayed(images), "... c h w -> ... h w c").numpy()
