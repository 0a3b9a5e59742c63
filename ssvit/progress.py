"""Progress of long computations on a terminal."""

import sys
from collections.abc import Callable

from tqdm import tqdm


def progress(what: str, unit: str) -> Callable[[int, int], None]:
    """Return a function of (done, all) that shows the progress, its rate and the remaining time.

    Args:
        what: What is computed.
        unit: What is counted, such as " images".
    """
    rarely = 0.5 if sys.stdout.isatty() else 10  # seconds; what ends sooner shows nothing
    bar = tqdm(desc=what, unit=unit, mininterval=rarely, delay=rarely, dynamic_ncols=True, file=sys.stdout)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show
