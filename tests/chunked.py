"""Chunks in LitData's layout, written by its description (litdata/streaming/writer.py)."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path


def write(folder: Path, items: Sequence[Sequence[bytes]], leaves: dict[str, str], *, size: int = 4, **config) -> None:
    """items: the bytes of the leaves of each; leaves: their kinds by their keys, 0, 1, … for a tuple."""
    folder.mkdir(parents=True, exist_ok=True)
    chunks = []
    for first in range(0, len(items), size):
        part = [struct.pack(f"<{len(item)}I", *map(len, item)) + b"".join(item) for item in items[first : first + size]]
        offsets = [4 * (len(part) + 2)]
        for item in part:
            offsets.append(offsets[-1] + len(item))
        data = struct.pack(f"<{len(offsets) + 1}I", len(part), *offsets) + b"".join(part)
        name = f"chunk-0-{len(chunks)}.bin"
        (folder / name).write_bytes(data)
        chunks.append({"chunk_bytes": len(data), "chunk_size": len(part), "dim": None, "filename": name})
    is_tuple = all(key.isdecimal() for key in leaves)
    spec = {
        "type": "builtins.tuple" if is_tuple else "builtins.dict",
        "context": "null" if is_tuple else json.dumps(list(leaves)),
        "children_spec": [{"type": None, "context": None, "children_spec": []} for _ in leaves],
    }
    given = {
        "compression": None, "encryption": None, "item_loader": "PyTreeLoader", "data_format": list(leaves.values()),
        "data_spec": json.dumps([1, spec]),
    }  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": given | config}))
