"""Read files of torch.save by torch.load as data: no class or function outside of torch is called.

The opcodes of the pickles are counted first, as torch.load does not bound the memory that a file may use.
"""

import io
import pickletools
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Limits on a file; an encoder of 1,000 layers is below them.
_MAX_PICKLE = 10_000_000  # bytes
_MAX_OPCODES = 1_000_000
_MAX_TUPLES = 60_000  # a tensor needs four; hashing 100,000 nested tuples overflows the stack
_MAX_DEPTH = 16  # nested dictionaries
_TENSORS = {f"torch._utils _rebuild_{name}" for name in ("tensor", "tensor_v2", "parameter", "parameter_with_state")}


class ContentError(ValueError):
    """Report content of a file that is not read; the message names it."""


class _Ignored:
    """Replace an object of a class outside of torch, such as argparse.Namespace, without its arguments and state."""

    def __new__(cls, *arguments: object) -> "_Ignored":
        return super().__new__(cls)

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def read_tensors(path: Path) -> dict[str, "Tensor"]:
    """Return the tensors of a file by their full names: {"model": {"norm": …}} contains model.norm.

    Any other content is ignored. Values are memory-mapped from the file.

    Raises:
        ContentError: The file contains more than plain tensors, or was written by torch before 1.6.
        Exception: The file is damaged, as torch, zipfile and pickletools report it.
    """
    if not zipfile.is_zipfile(path):
        raise ContentError("must be a file of torch 1.6 or newer (torch.save); it is older, or damaged")
    names: set[str] = set()
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                raise ContentError(f"{member.filename!a} is compressed or encrypted, which torch never writes")
            if member.filename.endswith("data.pkl"):
                if member.file_size > _MAX_PICKLE:
                    raise ContentError(f"its pickle is longer than {_MAX_PICKLE:,} bytes")
                names |= _globals(archive.read(member))
    import torch

    with torch.serialization.safe_globals([(_Ignored, name.replace(" ", ".")) for name in names]):
        return _named(torch.load(path, map_location="cpu", weights_only=True, mmap=True))


def _globals(pickle: bytes) -> set[str]:
    """Return the classes and functions that a pickle names, as "module name"."""
    names, tuples = set(), 0
    for count, (code, argument, _) in enumerate(pickletools.genops(io.BytesIO(pickle))):
        tuples += code.name.startswith("TUPLE")
        if count >= _MAX_OPCODES or tuples > _MAX_TUPLES:
            raise ContentError(f"its pickle has more than {_MAX_OPCODES:,} opcodes or {_MAX_TUPLES:,} tuples")
        if code.name == "GLOBAL":
            assert isinstance(argument, str)
            is_tensor = argument.startswith("torch._utils _rebuild")
            if (is_tensor and argument not in _TENSORS) or argument.endswith(" bytearray"):
                raise ContentError(f"its pickle calls {argument.split()[-1]!a}; only plain tensors are read")
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
            tensors[".".join(keys)] = value
        elif isinstance(value, Mapping) and id(value) not in entered:
            entered.add(id(value))
            if len(keys) == _MAX_DEPTH:
                raise ContentError(f"its dictionaries are nested more than {_MAX_DEPTH} deep")
            waiting += [((*keys, str(key)), part) for key, part in reversed(list(value.items()))]
    return tensors
