"""Image files, decoded as they are needed. Letters: n images."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from torch import Tensor
from tqdm import tqdm

from ssvit.data import decode
from ssvit.data.options import VERIFIED
from ssvit.data.source import Labels, Source, checked_labels
from ssvit.options import UserError, one_of, printable


class Files(Source):
    """Image files of any size, decoded to RGB; labels (n,). UserError for an out-of-range label.

    masks: the path of the mask of each image, a PNG. verify: what the fingerprint covers besides the names, the "size"
    of each file or its "content".
    """

    def __init__(
        self,
        paths: Sequence[str],
        labels: Labels = None,
        classes: Sequence[str] = (),
        *,
        masks: Sequence[str] | None = None,
        verify: str = "size",
    ) -> None:
        one_of("verify", verify, VERIFIED)
        self.verify = verify
        self.paths = [os.fspath(path) for path in paths]
        self.labels = checked_labels(labels, len(self.paths), classes)
        self.classes, self.masks = tuple(classes), masks

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Tensor:
        return decode.load(self.paths[index])

    def name(self, index: int) -> str:
        return self.paths[index]

    def mask(self, index: int) -> Tensor | None:
        return None if self.masks is None else decode.load_mask(self.masks[index])

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the names below the common folder and the sizes or contents. UserError for what is unreadable."""
        digest = hashlib.sha256()
        # What the first and the last of the sorted paths share, all share.
        top = os.path.commonpath([os.path.dirname(path) for path in (min(self.paths), max(self.paths))])
        sizes = (os.path.getsize(path) if os.path.isfile(path) else -1 for path in self.paths)
        for path, content in zip(self.paths, self._digests() if self.verify == "content" else sizes, strict=True):
            digest.update(f"{os.path.relpath(path, top)}\0{content}\0".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def _digests(self) -> Iterator[str]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            digests = pool.map(_digest, self.paths)
            yield from tqdm(digests, "data.verify=content", len(self.paths), unit=" files", delay=2, leave=False)

    def take(self, indices: Tensor) -> "Files":
        """The set of the files at `indices`, in that order."""
        labels = None if self.labels is None else self.labels[indices]
        places = indices.tolist()
        masks = None if self.masks is None else [self.masks[i] for i in places]
        paths = [self.paths[i] for i in places]
        return Files(paths, labels, self.classes, masks=masks, verify=self.verify)


def _digest(path: str) -> str:
    """sha256 of a file, "" if there is none: training replaces such an image."""
    if not os.path.isfile(path):
        return ""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{printable(path)}: data.verify=content cannot read it: {error.strerror}") from None
