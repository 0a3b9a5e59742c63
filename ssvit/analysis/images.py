"""Describe a set of images before anything is trained: files, sizes, classes, duplicates, and a contact sheet.

Shapes use n images, c channels, h, w pixels.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from ssvit.data.loader import evaluation_batches
from ssvit.data.sources import decode, rasters
from ssvit.data.sources.base import Data, Source, Unreadable, caption
from ssvit.data.sources.base_options import DataSet
from ssvit.errors import UserError
from ssvit.evaluation.duplicates import Grey, Thumbnails, duplicates
from ssvit.figures.display import Display
from ssvit.figures.pictures import Gallery, Picture, in_rows
from ssvit.figures.style import evenly_spaced
from ssvit.models.encoder import scaled

_HEADERS, _CHECKSUMS = 500, 20_000  # maximum numbers of files whose header is read, and of those that are compared
_COLUMNS, _ROWS = 10, 4  # of the contact sheet
_MODES = {"1": "black and white", "L": "grey", "LA": "grey", "P": "of a palette", "RGBA": "RGB"}  # names by Pillow's
_RARE, _LISTED = 2, 20  # factor below the median number of images of a class, and number of such classes to list
UNIFORM = 0.01  # standard deviation of the values of an image that counts as uniform


class Sampled(NamedTuple):
    """Store a sample of images as an encoder receives them.

    Attributes:
        source: The readable images.
        images: The transformed images, (n, c, h, w) uint8 or in [0, 1].
        failures: The unreadable images of the sample.
    """

    source: Source
    images: Tensor
    failures: list[Unreadable]


def read(options: DataSet, source: Source) -> Sampled:
    """Read all images of a source, in their order.

    Args:
        options: Options of the data set, with the transform of evaluation images.
        source: The images.

    Raises:
        UserError: No image can be read.
    """
    failures: list[Unreadable] = []

    def report(opened: int, unreadable: list[Unreadable]) -> None:
        failures.extend(unreadable)

    batches = list(evaluation_batches(source, options.view.build(), batch_size=64, report=report))
    if not batches:
        raise UserError(f"none of {len(source)} images can be read; the first: {failures[0]}")
    readable = source.take(torch.cat([batch.slots for batch in batches]))
    return Sampled(readable, torch.cat([batch.images for batch in batches]), failures)


def spread(images: Tensor) -> Tensor:
    """Return the standard deviation of the pixels of images (n, c, h, w), the largest of all channels, (n,)."""
    return scaled(images).flatten(2).std(2, correction=0).amax(1)


def describe(options: DataSet, data: Data, samples: Mapping[str, Sampled]) -> Iterator[str]:
    """Yield sentences on a data set.

    Args:
        options: Options of the data set.
        data: The images.
        samples: Samples of the training images ("train") and of the held-out images ("test").
    """
    yield from _headers(options)
    yield from _classes(data.train)
    train, held_out = samples.values()
    count, failures = len(train.images) + len(held_out.images), train.failures + held_out.failures
    first = f"; the first: {failures[0]}" if failures else ""
    yield f"unreadable: {len(failures):,} of {count + len(failures):,} sampled images{first}"
    part, test = data.test_or_validation
    contents = [Counter(_checksums(source)) for source in (data.train, test)]
    copies = sum(of_split.total() - len(of_split) for of_split in contents)
    shared = sum(number for content, number in contents[1].items() if content in contents[0])
    of_train, of_test = (Thumbnails()(sample.images)["thumbnails"] for sample in (train, held_out))
    pairs = duplicates(of_train, of_test, lambda name, rows: Grey()(samples[name].images[rows])["grey"])
    if not (copies or shared or pairs):
        yield f"duplicates: none; near-duplicates were searched among {len(of_test):,} {part} images"
        return
    yield (
        f"duplicates: {copies:,} files have the content of another file of their split; {shared:,} {part} images are "
        f"identical to a training image, and {len(pairs):,} of {len(of_test):,} sampled ones near-duplicates"
    )


def _checksums(source: Source) -> Iterator[str]:
    """Return checksums of the contents of evenly spaced images, without those of images that have none."""
    return filter(None, map(source.content, evenly_spaced(len(source), _CHECKSUMS)))


def _headers(options: DataSet) -> Iterator[str]:
    """Yield sentences on a sample of files: formats, channels, sizes, and what the centre crop does not show."""
    sample = options.sample(_HEADERS)
    kinds, sizes = Counter[str](), list[tuple[int, int]]()
    for opened in sample.files if sample else ():
        with suppress(Exception), opened() as file:  # unreadable files are counted by `read`
            height, width = rasters.image_size(file)
            file.seek(0)
            image = decode.header(file)
            alpha = " with transparency" if image and rasters.has_alpha(image) else ""
            kinds[f"{image.format} {_MODES.get(image.mode, image.mode)}{alpha}" if image else "array"] += 1
            sizes.append((height, width))
    if not sizes:
        return
    counts = ", ".join(f"{kind} ({number:,})" for kind, number in kinds.most_common())
    yield f"files: {counts}, of {len(sizes):,} sampled"
    ordered = sorted(sizes, key=lambda size: size[0] * size[1])
    least, median, most = (f"{w}x{h}" for h, w in (ordered[0], ordered[len(ordered) // 2], ordered[-1]))
    yield f"sizes: {median} pixels" + (f" in the median, {least} to {most}" if least != most else "")
    view = options.view
    if view.fit == "cover":
        shown = view.size[1] / view.size[0]
        cut = sorted(1 - min(ratio, shown) / max(ratio, shown) for ratio in (w / h for h, w in sizes))
        if cut[-1] > 0:
            percent = f"{100 * cut[len(cut) // 2]:.0f} % of the median image, at most {100 * cut[-1]:.0f} %"
            yield f"centre crop: cuts off {percent} (data.fit=pad shows all)"


def _classes(source: Source) -> Iterator[str]:
    """Yield sentences on the classes of training images and their balance."""
    if source.labels is None:
        yield "classes: none (a subfolder for each class labels the images)"
        return
    labels, classes = source.labels, source.classes
    counts = labels.sum(0) if labels.ndim == 2 else torch.bincount(labels, minlength=len(classes))
    order = counts.argsort(stable=True).tolist()
    least, most = order[0], order[-1]
    between = f"{counts[least]:,} ({classes[least]}) to {counts[most]:,} ({classes[most]})"
    if counts[least] == counts[most]:
        between = f"{counts[least]:,}"
    yield f"classes: {len(classes):,}, with {between} training images{' each' * (len(classes) > 1)}"
    if rare := [number for number in order if _RARE * counts[number] < counts.median()]:
        listed = ", ".join(f"{classes[number]} ({counts[number]:,})" for number in rare[:_LISTED])
        listed += ", ..." * (len(rare) > _LISTED)
        yield f"rare classes: {len(rare):,} with less than half of the median number of training images: {listed}"


def contact_sheet(options: DataSet, sample: Sampled) -> Gallery:
    """Return a sheet of evenly spaced images as the encoder receives them, with their classes or file names."""
    rows = evenly_spaced(len(sample.images), _COLUMNS * _ROWS)
    shown = zip(rows, Display.of_data(options)(sample.images[rows]), strict=True)
    pictures = [Picture(image, (caption(sample.source, row),)) for row, image in shown]
    lines = in_rows(pictures, _COLUMNS)
    return Gallery(lines, "training images as the encoder receives them: {}x{} pixels".format(*options.view.size[::-1]))
