"""Batches from any step on, the same for any number of workers and processes.

A set in memory is gathered and augmented a micro-batch at a time, on the device. Other images are read and augmented
by worker processes, a micro-batch each; one that cannot be read gives its place to another, chosen by hash of the slot,
and is counted.

Letters: b images, c channels, h, w pixels.
"""

import atexit
import contextlib
import ctypes
import errno
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ssvit.data import sampler
from ssvit.data.batch import Batch, named
from ssvit.data.decode import Unreadable
from ssvit.data.source import Source
from ssvit.options import OptionError, UserError, number, printable, whole
from ssvit.randomness import permutation, uniform

TOLERATED = 0.01  # share of unreadable files above which a run stops
_ENOUGH = 300  # files seen before that share is judged, or all of them if there are fewer
_REPLACEMENTS = 64  # other images tried in the place of an unreadable one
_BLOCK, _MOST = 1 << 24, 4096  # bytes and number of images in memory that are augmented together
_PART = 32  # images decoded before they are augmented together
TIMEOUT = 300.0  # seconds; less than the 600 that process groups wait for each other, so that the cause is told first
_AHEAD = 2  # micro-batches that each worker reads ahead
_SHARED_MEMORY = "/dev/shm"  # through which workers hand over their tensors
_FEWER = "take fewer data workers, smaller micro-batches (a larger recipe.accumulate, or a smaller batch_size)"
_MORE_ROOM = f"{_FEWER}, or a larger /dev/shm (docker run --shm-size=…)"
_FILES, _SPARE_FILES = 4, 16  # open for each worker, two pipes of two ends; open at times, to receive tensors
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class Loader:
    """Training batches of a source.

    batch_size: images of a step over all `world` processes and `accumulate` micro-batches; workers: processes that
    read files (none are used for a set in memory); timeout: seconds to wait for a micro-batch of theirs, 0 for ever.
    OptionError for a batch size that cannot be split, or workers whose micro-batches do not fit into shared memory.
    `waited`: seconds spent waiting for data so far; `unreadable`: reason by path of the files that could not be read.
    """

    def __init__(
        self,
        *,
        source: Source,
        transform: Any,
        seed: int,
        batch_size: int,
        accumulate: int = 1,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        timeout: float = TIMEOUT,
        device: torch.device | str = "cpu",
    ) -> None:
        sampler.check(batch_size=batch_size, accumulate=accumulate, world=world, size=len(source))
        whole("workers", workers, 0)
        number("timeout", timeout, 0)
        if source.in_memory is None:
            _check_room(transform, batch_size // (accumulate * world), workers)
        self.source, self.transform, self.seed = source, transform, seed
        self.batch_size, self.accumulate, self.rank, self.world = batch_size, accumulate, rank, world
        self.workers, self.timeout, self.device = workers, timeout, torch.device(device)
        self.waited = 0.0
        self._tally = _Tally(len(source))

    @property
    def unreadable(self) -> dict[str, str]:
        """Why each file that could not be read so far could not: {path: reason}."""
        return self._tally.reasons

    def batches(self, first_step: int, last_step: int) -> Iterator[Batch]:
        """The micro-batches of steps first_step ... last_step - 1, in order.

        UserError if more than 1 % of the files cannot be read, or if a worker dies or gives nothing in time.
        """
        units = range(first_step * self.accumulate, last_step * self.accumulate)
        read = self._read_one_by_one if self.source.in_memory is None else self._from_memory
        with contextlib.closing(read(units)) as batches:
            while True:
                began = time.perf_counter()
                batch = next(batches, None)
                self.waited += time.perf_counter() - began
                if batch is None:
                    return
                yield batch

    def _slots(self, unit: int) -> tuple[Tensor, Tensor]:
        """Slots of a micro-batch, counted over the steps, and the images that they show."""
        parted = {"accumulate": self.accumulate, "rank": self.rank, "world": self.world}
        slots = sampler.slots(*divmod(unit, self.accumulate), batch_size=self.batch_size, **parted)
        return slots, sampler.indices(slots, size=len(self.source), seed=self.seed)

    def _from_memory(self, units: range) -> Iterator[Batch]:
        images, labels = _on(self.device, self.source.in_memory, self.source.labels)
        count = self.batch_size // (self.world * self.accumulate)
        # A small batch costs nearly as much as a large one, so several are made together. Which ones does not depend
        # on the first step, so that arithmetic that differs with the size of a batch differs alike after a restart.
        largest = max(images[0].numel(), getattr(self.transform, "bytes_per_image", 0))
        together = max(1, min(_MOST, _BLOCK // largest) // count)
        for start in range(units.start // together * together, units.stop, together):
            block = range(start, min(start + together, units.stop))
            drawn = [self._slots(unit) for unit in block]
            slots, indices = _on(self.device, *(torch.cat(parts) for parts in zip(*drawn, strict=True)))
            views = named(self.transform(images.index_select(0, indices), slots, self.seed))
            for unit in block[max(units.start - start, 0) :]:
                place = slice((unit - start) * count, (unit - start + 1) * count)
                own = None if labels is None else labels[indices[place]]
                yield Batch({name: view[place] for name, view in views.items()}, own, slots[place])

    def _read_one_by_one(self, units: range) -> Iterator[Batch]:
        work = (self._slots(unit) for unit in units)
        reader = _Reader(self.source, self.transform, self.seed)
        for read in _read(reader, work, self.workers, self.timeout, self.device, self._tally):
            yield read.batch.to(self.device)


def evaluation_batches(
    source: Source,
    transform: Any,
    *,
    batch_size: int,
    limit: int | None = None,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    timeout: float = TIMEOUT,
    device: torch.device | str = "cpu",
) -> Iterator[Batch]:
    """Each image exactly once, in order; `slots` tells which one it is in the source.

    limit: that many images, drawn from the whole source and always the same ones. Process `rank` of `world` takes its
    contiguous part. Unreadable files are left out; UserError if they are more than 1 %. workers, timeout: as a
    Loader's.
    """
    whole("batch_size", batch_size)
    count = len(source)
    indices = torch.arange(count)
    if limit is not None and limit < count:
        whole("limit", limit)
        indices = permutation(0, "evaluation subset", count)[:limit].sort().values
    # Whole batches, the same for any number of processes: the last bits of a product depend on what is beside an image.
    parts = indices.split(batch_size) if len(indices) else ()
    parts = parts[len(parts) * rank // world : len(parts) * (rank + 1) // world]
    if source.in_memory is not None:
        return _evaluation_from_memory(source, transform, parts, torch.device(device))
    number("timeout", timeout, 0)
    _check_room(transform, min(batch_size, len(indices)), workers)
    return _evaluation_one_by_one(source, transform, parts, workers, timeout, torch.device(device))


def _evaluation_from_memory(
    source: Source, transform: Any, parts: Iterable[Tensor], device: torch.device
) -> Iterator[Batch]:
    for indices in parts:
        images, labels = source.in_memory[indices], None if source.labels is None else source.labels[indices]
        images, labels, slots = _on(device, images, labels, indices)
        yield Batch.of(transform(images, slots, 0), labels, slots)


def _evaluation_one_by_one(
    source: Source, transform: Any, parts: Iterable[Tensor], workers: int, timeout: float, device: torch.device
) -> Iterator[Batch]:
    work = ((indices, indices) for indices in parts)
    reader = _Reader(source, transform, seed=None)
    for read in _read(reader, work, workers, timeout, device, _Tally(len(source))):
        if len(read.batch.slots):
            yield read.batch.to(device)


class _Read(NamedTuple):
    """What came of the images of a micro-batch."""

    batch: Batch  # without views where nothing could be read
    opened: int
    failures: list[Unreadable]


class _Reader(Dataset):
    """Reads and augments a micro-batch, in whatever process: (slots, indices) -> _Read or UserError.

    An error is handed over as a value, because a worker that raises it wraps it in its own traceback. Without a seed
    unreadable images are left out instead of replaced.
    """

    def __init__(self, source: Source, transform: Any, seed: int | None) -> None:
        self.source, self.transform, self.seed = source, transform, seed

    def __getitem__(self, work: tuple[list[int], list[int]]) -> _Read | UserError:
        try:
            return _shared(self._read(*work))
        except UserError as error:
            return error

    def _read(self, slots: list[int], indices: list[int]) -> _Read:
        failures: list[Unreadable] = []
        done, shown, opened, parts = [], [], 0, []
        for start in range(0, len(slots), _PART):
            images, part = [], []
            for slot, index in zip(slots[start : start + _PART], indices[start : start + _PART], strict=True):
                for candidate in self._candidates(slot, index):
                    opened += 1
                    try:
                        images.append(self.source.read(candidate))
                    except Unreadable as failure:
                        failures.append(failure)
                        continue
                    part.append(slot)
                    shown.append(candidate)
                    break
                else:
                    if self.seed is not None:
                        raise UserError(f"{opened} images were tried and too few can be read; the first: {failures[0]}")
            if images:
                parts.append(named(self.transform(images, torch.tensor(part), self.seed or 0)))
            done += part
        labels = None if self.source.labels is None else self.source.labels[torch.tensor(shown, dtype=torch.int64)]
        views = {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}
        return _Read(Batch(views, labels, torch.tensor(done)), opened, failures)

    def _candidates(self, slot: int, index: int) -> Iterator[int]:
        yield index
        if self.seed is not None:
            draws = uniform(self.seed, "replacement", torch.tensor([slot]), _REPLACEMENTS)[0]
            yield from (draws * len(self.source)).long().tolist()


class _Tally:
    """Counts the files opened and names those unreadable, and says when the latter are too many."""

    def __init__(self, size: int) -> None:
        self.size, self.seen = size, 0
        self.reasons: dict[str, str] = {}

    def add(self, opened: int, failures: list[Unreadable]) -> None:
        """UserError once the share of unreadable files is above the tolerated one.

        Until all files have been seen, three standard deviations more are allowed, so that a set just within the
        limit is not stopped by chance.
        """
        self.seen = min(self.seen + opened, self.size)
        self.reasons |= {failure.path: failure.reason for failure in failures}
        allowed = TOLERATED * self.seen
        if self.seen < self.size:
            allowed += 3 * math.sqrt(allowed)
        if self.seen >= min(_ENOUGH, self.size) and len(self.reasons) > allowed:
            path, reason = next(iter(self.reasons.items()))
            raise UserError(
                f"{len(self.reasons)} of {self.seen} image files cannot be read, more than {TOLERATED:.0%}; "
                f"the first: {printable(path)}: {reason}"
            )


def _check_room(transform: Any, images: int, workers: int) -> None:
    """OptionError if the micro-batches that workers read ahead, of so many images, do not fit into shared memory."""
    size = getattr(transform, "bytes_per_image", None)
    if not workers or size is None or not os.path.isdir(_SHARED_MEMORY):
        return
    # Besides those read ahead the main process has one in its hands.
    needed = (_AHEAD * workers + 1) * images * size
    status = os.statvfs(_SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        right = f"read {needed / 1e6:.0f} MB ahead, and {_SHARED_MEMORY} has {free / 1e6:.0f} MB free: {_MORE_ROOM}"
        raise OptionError("workers", workers, right)


def _shared(read: _Read) -> _Read:
    """In a worker, move tensors to shared memory where a failure can be told.

    The thread that sends them would move them too, but drop what it cannot, and the main process would wait for ever.
    """
    if get_worker_info() is not None:
        try:
            for tensor in (*read.batch.views.values(), read.batch.labels, read.batch.slots):
                if tensor is not None:
                    tensor.share_memory_()
        except RuntimeError as error:
            if _is_out_of_files(error):
                raise _out_of_files() from None
            reason = str(error).rpartition(": ")[2]
            raise UserError(f"a data worker cannot share its images ({reason}): {_MORE_ROOM}") from None
    return read


def _check_files(workers: int) -> None:
    """OSError if this process may not open the files that so many workers are bound to need."""
    with contextlib.ExitStack() as stack:
        for _ in range(_FILES * workers + _SPARE_FILES if workers else 0):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))


def _is_out_of_files(error: Exception) -> bool:
    # Where a descriptor could not be received, Python says "received 0 items of ancdata".
    return (
        getattr(error, "errno", None) == errno.EMFILE or "Too many open files" in str(error) or "ancdata" in str(error)
    )


def _out_of_files() -> UserError:
    return UserError("too many open files for so many data workers: take fewer, or a higher limit (ulimit -n)")


def _read(
    reader: _Reader,
    work: Iterable[tuple[Tensor, Tensor]],
    workers: int,
    timeout: float,
    device: torch.device,
    tally: _Tally,
) -> Iterator[_Read]:
    """Work done in order by `workers` processes, or by this one if there are none."""
    loader = DataLoader(
        reader,
        # Lists, since each tensor sent to a worker would cost a shared memory file.
        sampler=((slots.tolist(), indices.tolist()) for slots, indices in work),
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=workers,
        prefetch_factor=_AHEAD if workers else None,
        worker_init_fn=_bind,
        pin_memory=device.type == "cuda",
    )
    with _told_in_one_line(workers), _running(loader) as (results, processes):
        while True:
            with _in_time(processes, timeout):
                read = next(results, None)
            if read is None:
                return
            if isinstance(read, UserError):
                raise read
            tally.add(read.opened, read.failures)
            yield read


@contextlib.contextmanager
def _told_in_one_line(workers: int) -> Iterator[None]:
    """UserError for what ends the exchange with workers; an error of the program's own in one stays as it is."""
    try:
        yield
    except (OSError, EOFError, RuntimeError) as error:
        if not workers or str(error).startswith("Caught "):  # torch's words for what was raised in a worker
            raise
        if _is_out_of_files(error):
            raise _out_of_files() from None
        raise UserError("a data worker died, most often for want of memory: try fewer data workers") from None


@contextlib.contextmanager
def _in_time(workers: Collection[BaseProcess], seconds: float) -> Iterator[None]:
    """UserError if workers leave the block waiting for longer, 0 for ever.

    They are killed then, which ends the wait, be it for the queue or for a worker's socket: torch's own time-out
    knows the queue alone.
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
            f"no micro-batch came from the data workers for {seconds:g} seconds: they or their disk hang; "
            "a larger loader_timeout waits for longer, 0 for ever"
        ) from None
    finally:
        timer.cancel()


@contextlib.contextmanager
def _running(loader: DataLoader) -> Iterator[tuple[Iterator[Any], Collection[BaseProcess]]]:
    """A data loader's results and its workers, and the certainty that these end with the block."""
    handler, others = signal.getsignal(signal.SIGCHLD), set(multiprocessing.active_children())
    try:
        _check_files(loader.num_workers)
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
            results._shutdown_workers()
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
    """Let a worker end when the main process does, and not before.

    Ctrl-C and SIGTERM reach the whole process group: what they mean is for the main process to decide.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":
        # A worker that is stopped cannot see for itself that the main process was killed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _unchanged(item: Any) -> Any:
    return item


def _on(device: torch.device, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(tensor if tensor is None else tensor.to(device, non_blocking=True) for tensor in tensors)
