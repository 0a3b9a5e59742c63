"""Show the progress of long computations on a terminal."""

import sys
from collections.abc import Callable

from tqdm import tqdm


def progress(description: str, unit: str) -> Callable[[int, int], None]:
    """Return a function of (done, all) that shows the progress, its rate and the remaining time.

    Args:
        description: Description of the computation.
        unit: Unit of the count, such as " images".
    """
    interval = 0.5 if sys.stdout.isatty() else 10  # seconds between updates, and before the first
    bar = tqdm(desc=description, unit=unit, mininterval=interval, delay=interval, dynamic_ncols=True, file=sys.stdout)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show
