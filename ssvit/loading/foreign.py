"""Open a file of foreign weights as a checkpoint. Imported only if there is such a file. No torch."""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ssvit.atomic_io import seal
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.exchange import files, reading, timm_model


def open_file(path: Path, options: Mapping[str, object]) -> Checkpoint:
    """Return a foreign file with the entries of a manifest; the result is cached for each version of the file.

    Args:
        path: The file.
        options: Some of `ssvit.exchange.reading_options.FOREIGN_OPTIONS`.

    Raises:
        OptionError: An option is required or not permitted.
        ForeignError: The layout of the file is unknown.
    """
    return _opened(path, _version(path), json.dumps(options, default=list))


@lru_cache(maxsize=4)
def _opened(path: Path, version: tuple[object, ...], options: str) -> Checkpoint:
    given = json.loads(options)
    of_timm = "model" in given or "arguments" in given
    foreign = timm_model.read(path, given) if of_timm else reading.read(path, given)
    facts = {"step": 0, "encoder": dict(foreign.arguments), "notes": list(foreign.notes)}
    return Checkpoint(path, facts | {"seal": seal({**facts, "file": files.digest(path)})}, foreign)


def _version(path: Path) -> tuple[Any, ...]:
    """Return names, sizes and times of a file and of the JSON files next to it, which describe it."""
    described = [(file.name, file.stat()) for file in (path, *sorted(path.parent.glob("*.json")))]
    return tuple((name, status.st_size, status.st_mtime_ns) for name, status in described)
