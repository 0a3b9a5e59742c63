"""Several processes of one run on this machine, as torchrun would start them, but faster."""

import multiprocessing
import os
import socket
from collections.abc import Callable

from command import LIMIT

children = multiprocessing.get_context("forkserver")
children.set_forkserver_preload(["tiny"])


def start(work: Callable[..., None], world: int, *arguments: object) -> list[int]:
    """Call a function of a module in so many processes; returns their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [children.Process(target=_enter, args=(work, rank, world, port, arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
    return [process.exitcode for process in processes]


def own_rank() -> int:
    """The number of this process."""
    return int(os.environ["RANK"])


def _enter(work: Callable[..., None], rank: int, world: int, port: int, arguments: tuple[object, ...]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test",
    )  # fmt: skip
    work(*arguments)
