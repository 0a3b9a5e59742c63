"""One safetensors file, written tensor by tensor, so that no second copy of them is made.

The bytes are those of `safetensors.torch.save`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ssvit.atomic_io import written

# As the format orders them, the last ones first.
_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip
_ORDER = {dtype: place for place, dtype in enumerate(_NAMES)}


def write(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> str:
    """Write tensors by name, and wait until the disk has them; returns the file's sha256. OSError.

    notes: texts in the file's header, by name.
    """
    digest = hashlib.sha256()
    with written(path) as file:
        for part in _parts(tensors, notes):
            digest.update(part)
            file.write(part)
    return digest.hexdigest()


def notes(data: bytes) -> dict[str, str]:
    """The texts in the header of a file's content."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]).get("__metadata__", {})


def _parts(tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None) -> Iterator[bytes | memoryview]:
    """The file's content in pieces."""
    ordered = sorted(tensors, key=lambda name: (-_ORDER[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": dict(notes)} if notes else {}
    end = 0
    for name in ordered:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in ordered:
        yield tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
