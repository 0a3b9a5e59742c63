"""Show the progress of long computations."""

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from tqdm import tqdm

QUIET = 8.0  # seconds without output, at most
_REFRESHED = [time.perf_counter()]  # when a bar was shown by its thread: several short ones have no other output


def duration(seconds: float, clock: float | None) -> str:
    """Return a time as text.

    Args:
        seconds: The CPU time.
        clock: Ratio of the time by the clock to it; None if `seconds` is by the clock.
    """
    text, by_clock = (tqdm.format_interval(value) for value in (seconds, seconds * (clock or 1.0)))
    return f"{text} of time" if clock is None else f"{text} of CPU time, {by_clock} by the clock"


def minutes(seconds: float) -> str:
    """Return a CPU time as text, in seconds or minutes."""
    if seconds < 60:
        return f"{seconds:.0f} CPU seconds"
    return f"{seconds / 60:.{int(seconds < 600)}f} CPU minutes"


def _repeat(action: Callable[[], bool], last: list[float], ended: threading.Event) -> None:
    """Call a function `QUIET` seconds after the time `last`, and again, until it returns False or `ended` is set."""
    while not ended.wait(max(0.0, last[0] + QUIET - time.perf_counter())) and action():
        last[0] = time.perf_counter()


@contextlib.contextmanager
def working(description: str, print_line: Callable[[str], None]) -> Iterator[None]:
    """Print a line after every `QUIET` seconds of the block.

    Args:
        description: Description of the computation.
        print_line: Function that prints a line.
    """
    began, ended = time.perf_counter(), threading.Event()

    def report() -> bool:
        print_line(f"{description}: {time.perf_counter() - began:.0f} s")
        return True

    threading.Thread(target=_repeat, args=(report, [began], ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def progress(description: str, unit: str) -> Callable[[int, int], None]:
    """Return a function of (done, all) that shows the progress, its rate and the remaining time.

    Args:
        description: Description of the computation.
        unit: Unit of the count, such as " images".
    """
    interval = 0.5 if sys.stdout.isatty() else 10  # seconds between updates, and before the first
    bar = tqdm(desc=description, unit=unit, mininterval=interval, delay=interval, dynamic_ncols=True, file=sys.stdout)
    began = time.perf_counter()
    if began - _REFRESHED[0] > 2 * QUIET:  # the first bar of a command
        _REFRESHED[0] = began
    shown = weakref.ref(bar)  # the thread ends with the bar, also after an error

    def refresh() -> bool:
        if (current := shown()) is None or current.disable:
            return False
        current.delay = 0  # a bar that was shown before ends with a line
        current.refresh()
        return True

    threading.Thread(target=_repeat, args=(refresh, _REFRESHED, threading.Event()), daemon=True).start()

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show
