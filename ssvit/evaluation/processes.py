"""Communication of processes that evaluate together. Without torch.distributed there is one process."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import distributed

from ssvit.options import UserError

T = TypeVar("T")


class Interrupted(BaseException):
    """A request to stop during the wait for data or an evaluation.

    Not an Exception: a decoder or a probe that catches its own failures must not catch it.
    """


@dataclass(frozen=True)
class _Ended:
    """A process shares this instead of a result once its part of an evaluation has ended, or was interrupted."""

    stops: bool


def rank_and_world() -> tuple[int, int]:
    """Which process of how many this is."""
    together = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if together else (0, 1)


def gather(act: Callable[[], T]) -> list[T]:
    """Return what `act` returns in each process, in all of them, by rank.

    Raises:
        UserError: One of the processes has raised it, so that none waits.
        Interrupted: Another process was interrupted, see `settle`.
    """
    _, world = rank_and_world()
    if world == 1:
        return [act()]
    try:
        result: object = act()
    except UserError as error:
        result = UserError(str(error))  # an OptionError cannot be unpickled
    results = _exchange(result)
    if any(isinstance(result, _Ended) for result in results):
        raise Interrupted
    for result in results:
        if isinstance(result, UserError):
            raise result
    return results


def settle(*, stops: bool) -> bool:
    """Wait until all processes have ended their part of an evaluation; return whether any of them is to stop.

    A process that was interrupted calls this while others may still wait for its results: `gather` then raises
    Interrupted in those, and they call this in turn.
    """
    while True:
        results = _exchange(_Ended(stops))
        if all(isinstance(result, _Ended) for result in results):
            return any(result.stops for result in results)


def _exchange(value: object) -> list[Any]:
    """The values of all processes, by rank. A signal is handled afterwards: no process may leave a collective."""
    _, world = rank_and_world()
    if world == 1:
        return [value]
    results: list[Any] = [None] * world
    with _delayed_signals():
        distributed.all_gather_object(results, value)
    return results


@contextlib.contextmanager
def _delayed_signals() -> Iterator[None]:
    """Call Python's handlers of SIGTERM and SIGINT after the block instead of within it."""
    received: list[int] = []
    former = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    handlers = {signum: handler for signum, handler in former.items() if callable(handler)}
    try:
        for signum in handlers:
            signal.signal(signum, lambda signum, frame: received.append(signum))
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    for number in received:
        signal.raise_signal(number)
