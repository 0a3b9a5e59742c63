"""On a terminal of 80 columns: the bar counts steps and fits, and Ctrl-C has an immediate answer."""

import codecs
import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import termios
from multiprocessing.connection import Connection
from pathlib import Path

import prefork
from command import LIMIT, TINY


class Terminal:
    """Run a command in a pseudo-terminal with 80 columns."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        told = [Connection(os.dup(slave)) for _ in range(2)]
        size = {"COLUMNS": "", "LINES": ""}
        self.process = prefork.start("pretrain", *TINY, *options, "outputs=outputs", folder=folder, told=told, **size)
        for file in told:
            file.close()
        os.close(slave)
        self.shown, self.decode = "", codecs.getincrementaldecoder("utf-8")().decode

    def status(self) -> int | None:
        """Wait for the end of the process, and return its exit status."""
        self.process.join(LIMIT)
        return self.process.exitcode

    def read(self, until: str | None = None) -> str:
        """Return the output up to a text, or to the end."""
        with contextlib.suppress(OSError):  # the command has ended
            while until is None or until not in self.shown:
                self.shown += self.decode(os.read(self.master, 4096))
        return self.shown


def test_the_bar_counts_steps_and_fits_the_terminal(tmp_path):
    terminal = Terminal(tmp_path, "recipe.steps=12", "probes=[]")
    shown = terminal.read()
    assert terminal.status() == 0, shown
    bars = [part for part in re.split(r"[\r\n]+", shown) if re.match(r"step \d+/12 \|", part)]
    assert max(map(len, bars)) <= 80
    assert any(re.search(r"step \d+/12 \|.*\| .*, loss [\d.]+, \d+ images/s", bar) for bar in bars)
    assert any("evaluating: held out" in bar for bar in bars)
    assert "step 1/12  loss" not in shown  # on a separate line, as without a terminal


def test_ctrl_c_has_an_immediate_answer_and_the_run_is_saved(tmp_path):
    terminal = Terminal(tmp_path, "recipe.steps=100000", "recipe.save_every=100000", "probes=[]")
    terminal.read(until="images/s")
    os.kill(terminal.process.pid, signal.SIGINT)
    shown = terminal.read()
    assert terminal.status() == 130, shown
    answer, end = shown.index("a second signal ends the process"), shown.index("stopped by SIGINT after step ")
    assert answer < end
    assert list((tmp_path / "outputs" / "masked_patch_shapes").glob("step_*"))
