"""The output of a long computation that reports nothing itself."""

import io
import sys
import threading

from command import LIMIT

from ssvit.engine import progress


def test_lines_are_printed_until_the_block_ends(monkeypatch):
    monkeypatch.setattr(progress, "QUIET", 0.01)
    printed, lines = threading.Event(), []

    def show(line):
        lines.append(line)
        printed.set()

    before = set(threading.enumerate())
    with progress.working("fits", show):
        assert printed.wait(LIMIT)
    for thread in set(threading.enumerate()) - before:
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert all(line.startswith("fits: ") for line in lines)


def test_the_thread_of_a_bar_ends_with_the_bar(monkeypatch):
    monkeypatch.setattr(progress, "QUIET", 0.01)
    before = set(threading.enumerate())
    show = progress.progress("fits", " sets")
    (thread,) = (thread for thread in set(threading.enumerate()) - before if type(thread) is threading.Thread)
    show(0, 2)
    assert thread.is_alive()
    del show  # after an error, nothing refers to it
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_a_bar_that_was_shown_ends_with_a_line(monkeypatch):
    shown = threading.Event()

    class Output(io.StringIO):
        def write(self, text):
            if "fits" in text:
                shown.set()
            return super().write(text)

    monkeypatch.setattr(progress, "QUIET", 0.01)
    monkeypatch.setattr(sys, "stdout", output := Output())
    show = progress.progress("fits", " sets")
    assert shown.wait(LIMIT)
    show(2, 2)
    assert output.getvalue().endswith("\n")
