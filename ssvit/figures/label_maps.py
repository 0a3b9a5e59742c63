"""Draw label maps in colours: class 0, often the background, is dark, and ignored pixels are white.

Colours repeat after twenty classes. Shapes use b images, h, w pixels.
"""

import io
from collections.abc import Mapping, Sequence
from colorsys import hsv_to_rgb

import torch
from PIL import Image
from torch import Tensor

from ssvit.data.sources.base import IGNORED
from ssvit.figures.display import Display
from ssvit.figures.pictures import Mosaic

DARK, _WHITE, _RED = (0.16, 0.16, 0.2), (1.0, 1.0, 1.0), (0.78, 0.2, 0.18)
_LEGEND = 21  # classes in the legend: class 0 and twenty colours
_ROWS = 256  # of an overlay that are computed together
HUES = [hsv_to_rgb(0.618 * (number % 20), 0.5 + 0.25 * (number % 3), 0.9) for number in range(IGNORED - 1)]
PALETTE = torch.tensor([DARK, *HUES, _WHITE])
"""Colour of each class, (256, 3) in [0, 1]."""


def colored(masks: Tensor) -> Tensor:
    """Return label maps (b, h, w) uint8 in the colours of their classes, (b, 3, h, w) in [0, 1]."""
    return PALETTE[masks.long()].movedim(-1, 1)


def palette_png(mask: Tensor) -> bytes:
    """Return a label map (h, w) uint8 as a PNG file, whose palette has the colour of each class."""
    image = Image.fromarray(mask.numpy())
    image.putpalette((255 * PALETTE).round().to(torch.uint8).flatten().tolist())
    return _png(image)


def overlay_png(image: Tensor, mask: Tensor, display: Display) -> bytes:
    """Return an image half covered by the colours of a label map, as a PNG file.

    Args:
        image: (c, h, w) uint8 or in [0, 1].
        mask: (h, w) uint8.
        display: Converts the image to RGB.
    """
    covered = []  # in parts of some rows: the colours of large images would take gigabytes as floating-point numbers
    for rows, labels in zip(image.split(_ROWS, 1), mask.split(_ROWS), strict=True):
        part = (display(rows) + colored(labels[None])[0]) / 2
        covered.append((255 * part).round().to(torch.uint8).movedim(0, -1))
    return _png(Image.fromarray(torch.cat(covered).numpy()))


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def errors(images: Tensor, truth: Tensor, predicted: Tensor) -> Tensor:
    """Return images (b, 3, h, w) in grey with the errors of label maps (b, h, w) in red and ignored pixels in white."""
    grey = images.mean(1, keepdim=True).expand_as(images)
    red, white = (torch.tensor(color).view(1, 3, 1, 1) for color in (_RED, _WHITE))
    return torch.where((truth == IGNORED)[:, None], white, torch.where((truth != predicted)[:, None], red, grey))


def mosaic(columns: Mapping[str, Tensor], masks: Mapping[str, Tensor], classes: Sequence[str] = ()) -> Mosaic:
    """Return images next to label maps, with a legend of the classes that occur.

    Args:
        columns: Images (b, 3, h, w) by title.
        masks: Label maps (b, h, w) uint8 by title.
        classes: Class names; (): numbers.
    """
    present = [number for number in torch.cat([*masks.values()]).unique().tolist() if number != IGNORED]
    names = {number: classes[number] if classes else str(number) for number in present[:_LEGEND]}
    legend = {name: tuple(PALETTE[number].tolist()) for number, name in names.items()}
    return Mosaic({**columns, **{title: colored(mask) for title, mask in masks.items()}}, legend)
