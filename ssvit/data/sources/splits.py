"""Resolve which images of a data set are for training, for choices (validation) and for the reported figure (no torch).

Every source resolves its splits by the rules of `resolve`. A source has items with names, such as subfolders, values of
a column, or shards. An option names a split; `auto` selects the first known name that the data set has. Upper and lower
case of known names are not distinguished.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ssvit.errors import OptionError

AUTO = "auto"
# The names that auto accepts, in order of preference.
KNOWN = {
    "train": ("train", "training", "seg_train"),
    "validation": ("val", "validation", "valid", "dev", "eval"),
    "test": ("test", "testing", "seg_test"),
}
NAMES = tuple(name for names in KNOWN.values() for name in names)
_LIKE_SPLIT = re.compile(r"(?<![a-z])(train|test|val|dev|eval)(ing|id|idation|set|val)?(?![a-z])", re.IGNORECASE)
Items = tuple[str, ...]


class Splits(NamedTuple):
    """The items of a data set by purpose, () for none."""

    train: Items
    validation: Items = ()
    test: Items = ()


def spellings(name: str, existing: Iterable[str]) -> Items:
    """Return the existing names that equal a name, for a known name in any case; the exact one is first."""
    equal = (other for other in existing if other == name or (name in NAMES and other.lower() == name))
    return tuple(sorted(equal, key=lambda other: (other != name, other)))


def are_like_splits(classes: Iterable[str]) -> bool:
    """Return whether all names of at least two classes contain the name of a split as a word, as test_images does."""
    names = tuple(classes)
    return len(names) > 1 and all(map(_LIKE_SPLIT.search, names))


def intersection(some: Items, others: Items) -> str | None:
    """Return an item that two splits share, or None."""
    return min(set(some) & set(others), default=None)


def resolve(
    names: Mapping[str, str | None],
    find: Callable[[str], Items],
    rest: Callable[[Items], Items],
    *,
    expected: str,
    shared: Callable[[Items, Items], str | None] = intersection,
) -> Splits:
    """Resolve the options train, validation and test to the items of a data set.

    Args:
        names: Options train, validation and test: the name of a split, auto, or None for none.
        find: Returns the items with a name, () if there are none.
        rest: Returns the training items from the held-out ones if no item has the name of the training split; () if
            they cannot be inferred.
        expected: Kind of item that a name refers to, for messages: "a subfolder of photos".
        shared: Returns an item common to two splits, or None.

    Raises:
        OptionError: No item has a name, two splits share an item, or no training items remain.
    """
    items: dict[str, Items] = {}
    for part, name in names.items():
        choices = KNOWN[part] if name == AUTO else () if name is None else (name,)
        items[part] = next(filter(None, map(find, choices)), ())
        if choices and name != AUTO and not items[part]:
            raise OptionError(part, name, f"must be {AUTO}, null, or {expected}")
    items["train"] = items["train"] or rest(items["validation"] + items["test"])
    if not items["train"]:
        raise OptionError("train", names["train"], f"must name the training images: {expected}")
    for part, other in (("validation", "train"), ("test", "train"), ("test", "validation")):
        if common := shared(items[part], items[other]):
            raise OptionError(part, names[part], f"shares {common} with data.{other}; null for none")
    return Splits(**items)
