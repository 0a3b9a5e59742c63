"""Convert images of any number of channels to RGB for figures.

Shapes use c channels, h, w pixels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ssvit.data.sources.base_options import Images
from ssvit.data.sources.decode_options import PixelFormat

_Numbers = float | Sequence[float]  # one for all channels, or one for each


class Display(NamedTuple):
    """Convert images of any number of channels to RGB.

    Images of three channels are unchanged. Of images of `len(low)` channels, the channels `shown` become red, green and
    blue, each scaled so that `low` is black and `high` is white. Any other image becomes greyscale, the mean of its
    channels.

    Attributes:
        shown: Channels shown as red, green and blue.
        low: Value of each channel shown as black, (c,).
        high: Value of each channel shown as white, (c,).
    """

    shown: tuple[int, ...] = ()
    low: tuple[float, ...] = ()  # (c,)
    high: tuple[float, ...] = ()

    @classmethod
    def of_data(cls, data: Images | None) -> "Display":
        """Return the display of the images of a data set."""
        pixels = getattr(data, "pixels", None)
        if data is None or pixels is None:  # data sets of photographs have no pixel format
            return cls()
        return cls.of_pixels(pixels, mean=data.mean, std=data.std, shown=getattr(data, "shown", ()))

    @classmethod
    def of_pixels(cls, pixels: PixelFormat, *, mean: _Numbers, std: _Numbers, shown: Sequence[int]) -> "Display":
        """Return the display of images of a pixel format.

        Of more than three channels, the three `shown` become red, green and blue. These, and images of one or two
        channels with a range, are scaled so that mean - 2 std is black and mean + 2 std is white, which is the same for
        all images.

        Args:
            pixels: Pixel format.
            mean: Mean of all channels or of each channel.
            std: Standard deviation of all channels or of each channel.
            shown: Channels shown as red, green and blue.
        """
        channels = pixels.channels
        if channels == 3 or (channels < 3 and pixels.range is None):
            return cls()
        center, spread = (torch.tensor(value).float().expand(channels) for value in (mean, std))
        low, high = (center - 2 * spread).tolist(), (center + 2 * spread).tolist()
        return cls(tuple(shown) if channels > 3 else tuple(range(channels)), tuple(low), tuple(high))

    def __call__(self, images: Tensor) -> Tensor:
        """Convert images (…, c, h, w), uint8 or in [0, 1], to (…, 3, h, w) in [0, 1] on the CPU."""
        images = images.float().cpu() / (255 if images.dtype == torch.uint8 else 1)
        if images.shape[-3] == len(self.low) != 3:
            low, high = (torch.tensor(end)[:, None, None] for end in (self.low, self.high))
            images = ((images - low) / (high - low)).clamp(0, 1)
        return self.rgb(images)

    def rgb(self, images: Tensor) -> Tensor:
        """Select the three channels without scaling them, or average all channels: (…, c, h, w) -> (…, 3, h, w)."""
        if images.shape[-3] == len(self.low) != 3:
            images = images[..., self.shown, :, :]
        return images if images.shape[-3] == 3 else images.mean(-3, keepdim=True).repeat_interleave(3, -3)


PLAIN = Display()
