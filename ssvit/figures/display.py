"""The RGB images by which pictures show images of any number of channels.

Letters: c channels, h, w pixels.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Display(NamedTuple):
    """Shows images of any number of channels as RGB.

    Images of three channels stay as they are. Of images of `len(low)` channels, those that are `shown` are red, green
    and blue, each scaled so that `low` is black and `high` is white. Any other image becomes the mean of its channels
    in grey.
    """

    shown: tuple[int, ...] = ()
    low: tuple[float, ...] = ()  # (c,)
    high: tuple[float, ...] = ()

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Display":
        """Return the display of a data set with these options: channels, range, shown, mean and std.

        Of more than three channels the three `shown` are red, green and blue. These, and images of one or two channels
        that have a range, are scaled so that mean - 2 std is black and mean + 2 std is white, the same in all pictures.
        """
        channels = data.get("channels", 3)
        if channels == 3 or (channels < 3 and data.get("range") is None):
            return cls()
        mean, std = (torch.tensor(data[name]).float().expand(channels) for name in ("mean", "std"))
        shown = data["shown"] if channels > 3 else range(channels)
        return cls(tuple(shown), tuple((mean - 2 * std).tolist()), tuple((mean + 2 * std).tolist()))

    def __call__(self, images: Tensor) -> Tensor:
        """(…, c, h, w), in [0, 1] or uint8, -> (…, 3, h, w) in [0, 1], on the CPU."""
        images = images.float().cpu() / (255 if images.dtype == torch.uint8 else 1)
        if images.shape[-3] == len(self.low) != 3:
            low, high = (torch.tensor(end)[:, None, None] for end in (self.low, self.high))
            images = ((images - low) / (high - low)).clamp(0, 1)
        return self.rgb(images)

    def rgb(self, images: Tensor) -> Tensor:
        """(…, c, h, w) -> (…, 3, h, w): the three channels without scaling them, or their mean."""
        if images.shape[-3] == len(self.low) != 3:
            images = images[..., self.shown, :, :]
        return images if images.shape[-3] == 3 else images.mean(-3, keepdim=True).repeat_interleave(3, -3)


PLAIN = Display()
