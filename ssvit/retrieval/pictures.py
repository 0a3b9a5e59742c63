"""Name the pictures of a command and their classes, compute their features, and open them by name.

In a store, a file is named by its path, an image in a shard by the path of the shard and its name in it, and an image
of Hugging Face by data set, split and row. Images of other data sets are named by their index in the split. The name of
a window ends in #xywh=LEFT,TOP,WIDTH,HEIGHT.

Letters: n pictures, d width, c channels, h, w pixels, y, x rows and columns of patches.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from tqdm import tqdm

from ssvit.data.batch import EvalTransform
from ssvit.data.loader import evaluation_batches
from ssvit.data.sources.base import Data, Source, Unreadable, class_text
from ssvit.data.sources.decode import load
from ssvit.data.sources.decode_options import RGB, PixelFormat
from ssvit.data.sources.files import Files
from ssvit.data.windows import Windows, parsed_name, window_name
from ssvit.data.windows_options import Windowed
from ssvit.engine.progress import progress
from ssvit.errors import one_of
from ssvit.evaluation.features import Frozen
from ssvit.figures.display import Display
from ssvit.retrieval.options import HELD_OUT, PARTS, without_links

_BLANK = torch.full((3, 1, 1), 230, dtype=torch.uint8)  # shown for a picture that can no longer be read
PART, PART_BYTES = 1024, 1 << 26  # maximum number of pictures whose features are stored together, and of their bytes
PART_SECONDS = 60  # after which features are stored, so that an interruption at any time loses few of them


@dataclass(frozen=True)
class PictureSet:
    """Store n pictures with their names and their classes, which are None where unknown."""

    source: Source
    names: Sequence[str]
    classes: Sequence[str | None]

    @classmethod
    def of_files(cls, classes: Mapping[str, str | None], pixels: PixelFormat = RGB) -> "PictureSet":
        """Return the pictures of files {path: class}, which are decoded in a pixel format."""
        return cls(Files([*classes], pixels=pixels), [*classes], [*classes.values()])

    @classmethod
    def of_split(cls, data: Data, split: str, name: str) -> "PictureSet":
        """Return the pictures of a split of a data set.

        Args:
            data: The data set.
            split: train, validation, test, or held_out for the split of the reported figure.
            name: Name of the data set.

        Raises:
            OptionError: The data set has no such split.
        """
        one_of("split", split, [*(part for part in PARTS if getattr(data, part) is not None), HELD_OUT])
        part, source = data.test_or_validation if split == HELD_OUT else (split, getattr(data, split))
        return cls.of_source(source, f"{name}/{part}")

    @classmethod
    def of_source(cls, source: Source, name: str) -> "PictureSet":
        """Return all pictures of a source, of which those without a name are called `name`/17, by their index.

        The classes of a multi-label image are joined by |.
        """
        names = []
        for path in map(source.name, range(len(source))):
            unnamed = f"{name}/{path.removeprefix('image ')}"
            names.append(os.path.abspath(path) if os.path.isfile(path) else path if "/" in path else unnamed)
        labels = () if source.labels is None else source.labels
        classes = [class_text(label, source.classes) or None for label in labels]
        return cls(source, names, classes or [None] * len(source))

    def windows(self, options: Windowed) -> "PictureSet":
        """Return the windows of the pictures, or the pictures if the options have no size of windows."""
        if options.window is None:
            return self
        windows = Windows(self.source, options.window, options.overlap)
        names = [window_name(self.names[row], box) for row, box in zip(windows.indices, windows.boxes, strict=True)]
        return PictureSet(windows, names, [self.classes[row] for row in windows.indices])


@dataclass
class Describer:
    """Compute the features of pictures with an extractor of one layer; unreadable files are printed and skipped.

    Attributes:
        extractor: Computes the features of images.
        transform: Resizes pictures of any size to the input of the extractor.
        batch_size: Images per call of the extractor.
        workers: Number of processes that read files; 0 reads in this process.
        unreadable: Number of unreadable files so far.
    """

    extractor: Frozen
    transform: EvalTransform
    batch_size: int = 64
    workers: int = 0
    unreadable: int = 0

    def __call__(self, pictures: PictureSet, rows: Sequence[int]) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the rows and the features of the readable pictures among some rows, in order, in large parts.

        A part has at most `PART` pictures and, unless it is a single picture, `PART_BYTES` bytes of features, which are
        (n, d), or (n, y, x, d) for an extractor of patches. After `PART_SECONDS`, it has fewer.
        """
        show = progress("pictures", " pictures")
        source = pictures.source.take(torch.tensor(rows, dtype=torch.int64))
        read: list[int] = []
        parts: list[Tensor] = []
        began = time.monotonic()
        batches = evaluation_batches(
            source, self.transform, batch_size=self.batch_size, workers=self.workers, report=self._report
        )
        for batch in batches:
            slots_of_batch = batch.slots.tolist()
            read += [rows[slot] for slot in slots_of_batch]
            parts += self.extractor(batch.images).values()
            show(slots_of_batch[-1] + 1, len(rows))
            count = max(1, min(PART, PART_BYTES // parts[-1][0].nbytes))
            if time.monotonic() - began >= PART_SECONDS:
                count, began = min(count, len(read)), time.monotonic()
            while len(read) >= count:
                features = torch.cat(parts)
                yield read[:count], features[:count]
                read, parts = read[count:], [features[count:]]
        if read:
            yield read, torch.cat(parts)

    def _report(self, opened: int, failures: list[Unreadable]) -> None:
        for failure in failures:
            tqdm.write(f"{failure}; skipped")
        self.unreadable += len(failures)


def pictures_of(names: Iterable[str]) -> list[str]:
    """Return the picture of each name of a picture or window: the path of a file without links, or another name."""
    return without_links(parsed_name(name)[0] for name in names)


class Opener:
    """Open pictures, (c, h, w), by their names in a store; a picture that can no longer be read is a grey pixel.

    It keeps the last picture, so that the windows of a picture decode it once.

    Args:
        pixels: Pixel format of files.
        sets: Pictures that are no files.
    """

    def __init__(self, pixels: PixelFormat, sets: Collection[PictureSet] = ()) -> None:
        self._pixels = pixels
        self._places = {name: (pictures.source, row) for pictures in sets for row, name in enumerate(pictures.names)}
        self._failures: dict[str, Unreadable] = {}
        self._read = lru_cache(maxsize=2)(self._open)  # a picture, and one of its windows

    def __call__(self, name: str) -> Tensor:
        """Return a picture."""
        try:
            return self._read(name)
        except Unreadable as failure:
            self._failures[name] = failure
            return _BLANK

    def _open(self, name: str) -> Tensor:
        if name in self._places:
            source, row = self._places[name]
            return source.read(row)
        image, box = parsed_name(name)
        if box is None:
            return load(name, self._pixels)
        picture = self._read(image)
        if box.top + box.height > picture.shape[1] or box.left + box.width > picture.shape[2]:
            raise Unreadable(name, "the picture has become smaller")
        return box.of(picture)

    def report(self, file: str) -> list[str]:
        """Return a line for the console if pictures are grey in a file, with one of the reasons."""
        if not self._failures:
            return []
        example, hint = min(map(str, self._failures.values())), "data=… opens the images of a data set"
        return [f"{file}: {len(self._failures)} pictures are grey, such as {example} ({hint})"]


def viewer(opened: Callable[[str], Tensor], transform: EvalTransform, display: Display) -> Callable[[str], Tensor]:
    """Return a function that shows a picture by its name as the encoder receives it, (3, h, w) in [0, 1].

    Args:
        opened: Returns a picture by its name, see `Opener`.
        transform: Transforms pictures to the input of the encoder.
        display: Converts pictures to RGB.
    """
    return lambda name: display(transform([opened(name)])[0])
