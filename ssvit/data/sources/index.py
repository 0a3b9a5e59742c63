r"""The index of a set of images in one memory-mapped file, shared by all processes instead of a list in each.

A row holds the name of an image, its size in bytes, its class, and further numbers if the set needs them. The text of
all rows, the concatenation of `name\0size\0`, is stored verbatim, because its sha256 is the fingerprint of the set.

Letters: n images, k classes, t bytes of text.
"""

import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ssvit import atomic_io
from ssvit.data.sources.base import class_numbers, renumbered
from ssvit.options import UserError

SCHEMA = 1
KEPT_FROM = 20_000  # images from which the index of a folder is cached
_CHUNK = 1 << 16  # rows gathered at a time
Row = tuple[str, int, str | tuple[str, ...] | None, tuple[int, ...]]  # name, bytes, class or classes, further numbers


class Index:
    """The columns of an index.

    Args:
        columns: "text" (t,) uint8, "ends" (n,) int64 with the end of each row's text, optionally "labels" as of a
            source, and further columns (n,).
        facts: Metadata of the set that JSON can represent; `classes` holds the class names.
        rows: Rows of the columns that belong to the index; None for all.
    """

    def __init__(self, columns: Mapping[str, Tensor], facts: Mapping[str, Any], rows: Tensor | None = None) -> None:
        self.columns, self.facts, self.rows = dict(columns), dict(facts), rows
        self.classes: tuple[str, ...] = tuple(facts.get("classes", ()))
        self._text, self._ends = columns["text"].numpy(), columns["ends"].numpy()

    @classmethod
    def of(
        cls,
        rows: Iterable[Row],
        further: Sequence[str] = (),
        *,
        numbered: bool = False,
        classes: Sequence[str] = (),
        **facts: Any,
    ) -> "Index":
        """Return the index of some rows, in their order; without labels if a row has no class.

        Classes are numbered in the order of `classes` or, by default, of their sorted names. Rows with tuples of
        classes have labels (n, k) bool.

        Args:
            rows: The rows.
            further: Names of the columns of their further numbers.
            numbered: Whether to sort class names by number if all are decimal numbers.
            classes: Class names in order; () for the sorted names.
            **facts: Metadata of the set.
        """
        text, ends, labels, columns = bytearray(), array("q"), array("q"), [array("q") for _ in further]
        numbers: dict[str | tuple[str, ...] | None, int] = {}
        for name, size, label, more in rows:
            text += f"{name}\0{size}\0".encode(errors="surrogateescape")
            ends.append(len(text))
            labels.append(numbers.setdefault(label, len(numbers)))
            for column, value in zip(columns, more, strict=True):
                column.append(value)
        made = {"text": _tensor(text, torch.uint8), "ends": _tensor(ends)}
        made |= {name: _tensor(column) for name, column in zip(further, columns, strict=True)}
        if not numbers or None in numbers:
            return cls(made, {"classes": [], **facts})
        named = [key if isinstance(key, tuple) else (str(key),) for key in numbers]
        names = set(chain(*named))
        are_numbers = numbered and all(name.isdecimal() for name in names)
        classes = list(classes) or sorted(names, key=int if are_numbers else str)
        place = {name: number for number, name in enumerate(classes)}
        if any(isinstance(key, tuple) for key in numbers):
            every = torch.zeros(len(named), len(classes), dtype=torch.bool)
            for row, own in enumerate(named):
                every[row, [place[name] for name in own]] = True
        else:
            every = torch.tensor([place[name] for (name,) in named])
        made["labels"] = every[_tensor(labels)]
        return cls(made, {"classes": classes, **facts})

    @classmethod
    def joined(cls, parts: "Sequence[Index]", facts: Mapping[str, Any]) -> "Index":
        """Concatenate indices with the same columns."""
        columns = {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns}
        starts = accumulate((len(part.columns["text"]) for part in parts), initial=0)
        columns["ends"] = torch.cat([part.columns["ends"] + start for part, start in zip(parts, starts, strict=False)])
        return cls(columns, facts)

    @classmethod
    def read(cls, path: Path) -> "Index":
        """Map a file into memory that all processes share.

        Raises:
            OSError: The file cannot be read.
            ValueError: It is not an index.
            UserError: It has the schema of another version.
        """
        atomic_io.check_regular(path)
        try:
            with safe_open(path, "pt") as file:
                facts = json.loads(file.metadata()["facts"])
                atomic_io.check_schema(facts.pop("schema", None), SCHEMA, path, UserError)
                return cls({name: file.get_tensor(name) for name in file.keys()}, facts)  # noqa: SIM118 (no dictionary)
        except (SafetensorError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no index of images: {error}") from None

    def write(self, path: Path) -> None:
        """Write the index to a file atomically; OSError if that fails."""
        atomic_io.replace(path, save(self.columns, {"facts": json.dumps({"schema": SCHEMA, **self.facts})}))

    def __len__(self) -> int:
        return len(self._ends) if self.rows is None else len(self.rows)

    def take(self, indices: Tensor) -> "Index":
        """Return the index of a subset of the images, in the order of `indices`."""
        return Index(self.columns, self.facts, indices if self.rows is None else self.rows[indices])

    def row(self, index: int) -> int:
        """Return the row of an image in the columns."""
        return index if self.rows is None else int(self.rows[index])

    def number(self, column: str, index: int) -> int:
        """Return the number of an image in a column."""
        return int(self.columns[column][self.row(index)])

    def _texts(self, index: int) -> list[str]:
        row = self.row(index)
        start = int(self._ends[row - 1]) if row else 0
        return self._text[start : int(self._ends[row])].tobytes().decode(errors="surrogateescape").split("\0")

    def name(self, index: int) -> str:
        """Return the name of an image."""
        return self._texts(index)[0]

    def size(self, index: int) -> int:
        """Return the size of an image's file in bytes, -1 if unknown."""
        return int(self._texts(index)[1])

    def labels(self, classes: Sequence[str] = (), *, root: str) -> Tensor | None:
        """Return the labels of all rows, or None.

        Args:
            classes: Class names that the labels index; () for those of the index.
            root: Name of the data set for messages.

        Raises:
            UserError: A class of the index is not among `classes`.
        """
        own = self.columns.get("labels")
        if own is None or not classes or tuple(classes) == self.classes:
            return own
        place = class_numbers(self.classes, classes, called=root)
        return renumbered(own, [place[name] for name in self.classes], len(classes))

    def fingerprint(self) -> str:
        """Return the sha256 of the text of the rows."""
        digest = hashlib.sha256(self._text.data if self.rows is None else b"")
        for part in () if self.rows is None else self.rows.split(_CHUNK):
            numbers = part.numpy()
            ends = self._ends[numbers]
            lengths = ends - np.where(numbers > 0, self._ends[numbers - 1], 0)
            after = lengths.cumsum()
            digest.update(self._text[np.arange(after[-1]) + np.repeat(ends - after, lengths)].data)
        return digest.hexdigest()


def _tensor(values: "bytearray | array[int]", dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.frombuffer(values, dtype=dtype) if len(values) else torch.empty(0, dtype=dtype)


def kept(key: str, is_valid: Callable[[Index], bool], make: Callable[[], Index]) -> Index:
    """Return the cached index of a key if it is valid, or else build it and cache it.

    One process builds the index while all other processes wait for its file.

    Args:
        key: Key of the cache.
        is_valid: Returns whether an index is up to date.
        make: Builds the index.
    """
    path = caches("indices") / f"{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:32]}.safetensors"

    def found() -> Index | None:
        try:
            index = Index.read(path)
            return index if is_valid(index) else None
        except (OSError, ValueError, UserError):
            return None

    if index := found():
        return index
    with locked(path):
        if index := found():
            return index
        index = make()
        if is_valid(index):
            with suppress(OSError):  # without disk space or a home folder, each start builds it
                index.write(path)
                return Index.read(path)
        return index


def caches(name: str) -> Path:
    """Return the path of a subfolder of ssvit's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "ssvit", name)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a path against other processes during the block, where the file system supports locks."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
