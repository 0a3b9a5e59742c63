"""Read the values of options from texts with the rules of YAML 1.2, and write values as texts.

The library yaml is imported only for texts that need it, so that commands start fast.
"""

import math
import numbers
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_WORDS = {"null": None, "true": True, "false": False}
_INTEGER = re.compile(r"[+-]?(0|[1-9]\d*|[1-9]\d{0,2}(_\d{3})+)", re.ASCII)  # 2024_01 is a text, which may be a path
_FLOAT = re.compile(r"[+-]?(((0|[1-9]\d*)(\.\d*)?|\.\d+)(e[+-]?\d+)?|inf|nan)", re.ASCII | re.IGNORECASE)
_QUOTED = re.compile(r"'([^']|'')*'|\"([^\"\\]|\\.)*\"", re.DOTALL)
_PLAIN = re.compile(r"[\w./+=-]+")  # texts that need no quotes inside a list


def value_of(text: str) -> object:
    """Return the value that a text represents.

    A list [a, b], a dictionary {a: b}, null, true, false, a number and a text in quotes are read as in YAML 1.2; the
    space after a colon may be missing, and 1_000 is a number. Any other text, such as a path, is returned unchanged.
    """
    with suppress(ValueError, OverflowError, RecursionError):
        if text[:1] + text[-1:] in ("[]", "{}") or _QUOTED.fullmatch(text):
            return _from_yaml(text)
        return _scalar(text)
    return text


def text_of(value: Any, *, inside: bool = False) -> str:
    """Return a text from which `value_of` reads a value; paths become texts, and tuples become lists.

    Args:
        value: A string, a path, a number, a flag, None, a list or a dictionary.
        inside: Whether the text is used inside a list or a dictionary.

    Raises:
        TypeError: The value has another type.
    """
    value = plain(value)
    if isinstance(value, list):
        return f"[{','.join(text_of(item, inside=True) for item in value)}]"
    if isinstance(value, dict):
        pairs = (f"{text_of(name, inside=True)}: {text_of(item, inside=True)}" for name, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    text = str(value)
    if value_of(text) == text and (_PLAIN.fullmatch(text) or not inside):
        return text
    if text.isprintable():
        return "'{}'".format(text.replace("'", "''"))

    import yaml

    return yaml.dump(text, default_style='"', width=math.inf).removesuffix("\n")


def plain(value: Any) -> object:
    """Return a value as plain data: paths as texts, tuples as lists, and NumPy's numbers as Python's.

    Args:
        value: As in `text_of`.

    Raises:
        TypeError: The value has another type.
    """
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(text := os.fspath(value), bytes):
        raise TypeError
    return text


def _scalar(text: str) -> object:
    value = int(text) if _INTEGER.fullmatch(text) else float(text) if _FLOAT.fullmatch(text) else text
    return _WORDS.get(text.lower(), value)


def _from_yaml(text: str) -> object:
    """Return a list, a dictionary or a quoted text; the text itself if it is not YAML, or has a tag or an alias."""
    import yaml

    refused = yaml.AliasToken, yaml.AnchorToken, yaml.TagToken
    with suppress(yaml.YAMLError):
        if not any(isinstance(token, refused) for token in yaml.scan(text)):
            return _value(yaml.compose(text))
    return text


def _value(node: Any) -> object:
    """Return the value of a node of yaml."""
    if node.id == "mapping":
        return dict(_entry(key, value) for key, value in node.value)
    if node.id == "sequence":
        return [_value(item) for item in node.value]
    return node.value if node.style else _scalar(node.value)


def _entry(key: Any, value: Any) -> tuple[str, object]:
    """Return an entry of a dictionary. YAML reads {lr:1e-3} as a key without a value, as it does {name}."""
    is_empty = value.value == "" and not value.style
    if key.id != "scalar" or (is_empty and ":" not in key.value):
        raise ValueError
    name, _, text = key.value.partition(":")
    return (name, value_of(text)) if is_empty else (key.value, _value(value))
