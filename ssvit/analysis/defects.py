"""Detect defective image files, and list the remaining files in a table for data=csv.

Every image is read once. The reason of an image is the first of these rules that applies:

- unreadable: the file cannot be decoded.
- tiny: the shorter side is below a quarter of the median shorter side.
- blank: every channel has a standard deviation below 0.01, for values in [0, 1].
- blurred: a 3 x 3 binomial filter removes a small part of the total variation of the grey values. The part is less than
  half of its median over all images, and its logarithm is more than 4 robust standard deviations below the median.
  Larger images are first reduced to a common shorter side: the median, at most 256 pixels. The comparison with a
  blurred version follows Crete et al. (2007).
- duplicate: all pixels equal those of an earlier image. Test images come first, then validation and training images.
- near-duplicate: a training image that `ssvit.evaluation.duplicates` pairs with a test or validation image.

Shapes use b images, c channels, h, w pixels, d values of a thumbnail.
"""

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.analysis.images import UNIFORM, spread
from ssvit.data.augment.crop import resize
from ssvit.data.loader import evaluation_batches
from ssvit.data.sources import rasters
from ssvit.data.sources.base import Data, Source, Unreadable, class_text, missing_labels
from ssvit.data.sources.base_options import DataSet
from ssvit.data.sources.files import Files
from ssvit.errors import UserError, printable
from ssvit.evaluation.duplicates import Grey, Thumbnails, duplicates
from ssvit.figures.display import Display
from ssvit.figures.pictures import Gallery, Picture, in_rows
from ssvit.figures.style import evenly_spaced
from ssvit.models.encoder import scaled

_SAMPLED, _SIDE = 500, 256  # headers that are read for the median side, and its maximum, in pixels
_TINY = 4  # factor below the median side
_BLURRED, _DEVIATIONS, _NORMAL = 2, 4, 1.4826  # factor below the median change, and limit in robust deviations
_LEAST = 1e-6  # total variation of an image without edges
_SHOWN, _COLUMNS = 16, 8  # images and columns of a sheet
COLUMNS = ("path", "split", "reason", "value", "copy_of")
UNREADABLE = "unreadable"


@dataclass(frozen=True, eq=False)
class Image:
    """Locate an image by its split (train, validation or test), its source and its index in the source."""

    split: str
    source: Source
    index: int

    @property
    def name(self) -> str:
        """Return the path of the image."""
        return self.source.name(self.index)

    def read(self) -> Tensor:
        """Return the image, (c, h, w)."""
        return self.source.read(self.index)


class Defect(NamedTuple):
    """Describe a defective image.

    Attributes:
        image: The image.
        reason: Name of the rule.
        value: The measured value; for an unreadable file, the error message.
        original: The image with the same content; None for other rules than duplicate and near-duplicate.
    """

    image: Image
    reason: str
    value: str
    original: Image | None = None

    @property
    def row(self) -> tuple[str, ...]:
        """Return the cells of a table with the columns `COLUMNS`."""
        original = "" if self.original is None else self.original.name
        return self.image.name, self.image.split, self.reason, self.value, original


class _Measures:
    """Measure images of any size: a transform of decoded images, as evaluations use it.

    Args:
        side: Maximum of the shorter side in pixels, at which details are compared.
    """

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, images: Tensor | Sequence[Tensor], slots: Tensor, seed: int) -> dict[str, Tensor]:
        """Return sizes (b, 2), spreads, changes and hashes of the pixels (b,), and thumbnails (b, d)."""
        columns = zip(*map(self._of_image, images), strict=True)
        return dict(zip(("size", "spread", "change", "pixels", "thumbnails"), map(torch.stack, columns), strict=True))

    def _of_image(self, image: Tensor) -> tuple[Tensor, ...]:
        h, w = image.shape[1:]
        factor = min(1.0, self.side / min(h, w))
        small = scaled(resize(image[None], (round(factor * h), round(factor * w))))
        grey = small.mean(1)
        blurred = F.avg_pool2d(F.avg_pool2d(F.pad(grey, (1, 1, 1, 1), mode="replicate"), 2, 1), 2, 1)
        change = 1 - _variation(blurred) / _variation(grey).clamp_min(_LEAST)
        digest = hashlib.blake2b(repr((h, w)).encode() + image.contiguous().numpy().tobytes(), digest_size=8).digest()
        pixels = torch.tensor(int.from_bytes(digest, signed=True))
        return torch.tensor([h, w]), spread(small)[0], change, pixels, Thumbnails()(image[None])["thumbnails"][0]


def _variation(grey: Tensor) -> Tensor:
    return grey.diff(dim=1).abs().sum() + grey.diff(dim=2).abs().sum()


def all_images(data: Data) -> list[Image]:
    """Return all images of a data set: the test images, the validation images and the training images."""
    parts = {"test": data.test, "validation": data.validation, "train": data.train}
    return [Image(split, source, index) for split, source in parts.items() if source for index in range(len(source))]


def find(options: DataSet, images: Sequence[Image], show: Callable[[int, int], None]) -> list[Defect]:
    """Return the defects of images sorted by reason, as the docstring of this module defines them.

    Args:
        options: Options of the data set.
        images: The images, see `all_images`.
        show: Called with the number of images that were read, and of all images.
    """
    transform = _Measures(min(rasters.median_side(options.sample(_SAMPLED)) or _SIDE, _SIDE))
    measured, reasons = dict[Image, tuple[Tensor, ...]](), dict[str, str]()

    def report(opened: int, failures: list[Unreadable]) -> None:
        reasons.update((failure.path, failure.reason) for failure in failures)
        show(len(measured) + len(reasons), len(images))

    for source, of_source in groupby(images, lambda image: image.source):
        part = [*of_source]
        for batch in evaluation_batches(source, transform, batch_size=64, report=report):
            rows = zip(*batch.views.values(), strict=True)
            measured |= zip((part[slot] for slot in batch.slots.tolist()), rows, strict=True)
    show(len(images), len(images))
    defects = [Defect(image, UNREADABLE, reasons.get(image.name, "")) for image in images if image not in measured]
    of_values = _of_values(measured)
    for defect in of_values:
        del measured[defect.image]
    defects += of_values + _near_duplicates({image: thumbnail for image, (*_, thumbnail) in measured.items()})
    return sorted(defects, key=lambda defect: defect.reason)


def _of_values(measured: Mapping[Image, tuple[Tensor, ...]]) -> list[Defect]:
    """Return the defects of readable images that their measured values show."""
    sizes, spreads, changes, hashes, _ = map(torch.stack, zip(*measured.values(), strict=True))
    sides, changes = sizes.amin(1), changes.clamp_min(_LEAST).log()
    is_tiny, is_blank = sides * _TINY < sides.median(), spreads < UNIFORM
    usual = changes[~(is_tiny | is_blank)]
    center = usual.median() if len(usual) else changes.max()
    limit = center - max(math.log(_BLURRED), _DEVIATIONS * _NORMAL * float((usual - center).abs().median()))
    defects, originals = list[Defect](), dict[int, Image]()
    for row, image in enumerate(measured):
        original = originals.setdefault(int(hashes[row]), image)
        if is_tiny[row]:
            defects.append(Defect(image, "tiny", "{1}x{0} pixels".format(*sizes[row].tolist())))
        elif is_blank[row]:
            defects.append(Defect(image, "blank", f"standard deviation {spreads[row]:.4f}"))
        elif changes[row] < limit:
            defects.append(Defect(image, "blurred", f"{(changes[row] - center).exp():.2f} of the median"))
        elif original is not image:
            defects.append(Defect(image, "duplicate", "all pixels are equal", original))
    return defects


def _near_duplicates(thumbnails: Mapping[Image, Tensor]) -> list[Defect]:
    """Return the training images that are near-duplicates of other images, from thumbnails (d,)."""
    train = [image for image in thumbnails if image.split == "train"]
    test = [image for image in thumbnails if image.split != "train"]
    if not train or not test:
        return []

    def grey(name: str, rows: Tensor) -> Tensor:
        images = test if name == "test" else train
        return torch.cat([Grey()(images[row].read()[None])["grey"] for row in rows.tolist()])

    of_train, of_test = (torch.stack([thumbnails[image] for image in images]) for images in (train, test))
    best = {pair.train: pair for pair in reversed(duplicates(of_train, of_test, grey))}
    return [
        Defect(train[row], "near-duplicate", f"correlation {pair.correlation:.2f}", test[pair.test])
        for row, pair in best.items()
    ]


def kept_table(options: DataSet, images: Sequence[Image]) -> list[list[str]]:
    """Return the rows of a table of images for data=csv, its header first.

    Raises:
        UserError: The images are not single files, only some of the splits have labels, or no training image is left.
    """
    sources = {image.split: image.source for image in images}
    if "train" not in sources:
        raise UserError("no training image remains")
    is_labelled, separator = sources["train"].labels is not None, getattr(options, "separator", None) or "|"
    if is_labelled and (missing := missing_labels(**sources)):
        raise UserError(missing)
    table = [["path", "split", *["label"] * is_labelled, *["mask"] * getattr(options, "masked", False)]]
    for image in images:
        source, index = image.source, image.index
        if not isinstance(source, Files):
            raise UserError("the images are not single files, which data=csv requires")
        label = [class_text(source.labels[index], source.classes, separator)] if source.labels is not None else []
        mask = [] if source.masks is None else [os.path.abspath(source.masks[index])]
        path = os.path.abspath(image.name)
        if path.encode(errors="replace") != os.fsencode(path):
            raise UserError(f"{printable(path)}: is not UTF-8, as names in a table must be")
        if any(cell != cell.strip() for cell in (path, *label, *mask)):
            raise UserError(f"{printable(path)}: starts or ends with a space, as names in a table must not")
        table.append([path, image.split, *label * is_labelled, *mask])
    return table


def sheet(options: DataSet, defects: Sequence[Defect]) -> Gallery:
    """Return a sheet of evenly spaced images with one defect; the image that a copy repeats is next to it."""
    display, pictures = Display.of_data(options), list[Picture]()
    for image, _, value, original in (defects[row] for row in evenly_spaced(len(defects), _SHOWN)):
        shown = {image: value} if original is None else {image: value, original: "the original"}
        pictures += [Picture(display(each.read()), (Path(each.name).name, text)) for each, text in shown.items()]
    return Gallery(in_rows(pictures, _COLUMNS), f"{defects[0].reason}: {len(defects):,}")
