"""Files of weights: their tensors' names and shapes, read before torch is loaded where the format allows, and these.

safetensors and npz tell shapes in headers. A .pth file does not, and is read with torch, weights only; nothing that a
file holds is run.
"""

import ast
import hashlib
import json
import struct
import zipfile
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssvit.exchange.layout import Shapes
from ssvit.options import OptionError, UserError

if TYPE_CHECKING:
    from torch import Tensor

TORCH = (".pth", ".pt", ".bin")
FORMATS = (".safetensors", ".npz", *TORCH)
_LONGEST_HEADER = 100_000_000  # bytes, as the safetensors library has it


class ForeignError(UserError):
    """A file of weights cannot be read, or not be placed."""


def check(path: Path) -> None:
    """OptionError unless a file's name ends in one of FORMATS."""
    if path.suffix not in FORMATS:
        raise OptionError("checkpoint", path, f"a file of weights ends in {', '.join(FORMATS)}")


def shapes(path: Path) -> Shapes:
    """Names and shapes of the tensors in a file. ForeignError if it is damaged or holds anything but numbers."""
    check(path)
    try:
        if path.suffix == ".safetensors":
            return _safetensors(path)
        if path.suffix == ".npz":
            return dict(_npz(path))
    except OSError as error:
        raise ForeignError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        SyntaxError,
        struct.error,
        zipfile.BadZipFile,
        EOFError,
    ):
        raise ForeignError(f"{path}: is damaged, or no {path.suffix} file") from None
    return {name: tuple(tensor.shape) for name, tensor in _torch(path).items()}


def _safetensors(path: Path) -> Shapes:
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _LONGEST_HEADER:
            raise ValueError
        header = json.loads(file.read(length))
    return {name: tuple(facts["shape"]) for name, facts in header.items() if name != "__metadata__"}


def _npz(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each member is an array with a header of its own: a magic word, a version, a length and a literal."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            with archive.open(member) as file:
                magic = file.read(8)
                if magic[:6] != b"\x93NUMPY":
                    raise ValueError
                length = "<H" if magic[6] == 1 else "<I"
                (size,) = struct.unpack(length, file.read(struct.calcsize(length)))
                if size > _LONGEST_HEADER:
                    raise ValueError
                facts = ast.literal_eval(file.read(size).decode("latin1"))
            if "O" in str(facts["descr"]):
                raise ForeignError(f"{path}: {member} holds Python objects, which are not loaded")
            yield member.removesuffix(".npy"), tuple(facts["shape"])


def tensors(path: Path, names: Collection[str]) -> dict[str, "Tensor"]:
    """Some tensors of a file, in float32. ForeignError if one cannot be read or is not finite."""
    import torch

    if path.suffix in TORCH:
        found = {name: tensor for name, tensor in _torch(path).items() if name in names}
    else:
        import numpy
        import safetensors

        try:
            if path.suffix == ".npz":
                with numpy.load(path, allow_pickle=False) as arrays:
                    found = {name: torch.from_numpy(arrays[name]) for name in names}
            else:
                with safetensors.safe_open(path, "pt") as file:
                    found = {name: file.get_tensor(name) for name in names}
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, safetensors.SafetensorError) as error:
            raise ForeignError(f"{path}: is damaged ({' '.join(str(error).split())})") from None
    for name, tensor in found.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ForeignError(f"{path}: {name} is not made of finite numbers")
    return {name: tensor.float() for name, tensor in found.items()}


def _torch(path: Path) -> dict[str, "Tensor"]:
    """The tensors of a file that torch wrote, by names that tell what they stood in: {"model": {"norm": …}} as
    model.norm. Whatever else it holds is passed over."""
    import pickle

    import torch

    def flat(value: Any, name: str) -> Iterator[tuple[str, "Tensor"]]:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            for key, part in value.items():
                yield from flat(part, f"{name}.{key}" if name else str(key))

    try:
        return dict(flat(torch.load(path, map_location="cpu", weights_only=True), ""))
    except pickle.UnpicklingError:
        raise ForeignError(f"{path}: holds more than numbers, or is damaged; nothing of it was run") from None
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, TypeError, AttributeError) as error:
        raise ForeignError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]})") from None


def digest(path: Path) -> str:
    """The sha256 of a file, which tells it from any other."""
    try:
        facts = path.stat()
        return _digest(path, facts.st_mtime_ns, facts.st_size)
    except OSError as error:
        raise ForeignError(f"{path}: cannot be read ({error.strerror})") from None


@lru_cache(maxsize=4)
def _digest(path: Path, *when: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
