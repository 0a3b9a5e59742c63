"""Communication of processes that evaluate together. Without torch.distributed there is one process."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed

from ssvit.options import UserError

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    """Which process of how many this is."""
    together = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if together else (0, 1)


def gather(act: Callable[[], T]) -> list[T]:
    """What `act` returns in each process, in all of them; a UserError of one is raised in all, so that none waits."""
    _, world = rank_and_world()
    if world == 1:
        return [act()]
    try:
        result: object = act()
    except UserError as error:
        result = UserError(str(error))  # an OptionError cannot be unpickled
    results: list[Any] = [None] * world
    distributed.all_gather_object(results, result)
    for result in results:
        if isinstance(result, UserError):
            raise result
    return results
