"""Commands as users run them: the options of a run that takes seconds, what they print, and when one hangs."""

import sys
import time
from collections.abc import Callable
from typing import Any

_began = time.perf_counter()
import pytest  # noqa: E402
import torch  # noqa: E402, F401 (loaded to be timed: conftest.py imports this module before anything loads torch)

from ssvit.errors import UserError  # noqa: E402

# Seconds after which a process is taken to hang. A tool spends most of its time on loading torch, so a slow or busy
# machine gets more; a tiny run takes a few times as long as this import, and the rest is room.
LIMIT = 600 * max(1.0, time.perf_counter() - _began)

TINY = (
    "data=shapes", "data.images=64", "data.held_out_images=32", "data.image_size=16", "encoder.width=16",
    "encoder.depth=2", "encoder.heads=2", "target.bits=1", "recipe.batch_size=8", "recipe.steps=6", "recipe.warmup=2",
    "recipe.save_every=2", "recipe.evaluate_every=3", "recipe.log_every=1", "recipe.precision=32-true",
    "launch.accelerator=cpu", "figures=none",
)  # fmt: skip


def tiny_options(*without: str) -> list[str]:
    """Return TINY without the options that start with one of these words."""
    return [option for option in TINY if not option.startswith(without)]


def one_line(done) -> str:
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def error_of(call: Callable[..., object], *arguments: object, **options: object) -> Any:
    """Call a function with a mistake; return the error, a UserError of one line."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def program(name: str, *options: str) -> list[str]:
    """Return the arguments of the process of a command: python -m ssvit NAME OPTIONS."""
    return [sys.executable, "-m", "ssvit", name.replace("_", "-"), *options]
