"""Files that outlive a power cut, and what shows that one has been damaged. Standard library only."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an OSError of the block, where the system tells no name (a full disk is met while writing)."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it; its name is as durable once `synchronise` has run on its folder."""
    with naming(path), open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: until the new one is complete, its name keeps the old one."""
    beside = path.with_name(f".{path.name}.part")
    try:
        write(beside, data)
        beside.replace(path)
    except OSError as error:
        error.filename = str(path)  # the one that the user knows
        raise
    finally:
        beside.unlink(missing_ok=True)


def synchronise(folder: Path) -> None:
    """Make a folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(facts: Mapping[str, Any]) -> str:
    """The sha256 of what a manifest says, but for the seal that stands in it: a flipped bit in a number shows."""
    facts = {key: value for key, value in facts.items() if key != "seal"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
