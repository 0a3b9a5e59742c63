"""Read and set options by their dotted names, such as data.augment.size."""

from collections.abc import Mapping
from typing import Any


def at(options: object, name: str) -> Any:
    """Return the value with a dotted name, such as data.augment, in options or plain data; None if there is none."""
    for key in name.split("."):
        options = options.get(key) if isinstance(options, Mapping) else getattr(options, key, None)
    return options


def put(options: dict[str, Any], name: str, value: object) -> None:
    """Set the value with a dotted name in plain data, whose group exists."""
    group, _, key = name.rpartition(".")
    node = at(options, group) if group else options
    node[key] = value
