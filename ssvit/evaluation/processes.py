"""Communicate between the processes of an evaluation; without torch.distributed there is a single process."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import distributed

from ssvit.errors import UserError

T = TypeVar("T")


class Interrupted(BaseException):
    """Signal a request to stop while waiting for data or during an evaluation.

    It is not an Exception, so that decoders and probes that handle their own failures do not catch it.
    """


@dataclass(frozen=True)
class _Ended:
    """Replace the result of a process after the end or interruption of its evaluation."""

    is_interrupted: bool


def rank_and_world() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    together = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if together else (0, 1)


def all_gather_results(act: Callable[[], T]) -> list[T]:
    """Call `act` in each process and return all results, by rank, in each process.

    Args:
        act: Function without arguments, whose result is pickled.

    Raises:
        UserError: In all processes, if `act` raised it in one of them.
        Interrupted: If another process was interrupted, see `end_evaluation`.
    """
    _, world = rank_and_world()
    if world == 1:
        return [act()]
    try:
        result: object = act()
    except UserError as error:
        result = error
    results = _exchange(result)
    if any(isinstance(result, _Ended) for result in results):
        raise Interrupted
    for result in results:
        if isinstance(result, UserError):
            raise result
    return results


def end_evaluation(*, is_interrupted: bool) -> bool:
    """Wait until all processes have ended their evaluation, and return whether any of them was interrupted.

    An interrupted process calls this while other processes may be waiting in `all_gather_results`, which then raises
    Interrupted in them, upon which they call this too.
    """
    while True:
        results = _exchange(_Ended(is_interrupted))
        if all(isinstance(result, _Ended) for result in results):
            return any(result.is_interrupted for result in results)


def _exchange(value: object) -> list[Any]:
    """Return the values of all processes, by rank.

    Signals are handled after the collective operation, because no process may leave it early.
    """
    _, world = rank_and_world()
    if world == 1:
        return [value]
    results: list[Any] = [None] * world
    with _delayed_signals():
        distributed.all_gather_object(results, value)
    return results


@contextlib.contextmanager
def _delayed_signals() -> Iterator[None]:
    """Defer Python's handlers of SIGTERM and SIGINT to the end of the block."""
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
