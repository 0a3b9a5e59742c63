"""Read files of weights: names and shapes of tensors, and the tensors; shapes need torch only for torch's format.

Shapes are compared with the size of the file before memory is allocated, and no code in a file is executed.
"""

import hashlib
import math
import struct
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ssvit.engine.atomic_io import check_regular
from ssvit.errors import UserError
from ssvit.exchange import torch_format
from ssvit.exchange.tensor_mapping import Shapes

if TYPE_CHECKING:
    from torch import Tensor

_MAX_HEADER = 10_000_000  # bytes of JSON, enough for about 100,000 tensors
_MAX_MEMBERS = 20_000  # maximum number of arrays in an .npz file
_SHOWN = 3  # maximum number of names in a message


class ForeignError(UserError):
    """Report a file of weights that cannot be read or does not fit any layout."""


def shapes(path: Path) -> Shapes:
    """Return the names and shapes of the tensors in a file.

    Raises:
        ForeignError: The file is damaged, or the shapes exceed its size.
    """
    with _reading(path):
        check_regular(path)
        read = {".safetensors": _safetensors, ".npz": _npz}.get(path.suffix, _torch)
        stored = read(path)
        if any(side < 0 for shape in stored.values() for side in shape):
            raise ValueError
        sizes = {name: math.prod(shape) for name, shape in stored.items()}
        bytes_of_file = path.stat().st_size
    if sum(sizes.values()) > bytes_of_file:
        largest = shown(max(sizes, key=sizes.__getitem__))
        raise ForeignError(f"{path}: has {bytes_of_file:,} bytes, too few for its tensors, such as {largest}")
    return stored


def shown(*names: str) -> str:
    """Format the first of some tensor names for a one-line message."""
    texts = [f"{ascii(name[:100])[1:-1]}{'…' * (len(name) > 100)}" for name in names[:_SHOWN]]
    more = len(names) - _SHOWN
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert any error that occurs while a file is parsed to ForeignError."""
    try:
        yield
    except UserError:
        raise
    except torch_format.ContentError as error:
        raise ForeignError(f"{path}: {error}") from None
    except OSError as error:
        raise ForeignError(f"{path}: cannot be read ({error.strerror or 'system error'})") from None
    except Exception:  # a malicious file can cause any exception in a parser
        raise ForeignError(f"{path}: is damaged, or no {path.suffix} file") from None


def _safetensors(path: Path) -> Shapes:
    """Return the names and shapes in a safetensors file."""
    import safetensors

    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    if length > _MAX_HEADER:
        raise ForeignError(f"{path}: has a header of {length:,} bytes; at most {_MAX_HEADER:,} are read")
    with safetensors.safe_open(path, "numpy") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def _npz(path: Path) -> Shapes:
    """Return the names and shapes in an .npz file, whose members are arrays with separate headers."""
    from numpy.lib import format

    stored: dict[str, tuple[int, ...]] = {}
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if len(members) > _MAX_MEMBERS:
            raise ForeignError(f"{path}: has {len(members):,} members; at most {_MAX_MEMBERS:,} are read")
        for member in members:
            name = member.filename.removesuffix(".npy")
            with archive.open(member) as file:
                if format.read_magic(file) != (1, 0):  # later versions allow headers of more than 64 kB
                    raise ValueError
                shape, _, dtype = format.read_array_header_1_0(file)
            if dtype.hasobject:
                raise ForeignError(f"{path}: {shown(name)} contains Python objects, which are not loaded")
            stored[name] = shape
    return stored


def _torch(path: Path) -> Shapes:
    """Return the names and shapes in a file of torch.save."""
    return {name: tuple(tensor.shape) for name, tensor in torch_format.read_tensors(path).items()}


def tensors(path: Path, names: Collection[str]) -> dict[str, "Tensor"]:
    """Return some of the tensors in a file, in float32.

    Raises:
        ForeignError: A tensor cannot be read, or is not finite in float32.
    """
    read = {".safetensors": _safetensors_tensors, ".npz": _npz_tensors}.get(path.suffix, _torch_tensors)
    converted = {}
    with _reading(path):
        for name, tensor in read(path, names):
            if not tensor.is_floating_point() or not (value := tensor.float()).isfinite().all():
                raise ForeignError(f"{path}: {shown(name)} must contain finite numbers in float32")
            converted[name] = value
    return converted


def _safetensors_tensors(path: Path, names: Collection[str]) -> Iterator[tuple[str, "Tensor"]]:
    import safetensors

    with safetensors.safe_open(path, "pt") as opened:
        for name in names:
            yield name, opened.get_tensor(name)


def _npz_tensors(path: Path, names: Collection[str]) -> Iterator[tuple[str, "Tensor"]]:
    import numpy
    import torch

    with numpy.load(path, allow_pickle=False) as arrays:
        for name in names:
            array = arrays[name]
            if array.dtype == "V2":  # numpy's representation of JAX's bfloat16
                array = (array.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
            elif array.dtype.kind == "f":  # torch supports neither non-native byte order nor more than 64 bits
                with numpy.errstate(over="ignore"):
                    array = array.astype(numpy.float32)
            yield name, torch.from_numpy(array)


def _torch_tensors(path: Path, names: Collection[str]) -> Iterator[tuple[str, "Tensor"]]:
    tensors = torch_format.read_tensors(path)
    return ((name, tensors[name].clone()) for name in names)  # the file may change while it is mapped


def digest(path: Path) -> str:
    """Return the sha256 of a file.

    Raises:
        ForeignError: It cannot be read.
    """
    with _reading(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
