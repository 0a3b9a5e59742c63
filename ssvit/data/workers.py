"""Worker processes that read images: data exchange, resource limits, and termination.

The death of a worker for any reason is reported in one line, and no worker outlives the main process.
"""

import atexit
import contextlib
import ctypes
import errno
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ssvit.data.batch import Batch
from ssvit.data.sources.base import Unreadable
from ssvit.engine.clock import reporting_workers
from ssvit.engine.private import end_workers
from ssvit.errors import UserError

TIMEOUT = 300.0  # seconds; below the 600 of process groups, so that the cause is reported first
PART = 32  # images decoded before they are augmented together


class Read(NamedTuple):
    """Store a micro-batch that was read.

    Attributes:
        batch: The micro-batch.
        failures: Unreadable files.
        fingerprints: Indices and fingerprints of images, see `ssvit.data.fingerprints.indexed`.
        cpu_time: CPU seconds that a worker process spent on the micro-batch; 0 if the main process read it.
    """

    batch: Batch
    failures: list[Unreadable]
    fingerprints: bytes = b""
    cpu_time: float = 0.0

    @property
    def opened(self) -> int:
        """Return the number of files that were opened."""
        return len(self.batch.slots) + len(self.failures)


Result = Read | UserError


def share(batch: Batch) -> None:
    """Move the tensors of a batch to shared memory if this is a worker.

    Sending does this too, but in a thread that silently drops a batch whose tensors it cannot move.

    Raises:
        UserError: Shared memory is full, or too many files are open.
    """
    if get_worker_info() is None:
        return
    try:
        for tensor in batch.tensors:
            tensor.share_memory_()
    except RuntimeError as error:
        _check_open_files(error)
        reason = str(error).rpartition(": ")[2]
        remedy = "use fewer data workers, or a larger /dev/shm (docker run --shm-size=…)"
        raise UserError(f"a data worker cannot share its images ({reason}): {remedy}") from None


def _check_open_files(error: Exception) -> None:
    """Raise UserError if an error was caused by too many open files."""
    # If a descriptor could not be received, Python raises "received 0 items of ancdata".
    if getattr(error, "errno", None) == errno.EMFILE or re.search("Too many open files|ancdata", str(error)):
        line = "too many open files; use fewer data workers, or raise the limit (ulimit -n)"
        raise UserError(line) from None


def read_batches(
    reader: Dataset[Result],
    work: Iterable[tuple[Tensor, Tensor]],
    tally: Callable[[Read], None],
    *,
    workers: int,
    timeout: float,
    device: torch.device | str,
) -> Generator[Batch]:
    """Read micro-batches in order.

    The CPU time of worker processes counts in `ssvit.engine.clock.cpu_time` when their micro-batches are received.

    Args:
        reader: Reads a micro-batch from lists of slots and of indices.
        work: Slots (b,) and indices (b,) of each micro-batch.
        tally: Called for each micro-batch before it is yielded.
        workers: Number of worker processes; 0 reads in this process.
        timeout: Seconds to wait for a micro-batch, 0 for no limit.
        device: Device of the batches. Batches for a GPU are copied from pinned memory, which torch's allocator reuses.

    Raises:
        UserError: A worker died or exceeded the timeout. Programming errors in a worker are raised unchanged.
    """
    # Lists, since each tensor sent to a worker would take a file in shared memory.
    lists = ((slots.tolist(), indices.tolist()) for slots, indices in work)
    loader = DataLoader(reader, sampler=lists, batch_size=None, num_workers=workers, worker_init_fn=_bind)
    is_pinned = torch.device(device).type == "cuda"
    try:
        with reporting_workers() as add_cpu_time, _running(loader) as (results, processes):
            while True:
                with _in_time(processes, timeout):
                    result = next(results, None)
                if result is None:
                    return
                if isinstance(result, UserError):
                    raise result
                add_cpu_time(result.cpu_time)
                tally(result)
                batch = result.batch
                if len(batch.slots):
                    yield (batch.map(Tensor.pin_memory) if is_pinned else batch).to(device)
    except (OSError, EOFError, RuntimeError) as error:
        if not workers or str(error).startswith("Caught "):  # torch's prefix for exceptions raised in a worker
            raise
        _check_open_files(error)
        raise UserError("a data worker was killed, usually for lack of memory; use fewer data workers") from None


@contextlib.contextmanager
def _in_time(workers: Collection[BaseProcess], seconds: float) -> Iterator[None]:
    """Kill the workers if the block takes longer than `seconds`, 0 for no limit.

    Killing them ends a wait for the queue as well as for a worker's socket; torch's timeout covers the queue alone.

    Raises:
        UserError: The time limit was exceeded.
    """
    if not workers or not seconds:
        yield
        return
    over = threading.Event()

    def kill() -> None:
        over.set()
        for worker in workers:
            worker.kill()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, EOFError, RuntimeError):
        if not over.is_set():
            raise
        raise UserError(
            f"loader_timeout={seconds:g}: no batch arrived from the data workers within this many seconds; "
            "a worker or its disk may hang (0 for no limit)"
        ) from None
    finally:
        timer.cancel()


@contextlib.contextmanager
def _running(loader: DataLoader[Result]) -> Iterator[tuple[Iterator[Result], Collection[BaseProcess]]]:
    """Start a data loader, yield its results and its workers, and guarantee that the workers end with the block."""
    handler, others = signal.getsignal(signal.SIGCHLD), set(multiprocessing.active_children())
    try:
        results = iter(loader)
    except BaseException:
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()  # workers that were started before a later one failed
        raise
    workers = set(multiprocessing.active_children()) - others
    if workers and threading.current_thread() is threading.main_thread():
        # Torch's handler raises at an arbitrary line of the main process when a worker dies; next() raises it as well.
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)

    def stop() -> None:
        if workers:
            end_workers(results)
        for worker in workers:
            worker.kill()  # only a worker that hangs is still alive

    # Registered after torch's clean-up and hence run before it; that would wait for ever, as workers ignore SIGTERM.
    atexit.register(stop)
    try:
        yield results, workers
    except GeneratorExit:
        raise
    except BaseException:
        for worker in workers:
            worker.kill()  # a worker that hangs would delay the shutdown
        raise
    finally:
        atexit.unregister(stop)
        stop()


def _bind(worker: int) -> None:
    """Let a worker ignore Ctrl-C and SIGTERM, which reach all of the process group, and end with the main process."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":
        # A suspended worker could not detect by itself that the main process was killed.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        # forkserver: the parent of a worker is the server, which lives as long as its workers.
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(process: BaseProcess) -> None:
    """Exit this process when another one ends."""
    multiprocessing.connection.wait([process.sentinel])
    os._exit(1)
