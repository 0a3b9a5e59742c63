"""The tools as commands: the options of a run that takes seconds, and what they print."""

import subprocess
import sys
from pathlib import Path

TINY = (
    "data.images=64", "data.held_out_images=32", "data.image_size=16", "encoder.width=16", "encoder.depth=2",
    "encoder.heads=2", "target.bits=1", "recipe.batch_size=8", "recipe.steps=6", "recipe.warmup=2",
    "recipe.save_every=2", "recipe.evaluate_every=3", "recipe.log_every=1", "recipe.precision=32-true",
    "fabric.accelerator=cpu",
)  # fmt: skip


def one_line(done) -> str:
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def start(folder: Path, tool: str, *options: str) -> subprocess.Popen:
    """A tool at work in a folder, its output to be read."""
    command = [sys.executable, str(Path(__file__).parent.parent / "tools" / f"{tool}.py"), "outputs=outputs", *options]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
