"""Read files of torch.save by torch.load as data: no class or function outside of torch is called.

The opcodes of the pickles are counted first, as torch.load does not bound the memory that a file may use.
"""

import io
import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from torch import Tensor

# Limits on a file; an encoder of 1,000 layers is below them.
_LONGEST_PICKLE = 10_000_000  # bytes
_MOST_OPCODES = 1_000_000
_MOST_TUPLES = 60_000  # a tensor needs four; hashing 100,000 nested tuples overflows the stack
_DEEPEST = 16  # nested dictionaries
_LONGEST_NAME = 256  # characters
_OLD_PICKLES = 5  # pickles in a file before torch 1.6: magic number, version, system, contents, storage keys
_TENSORS = {f"torch._utils _rebuild_{name}" for name in ("tensor", "tensor_v2", "parameter", "parameter_with_state")}


class RefusedError(ValueError):
    """Report content of a file that is not read; the message names it."""


class _Ignored:
    """Replace an object of a class outside of torch, such as argparse.Namespace, without its arguments and state."""

    def __new__(cls, *arguments: object) -> "_Ignored":
        return super().__new__(cls)

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def read(path: Path) -> dict[str, "Tensor"]:
    """Return the tensors of a file by their full names ({"model": {"norm": …}} as model.norm).

    Any other content is ignored. Values are memory-mapped from the file, except in files of torch before 1.6.

    Raises:
        RefusedError: The file contains something that is not read.
        Exception: The file is damaged, as torch, zipfile and pickletools report it.
    """
    with open(path, "rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
        file.seek(0)
        names = {name for pickle in (_zipped if zipped else _consecutive)(file) for name in _globals(pickle)}
    import torch

    with torch.serialization.safe_globals([(_Ignored, name.replace(" ", ".")) for name in names]):
        return _named(torch.load(path, map_location="cpu", weights_only=True, mmap=zipped))


def _zipped(file: BinaryIO) -> Iterator[BinaryIO]:
    """Yield the pickles of a zip file, after checking their sizes."""
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                raise RefusedError(f"{member.filename!a} is compressed or encrypted, which torch never writes")
            if member.filename.endswith("data.pkl"):
                if member.file_size > _LONGEST_PICKLE:
                    raise RefusedError(f"its pickle is longer than {_LONGEST_PICKLE:,} bytes")
                yield io.BytesIO(archive.read(member))


def _consecutive(file: BinaryIO) -> Iterator[BinaryIO]:
    """Return the consecutive pickles of a file before torch 1.6."""
    pickles = io.BytesIO(file.read(_LONGEST_PICKLE))
    return (pickles for _ in range(_OLD_PICKLES))


def _globals(pickle: BinaryIO) -> set[str]:
    """Return the classes and functions that a pickle names, as "module name"."""
    names, tuples = set(), 0
    for count, (code, argument, _) in enumerate(pickletools.genops(pickle)):
        tuples += code.name.startswith("TUPLE")
        if count >= _MOST_OPCODES or tuples > _MOST_TUPLES:
            raise RefusedError(f"its pickle has more than {_MOST_OPCODES:,} opcodes or {_MOST_TUPLES:,} tuples")
        if code.name == "GLOBAL":
            assert isinstance(argument, str)
            of_tensors = argument.startswith("torch._utils _rebuild")
            if (of_tensors and argument not in _TENSORS) or argument.endswith(" bytearray"):
                raise RefusedError(f"it calls {argument.split()[-1]!a}, and plain tensors alone are read")
            names.add(argument)
    return names


def _named(root: object) -> dict[str, "Tensor"]:
    """Return the tensors in nested dictionaries by their full names; each dictionary is entered once."""
    from torch import Tensor

    tensors: dict[str, Tensor] = {}
    entered: set[int] = set()
    waiting: list[tuple[tuple[str, ...], object]] = [((), root)]
    while waiting:
        keys, value = waiting.pop()
        if isinstance(value, Tensor):
            if sum(map(len, keys)) > _LONGEST_NAME:
                raise RefusedError(f"it holds a name of more than {_LONGEST_NAME} characters")
            if (name := ".".join(keys)) in tensors:
                raise RefusedError(f"it holds {name!a} twice")
            tensors[name] = value
        elif isinstance(value, Mapping) and id(value) not in entered:
            entered.add(id(value))
            if len(keys) == _DEEPEST:
                raise RefusedError(f"its dictionaries stand more than {_DEEPEST} deep in one another")
            waiting += [((*keys, str(key)), part) for key, part in reversed(list(value.items()))]
    return tensors
