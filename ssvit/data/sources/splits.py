"""Which images of a data set are trained on, which are for choices, and which for the reported figure. No torch.

Every source resolves its splits by the rules of `resolve`. It has items with names, such as subfolders, values of a
column, or shards. An option names a split; `auto` stands for the first known name that the data set has.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ssvit.options import OptionError

AUTO = "auto"
# The names that auto finds, the first before the others.
KNOWN = {"train": ("train",), "validation": ("val", "validation", "valid"), "test": ("test",)}
NAMES = tuple(name for names in KNOWN.values() for name in names)
Items = tuple[str, ...]


class Splits(NamedTuple):
    """The items of a data set by what their images are for, () for none."""

    train: Items
    validation: Items = ()
    test: Items = ()


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
    """Find the items of each split.

    Args:
        names: The options train, validation and test: the name of a split, auto, or None for none.
        find: Returns the items that have a name, () if there is none.
        rest: Returns the items to train on if none has the name of that split, by those that are held out; () if
            nothing tells them.
        expected: What a name stands for, for messages: "a subfolder of photos".
        shared: Returns what two splits have in common, or None.

    Raises:
        OptionError: No item has a name, two splits share an item, or none is left to train on.
    """
    items: dict[str, Items] = {}
    for part, name in names.items():
        choices = KNOWN[part] if name == AUTO else () if name is None else (str(name),)
        items[part] = next(filter(None, map(find, choices)), ())
        if choices and name != AUTO and not items[part]:
            raise OptionError(part, name, f"must be {AUTO}, null, or {expected}")
    items["train"] = items["train"] or rest(items["validation"] + items["test"])
    if not items["train"]:
        raise OptionError("train", names["train"], f"must name what to train on: {expected}")
    for part, other in (("validation", "train"), ("test", "train"), ("test", "validation")):
        if common := shared(items[part], items[other]):
            raise OptionError(part, names[part], f"shares {common} with data.{other}; null for none")
    return Splits(**items)
