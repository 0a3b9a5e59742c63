"""List the images in a folder and their classes from file names alone (standard library only).

Images are placed in the folder itself, without classes, or at any depth in one subfolder for each class. A folder that
contains both is unlabelled. Names that begin with a dot are skipped. Files with the suffix .npy, which may hold any
array, count as images only if the folder contains no other images.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from glob import glob
from itertools import islice, product
from pathlib import Path

from ssvit.data.sources.splits import AUTO, NAMES, Items, Splits, resolve, spellings
from ssvit.errors import OptionError, UserError

IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".avif",
    ".avifs", ".ppm", ".pgm", ".pbm", ".pnm",
)  # fmt: skip
NPY = (".npy",)
SHARD = ".tar"
_BROKEN = "broken links"
_SHARDS = "contains shards; data=shards data.root=PATH reads them"
_NO_IMAGE = f"contains no image (a file ending in {', '.join(IMAGE_SUFFIXES + NPY)})"


def check(root: str, name: str = "root") -> None:
    """Check that a root is a folder with at least one image at any depth, stopping at the first.

    Raises:
        OptionError: It is not a folder, is unreadable, or contains no image.
    """
    if not os.path.exists(root):
        raise OptionError(name, root, "no such folder")
    if not os.path.isdir(root):
        raise OptionError(name, root, "must be a folder, not a file")
    try:
        if not any(_images(root)):
            raise OptionError(name, root, _SHARDS if shards(root) else _NO_IMAGE)
    except OSError as error:
        raise OptionError(name, root, f"cannot be read: {error.strerror}") from None


def count(root: str, at_most: int) -> int:
    """Return the number of images below a folder, counting up to `at_most`."""
    return sum(1 for _ in islice(_images(root), at_most))


def shards(root: str) -> list[str]:
    """Return the paths of the shards in a folder and its subfolders, relative to it."""
    return [path for depth in ("*", "*/*") for path in glob(f"{depth}{SHARD}", root_dir=root)]


def list_images(root: str, others: Counter[str] | None = None) -> list[tuple[str, str | None]]:
    """Return all images of a folder as (path, class name or None), sorted by class and path.

    Args:
        root: The folder.
        others: Counts the files that are not read, by suffix, and the broken links.

    Raises:
        UserError: A folder cannot be read, or there is no image.
    """
    images: list[tuple[str, str | None]] = []
    try:
        entries = _entries(root, others)
        suffixes = _suffixes(entries)
        if any(_is_image(entry, suffixes) for entry in entries):
            images = [(path, None) for path in sorted(image.path for image in _below(entries[::-1], suffixes, others))]
        else:
            for folder in entries:
                paths = sorted(image.path for image in _below([folder], suffixes, others))
                images += [(path, folder.name) for path in paths]
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
    if not images:
        raise UserError(f"{root}: {_NO_IMAGE}")
    return images


def pictures(path: str) -> list[tuple[str, str | None]]:
    """Return a file or all images below a folder as (path, class name or None), in the order of `list_images`.

    Raises:
        OptionError: The path does not exist, or the folder contains no image.
    """
    if not os.path.exists(path):
        raise OptionError("images", path, "no such file or folder")
    if not os.path.isdir(path):
        return [(path, None)]
    check(path, "images")
    return list_images(path)


def paths(images: Iterable[str]) -> list[str]:
    """Return the paths of files and of all images below folders, sorted within each folder; errors as `pictures`."""
    return [path for image in images for path, _ in sorted(pictures(image))]


def splits(root: str, names: Mapping[str, str | None]) -> Splits:
    """Resolve the subfolders for training, validation and test.

    A split is a subfolder that holds images, or its only entry if both have the same name, as in seg_train/seg_train.
    With train=null, auto selects no subfolder, since a class may have a known name. Without any split the entire folder
    is for training. A folder called train is an ordinary class if it is next to other classes and there are neither
    validation nor test images.
    """
    if names["train"] is None:  # a class may have a known name
        names = {part: None if name == AUTO else name for part, name in names.items()}

    def find(name: str) -> Items:
        for existing in spellings(name, os.listdir(root)) or (name,):
            folder = os.path.join(root, existing)
            if os.path.isdir(folder) and any(_images(folder)):
                entries = _entries(folder)
                is_nested = [entry.name for entry in entries] == [existing] and entries[0].is_dir()
                return (entries[0].path if is_nested else folder,)
        return ()

    def rest(held_out: Items) -> Items:
        return () if held_out else (root,)

    result = resolve(names, find, rest, expected=f"a subfolder of {root} that holds images", shared=_shared)
    if names["train"] == AUTO and not result.validation + result.test:
        entries = _entries(root)
        if any(_below([entry for entry in entries if entry.name.lower() not in NAMES], _suffixes(entries))):
            return Splits((root,))
    return result


def unused_folders(root: str, used: Collection[str]) -> list[str]:
    """Return the names of the subfolders that hold images, but neither are nor contain one of the used folders."""
    if root in used:
        return []
    others = [entry for entry in _entries(root) if entry.is_dir() and not _shared(tuple(used), (entry.path,))]
    return [entry.name for entry in others if any(_images(entry.path))]


def _shared(paths: Items, other_paths: Items) -> str | None:
    """Return a folder of one split that contains or equals a folder of another split, or None."""
    for path, other_path in product(paths, other_paths):
        if os.path.commonpath(resolved := [os.path.realpath(path), os.path.realpath(other_path)]) in resolved:
            return f"{path}/"
    return None


def _entries(folder: str, others: Counter[str] | None = None) -> list[os.DirEntry[str]]:
    """Return the entries of a folder sorted by name, without hidden files, broken links and circular links.

    Args:
        folder: The folder.
        others: Counts the broken links.
    """
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    readable = [entry for entry in visible if not entry.is_symlink() or os.path.exists(entry.path)]
    if others is not None and len(readable) < len(visible):
        others[_BROKEN] += len(visible) - len(readable)
    return sorted(readable, key=lambda entry: entry.name)


def _suffixes(entries: Sequence[os.DirEntry[str]]) -> tuple[str, ...]:
    """Return the suffixes of images in a folder with these entries: `NPY` if it contains no other images."""
    return IMAGE_SUFFIXES if any(_below(list(reversed(entries)), IMAGE_SUFFIXES)) else NPY


def _is_image(entry: os.DirEntry[str], suffixes: tuple[str, ...]) -> bool:
    return entry.name.lower().endswith(suffixes) and entry.is_file()


def _images(folder: str) -> Iterator[str]:
    """Return the paths of the images below a folder."""
    entries = _entries(folder)
    return (image.path for image in _below(entries[::-1], _suffixes(entries)))


def _below(
    remaining: list[os.DirEntry[str]], suffixes: tuple[str, ...], others: Counter[str] | None = None
) -> Iterator[os.DirEntry[str]]:
    """Yield the images among entries and below them, following links except those to a folder that contains them.

    Args:
        remaining: Stack of entries, since folders may be nested deeper than Python's recursion limit.
        suffixes: Suffixes of images.
        others: Counts the other files by suffix, and the broken links.
    """
    while remaining:
        entry = remaining.pop()
        if _is_image(entry, suffixes):
            yield entry
        elif entry.is_dir() and not (entry.is_symlink() and _is_circular(entry.path)):
            remaining += _entries(entry.path, others)[::-1]
        elif others is not None and entry.is_file():
            others[os.path.splitext(entry.name)[1].lower() or "no suffix"] += 1


def _is_circular(link: str) -> bool:
    """Return whether a link leads to a folder that contains it, or to one from which other links have led to it."""
    target = os.path.realpath(link)
    above = map(os.path.realpath, Path(link).parents)
    return any(os.path.commonpath([target, folder]) == target for folder in above)
