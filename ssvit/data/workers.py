"""Worker processes that read images: what they hand over, what they may use, and how they end.

A worker hands over parts of a micro-batch, of which the main process puts the micro-batch together. Whatever ends a
worker is reported in one line, and no worker outlives the main process.
"""

import atexit
import contextlib
import ctypes
import errno
import math
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from multiprocessing.process import BaseProcess

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ssvit.data.batch import Batch, Transform
from ssvit.data.sources.base import Unreadable
from ssvit.options import OptionError, UserError
from ssvit.private import end_workers

TIMEOUT = 300.0  # seconds; less than the 600 that process groups wait for each other, so that the cause is told first
PART = 32  # images decoded before they are augmented together
SENT = 64  # images that a worker hands over together, a multiple of PART
_AHEAD = 2  # such parts that each worker reads ahead, and micro-batches that all of them do, at least
_SHARED_MEMORY = "/dev/shm"  # through which workers hand over their tensors
_MORE_ROOM = "take fewer data workers, or a larger /dev/shm (docker run --shm-size=…)"
_FILES, _SPARE_FILES = 4, 16  # open for each worker, two pipes of two ends; open at times, to receive tensors
Read = tuple[Batch, list[Unreadable]] | UserError  # a part of a micro-batch and the files that it lacks


def check_room(transform: Transform, images: int, workers: int, bytes_per_pixel: int) -> None:
    """OptionError if what workers read ahead, of micro-batches of so many images, does not fit into shared memory."""
    size = getattr(transform, "bytes_per_image", None)  # of three channels of bytes
    if not workers or size is None or not os.path.isdir(_SHARED_MEMORY):
        return
    size = size * bytes_per_pixel // 3
    # Besides those read ahead the main process has one in its hands.
    needed = (_ahead(images, workers) * workers + 1) * min(images, SENT) * size
    status = os.statvfs(_SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        right = f"read {needed / 1e6:.0f} MB ahead, and {_SHARED_MEMORY} has {free / 1e6:.0f} MB free: {_MORE_ROOM}"
        raise OptionError("workers", workers, right)


def _ahead(images: int, workers: int) -> int:
    """Parts that each worker reads ahead of micro-batches of so many images."""
    return max(_AHEAD, math.ceil(_AHEAD * images / (SENT * workers))) if images > SENT else _AHEAD


class _Joining:
    """A micro-batch that is put together of its parts.

    Args:
        images: Number of images of the micro-batch.
        pinned: Whether to put it into pinned memory.

    Attributes:
        missing: Number of images that were not tried yet.
    """

    def __init__(self, images: int, pinned: bool) -> None:
        self.images = self.missing = images
        self.pinned, self.filled = pinned, 0
        self.whole: Batch | None = None

    def add(self, part: Batch) -> None:
        """Copy the next part, whose own memory is free then; one that is the whole batch stays as it is."""
        tried = min(self.missing, SENT)
        self.missing -= tried
        if tried == self.images and not self.pinned:
            self.whole, self.filled = part, len(part.slots)
        elif len(part.slots):
            self.whole = self.whole or part.map(self._empty)
            after = self.filled + len(part.slots)
            for joined, one in zip(self.whole.tensors, part.tensors, strict=True):
                joined[self.filled : after] = one
            self.filled = after

    def _empty(self, like: Tensor) -> Tensor:
        return torch.empty((self.images, *like.shape[1:]), dtype=like.dtype, pin_memory=self.pinned)

    @property
    def batch(self) -> Batch | None:
        """All readable images; None if there is none."""
        return self.whole.map(lambda tensor: tensor[: self.filled]) if self.whole and self.filled else None


def share(batch: Batch) -> None:
    """In a worker, move tensors to shared memory: the thread that sends them would drop those that it cannot move."""
    if get_worker_info() is None:
        return
    try:
        for tensor in batch.tensors:
            tensor.share_memory_()
    except RuntimeError as error:
        _check_open_files(error)
        reason = str(error).rpartition(": ")[2]
        raise UserError(f"a data worker cannot share its images ({reason}): {_MORE_ROOM}") from None


def _check_open_files(error: Exception) -> None:
    """UserError if an error comes from too many open files."""
    # Where a descriptor could not be received, Python says "received 0 items of ancdata".
    if getattr(error, "errno", None) == errno.EMFILE or re.search("Too many open files|ancdata", str(error)):
        line = "too many open files for so many data workers: take fewer, or a higher limit (ulimit -n)"
        raise UserError(line) from None


def read(
    reader: Dataset[Read],
    work: Iterable[tuple[Tensor, Tensor]],
    images: int,
    tally: Callable[[int, list[Unreadable]], None],
    *,
    workers: int,
    timeout: float,
    device: torch.device | str,
) -> Generator[Batch]:
    """Read micro-batches in order.

    Args:
        reader: Reads a part of a micro-batch, by lists of slots and of indices.
        work: Slots (b,) and indices (b,) of each micro-batch.
        images: Number of images of a micro-batch, at most.
        tally: Takes, of each part, the number of images that were tried and those that are unreadable.
        workers: Number of processes; with 0, this process reads.
        timeout: Seconds to wait for a part, 0 for ever.
        device: Where the batches go. Those for a GPU are put together in pinned memory; torch keeps the pinned memory
            of batches that are gone for those that follow.

    Raises:
        UserError: The exchange with the workers ended. An error of the program's own in a worker stays as it is.
    """
    under_way: deque[int] = deque()  # images of each micro-batch whose parts are being read

    def parts() -> Iterator[tuple[list[int], list[int]]]:
        for slots, indices in work:
            under_way.append(len(slots))
            for part in zip(slots.split(SENT), indices.split(SENT), strict=True):
                # Lists, since each tensor sent to a worker would cost a shared memory file.
                yield part[0].tolist(), part[1].tolist()

    loader = DataLoader(
        reader,
        sampler=parts(),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=_ahead(images, workers) if workers else None,
        worker_init_fn=_bind,
    )
    pinned = torch.device(device).type == "cuda"
    joining: _Joining | None = None
    try:
        with _running(loader) as (results, processes):
            while True:
                with _in_time(processes, timeout):
                    result = next(results, None)
                if result is None:
                    return
                if isinstance(result, UserError):
                    raise result
                part, failures = result
                tally(len(part.slots) + len(failures), failures)
                joining = joining or _Joining(under_way.popleft(), pinned)
                joining.add(part)
                if joining.missing == 0:
                    batch, joining = joining.batch, None
                    if batch is not None:
                        yield batch.to(device)
    except (OSError, EOFError, RuntimeError) as error:
        if not workers or str(error).startswith("Caught "):  # torch's words for what was raised in a worker
            raise
        _check_open_files(error)
        raise UserError("a data worker died, most often for want of memory: try fewer data workers") from None


@contextlib.contextmanager
def _in_time(workers: Collection[BaseProcess], seconds: float) -> Iterator[None]:
    """UserError if workers leave the block waiting for longer, 0 for ever.

    They are killed then, which ends the wait for the queue or for a worker's socket: torch's own time-out knows the
    queue alone.
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
            f"no images came from the data workers for {seconds:g} seconds: they or their disk hang; "
            "a larger loader_timeout waits for longer, 0 for ever"
        ) from None
    finally:
        timer.cancel()


@contextlib.contextmanager
def _running(loader: DataLoader[Read]) -> Iterator[tuple[Iterator[Read], Collection[BaseProcess]]]:
    """A data loader's results and its workers, and the certainty that these end with the block."""
    handler, others = signal.getsignal(signal.SIGCHLD), set(multiprocessing.active_children())
    try:
        with contextlib.ExitStack() as stack:  # OSError here if this process may not open the files that they need
            for _ in range(_FILES * loader.num_workers + _SPARE_FILES if loader.num_workers else 0):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        results = iter(loader)
    except BaseException:
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()  # those that were started before one could not be
        raise
    workers = set(multiprocessing.active_children()) - others
    if workers and threading.current_thread() is threading.main_thread():
        # Torch's handler raises the death of a worker in whatever line the main process is; next() tells it as well.
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)

    def stop() -> None:
        if workers:
            end_workers(results)
        for worker in workers:
            worker.kill()  # only one that hangs is left by now

    # Registered after torch's own clean-up and hence run before it, which would wait for ever: workers ignore SIGTERM.
    atexit.register(stop)
    try:
        yield results, workers
    except GeneratorExit:
        raise
    except BaseException:
        for worker in workers:
            worker.kill()  # one that hangs would hold up its shutdown
        raise
    finally:
        atexit.unregister(stop)
        stop()


def _bind(worker: int) -> None:
    """Let a worker end with the main process, and not by Ctrl-C or SIGTERM, which reach the whole process group."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":
        # A worker that is stopped cannot see for itself that the main process was killed.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        # forkserver: the worker's parent is a server that lives as long as its workers do.
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(process: BaseProcess) -> None:
    multiprocessing.connection.wait([process.sentinel])
    os._exit(1)
