"""Images beside the components of their patches, their masks and the predicted class of each pixel.

Letters: b images, h, w pixels, y, x rows and columns of patches.
"""

import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from ssvit.figures.reconstruction import tiles
from ssvit.figures.style import INK

_IGNORED = 255
_NAMED = 12  # classes in the legend
_BACKGROUND, _WHITE = (0.16, 0.16, 0.2), (1.0, 1.0, 1.0)
_COLORS = [colormaps["tab20"](number)[:3] for number in range(20)]


def patches(images: Tensor, components: Tensor) -> Figure:
    """images (b, 3, h, w) in [0, 1] beside the components of their patches, (b, y, x, 3) in [0, 1], as colours."""
    figure, _ = tiles({"image": images, "components": _enlarged(components, images)})
    return figure


def _enlarged(components: Tensor, images: Tensor) -> Tensor:
    """(b, y, x, 3) -> (b, 3, h, w), each patch of one colour."""
    return F.interpolate(components.movedim(-1, 1), size=images.shape[2:], mode="nearest")


def segmentation(images: Tensor, masks: Tensor, predictions: Tensor, components: Tensor) -> Figure:
    """images (b, 3, h, w) in [0, 1], masks and predictions (b, h, w) uint8.

    components: of the patches, (b, y, x, 3) in [0, 1], which are shown as colours.

    Each class has a colour; ignored pixels are white. Class 0, often the background, is dark; the colours of more than
    twenty others repeat.
    """
    palette = torch.tensor([_BACKGROUND, *(_COLORS[number % len(_COLORS)] for number in range(_IGNORED - 1)), _WHITE])
    true, predicted = (palette[of.long()].movedim(-1, 1) for of in (masks, predictions))
    shown = _enlarged(components, images)
    figure, _ = tiles({"image": images, "components": shown, "true": true, "predicted": predicted})
    present = [number for number in torch.cat([masks, predictions]).unique().tolist() if number != _IGNORED]
    handles = [Patch(color=tuple(palette[number].tolist()), label=str(number)) for number in present[:_NAMED]]
    figure.legend(
        handles=handles, loc="lower center", ncols=_NAMED, frameon=False, fontsize=7, labelcolor=INK,
        handlelength=1, columnspacing=1,
    )  # fmt: skip
    return figure
