"""Several processes of one run on this machine, as torchrun would start them, but faster."""

import contextlib
import json
import multiprocessing
import os
import random
import socket
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from command import LIMIT
from prefork import children


def child(work: Callable[..., None], *arguments: object, **options: object) -> BaseProcess:
    """Return a process that will call a function of a module, and that ends when this process does."""
    return children.Process(target=_tied, args=(work, arguments, options))


def exit_codes(processes: Iterable[BaseProcess]) -> list[int | None]:
    """Start processes, wait until all have ended, and return their exit codes; one that hangs is killed."""
    processes = list(processes)
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    return [process.exitcode for process in processes]


def start(work: Callable[..., None], world: int, *arguments: object) -> list[int | None]:
    """Call a function of a module in several processes and return their exit codes."""
    port = free_port()
    return exit_codes(child(_enter, work, rank, world, port, arguments) for rank in range(world))


def free_port() -> int:
    """Return a free port outside of the range from which Linux takes those of other connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port


def results(work: Callable[..., object], world: int, folder: Path, *arguments: object) -> list[Any]:
    """Call a function of a module in the processes of one group; returns what each has returned, by way of JSON."""
    assert start(_write_result, world, work, folder, arguments) == [0] * world
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def _write_result(work: Callable[..., object], folder: Path, arguments: tuple[object, ...]) -> None:
    torch.distributed.init_process_group("gloo")
    with torch.no_grad():
        (folder / f"{own_rank()}.json").write_text(json.dumps(work(*arguments)))
    torch.distributed.destroy_process_group()


def own_rank() -> int:
    """The number of this process."""
    return int(os.environ["RANK"])


def _enter(work: Callable[..., None], rank: int, world: int, port: int, arguments: tuple[object, ...]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test",
    )  # fmt: skip
    work(*arguments)


def _tied(work: Callable[..., None], arguments: tuple[object, ...], options: dict[str, object]) -> None:
    # Its server lives as long as any process of it, so a test run that is killed would leave both.
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    # Data workers are forked, and hold their process's connections, as in a tool.
    multiprocessing.set_start_method("fork", force=True)
    work(*arguments, **options)


def _end_with(parent: BaseProcess) -> None:
    wait([parent.sentinel])
    os._exit(1)
