"""Batches from any step on, the same for any number of workers and processes.

A set in memory is gathered and augmented on the device. Other images are read and augmented by worker processes, in
parts of a micro-batch, which the main process puts together; an unreadable one is counted and replaced by another,
chosen by hash of the slot.

Letters: b images, c channels, h, w pixels.
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
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from typing import TypedDict

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ssvit.data import sampler
from ssvit.data.batch import Batch, Transform, named
from ssvit.data.sources.base import Source, Unreadable
from ssvit.data.sources.base_options import DECODINGS, FULL, PERMUTATION, SCALED
from ssvit.data.stream import streamed
from ssvit.options import OptionError, UserError, number, one_of, printable, whole
from ssvit.private import end_workers
from ssvit.randomness import permutation, uniform

TOLERATED = 0.01  # share of unreadable files above which a run stops
_ENOUGH = 300  # files seen before that share is judged, or all of them if there are fewer
_REPLACEMENTS = 64  # other images tried in the place of an unreadable one
_BLOCK, _MOST = 1 << 24, 4096  # bytes and number of images in memory that are augmented together
_PART = 32  # images decoded before they are augmented together
TIMEOUT = 300.0  # seconds; less than the 600 that process groups wait for each other, so that the cause is told first
_SENT = 64  # images that a worker hands over together, a multiple of _PART
_AHEAD = 2  # such parts that each worker reads ahead, and micro-batches that all of them do, at least
_SHARED_MEMORY = "/dev/shm"  # through which workers hand over their tensors
_FEWER = "take fewer data workers"
_MORE_ROOM = f"{_FEWER}, or a larger /dev/shm (docker run --shm-size=…)"
Read = tuple[Batch, list[Unreadable]] | UserError  # a part of a micro-batch and the files that it lacks
_FILES, _SPARE_FILES = 4, 16  # open for each worker, two pipes of two ends; open at times, to receive tensors


class Loading(TypedDict, total=False):
    """How files are read for an evaluation; see `Loader`."""

    workers: int
    timeout: float
    device: torch.device | str


@dataclass(kw_only=True, eq=False)
class Loader:
    """Training batches of a source. OptionError for a batch size that cannot be split, or too little shared memory."""

    source: Source
    transform: Transform
    seed: int
    batch_size: int  # of a step, over all `world` processes and `accumulate` micro-batches
    accumulate: int = 1
    rank: int = 0
    world: int = 1
    order: str = PERMUTATION  # of an epoch, see `sampler.indices`
    decoding: str = FULL  # scaled: JPEGs smaller, as far as their crops stay as large as they are shown
    workers: int = 0  # processes that read files; none are used for a set in memory
    timeout: float = TIMEOUT  # seconds to wait for images of theirs, 0 for ever
    device: torch.device | str = "cpu"
    waited: float = field(default=0.0, init=False)  # seconds spent waiting for data so far
    unreadable: dict[str, str] = field(init=False)  # reason by path of the files that could not be read so far

    def __post_init__(self) -> None:
        size = len(self.source)
        parted = {"batch_size": self.batch_size, "accumulate": self.accumulate, "world": self.world}
        sampler.check(**parted, size=size, order=self.order)
        one_of("decoding", self.decoding, DECODINGS)
        if self.decoding == SCALED and not hasattr(self.transform, "reduction"):
            right = "needs an augmentation with one random crop, as augment@data.augment=inception_crop"
            raise OptionError("decoding", self.decoding, right)
        whole("workers", self.workers, 0)
        number("timeout", self.timeout, 0)
        self._micro_batch = self.batch_size // (self.accumulate * self.world)
        if self.source.in_memory is None:
            _check_room(self.transform, self._micro_batch, self.workers, self.source.bytes_per_pixel)
        self._tally = _Tally(size)
        self.unreadable = self._tally.reasons

    def batches(self, first_step: int, last_step: int) -> Generator[Batch]:
        """The micro-batches of steps first_step ... last_step - 1, in order.

        UserError if more than 1 % of the files cannot be read, or if a worker dies or gives nothing in time.
        """
        units = range(first_step * self.accumulate, last_step * self.accumulate)
        read = self._from_files if self.source.in_memory is None else self._from_memory
        with contextlib.closing(read(units)) as batches:
            device = torch.device(self.device)
            if device.type == "cuda":
                yield from streamed(batches, device, self._wait)
                return
            began = time.perf_counter()
            for batch in batches:
                self._wait(time.perf_counter() - began)
                yield batch
                began = time.perf_counter()

    def _wait(self, seconds: float) -> None:
        self.waited += seconds

    def _slots(self, *units: int) -> tuple[Tensor, Tensor]:
        """Slots of micro-batches, counted over the steps, and the images that they show."""
        parted = {"accumulate": self.accumulate, "rank": self.rank, "world": self.world, "batch_size": self.batch_size}
        slots = torch.cat([sampler.slots(*divmod(unit, self.accumulate), **parted) for unit in units])
        return slots, sampler.indices(slots, size=len(self.source), seed=self.seed, order=self.order)

    def _from_memory(self, units: range) -> Generator[Batch]:
        assert self.source.in_memory is not None
        images, labels = self.source.in_memory.to(self.device, non_blocking=True), self.source.labels
        # A small batch costs nearly as much as a large one, so several are made together. Which ones does not depend
        # on the first step, so that arithmetic that differs with the size of a batch differs alike after a restart.
        largest = max(images[0].numel(), getattr(self.transform, "bytes_per_image", 0))
        count = max(1, min(_MOST, _BLOCK // largest) // self._micro_batch)
        for start in range(units.start // count * count, units.stop, count):
            block = range(start, min(start + count, units.stop))
            slots, indices = self._slots(*block)
            shown = images.index_select(0, indices.to(self.device))
            together = Batch.of(shown, None if labels is None else labels[indices], slots).to(self.device)
            together = together.augmented(self.transform, self.seed)
            for unit in block[max(units.start - start, 0) :]:
                rows = slice((unit - start) * self._micro_batch, (unit - start + 1) * self._micro_batch)
                views = {name: view[rows] for name, view in together.views.items()}
                yield Batch(views, None if together.labels is None else together.labels[rows], together.slots[rows])

    def _from_files(self, units: range) -> Generator[Batch]:
        reduction = getattr(self.transform, "reduction", None) if self.decoding == SCALED else None
        reader = _Reader(self.source, self.transform, self.seed, reduction)
        images = self._micro_batch
        read = _read(reader, map(self._slots, units), images, self.workers, self.timeout, self.device, self._tally)
        return (batch.to(self.device) for batch in read)


def evaluation_batches(
    source: Source,
    transform: Transform,
    *,
    batch_size: int,
    limit: int | None = None,
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    timeout: float = TIMEOUT,
    device: torch.device | str = "cpu",
) -> Iterator[Batch]:
    """Each image exactly once, in order; `slots` are their places in the source.

    limit: that many images of the whole source, always the same. Process `rank` of `world` takes its contiguous part.
    Unreadable files are left out; UserError if they are more than 1 %. workers, timeout: as of a Loader.
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
        images, labels = source.in_memory, source.labels
        batches = (Batch.of(images[part], None if labels is None else labels[part], part) for part in parts)
        return (batch.to(device).augmented(transform, 0) for batch in batches)
    number("timeout", timeout, 0)
    largest = min(batch_size, len(indices))
    _check_room(transform, largest, workers, source.bytes_per_pixel)
    work = ((part, part) for part in parts)
    read = _read(_Reader(source, transform, None), work, largest, workers, timeout, device, _Tally(count))
    return (batch.to(device) for batch in read)


class _Reader(Dataset[Read]):
    """Reads and augments images, in whatever process: (slots, indices) -> a batch of them and what was unreadable.

    A UserError is returned, because a worker that raises it wraps it in its own traceback. Without a seed unreadable
    images are left out instead of replaced; where none is left, the batch has no views.
    """

    def __init__(
        self, source: Source, transform: Transform, seed: int | None, reduction: Callable[..., int] | None = None
    ) -> None:
        self.source, self.transform, self.seed, self.reduction = source, transform, seed, reduction

    def __getitem__(self, work: tuple[list[int], list[int]]) -> Read:
        failures: list[Unreadable] = []
        try:
            batch = self._read(*work, failures)
            _share(batch)
        except UserError as error:
            return error
        return batch, failures

    def _read(self, slots: list[int], indices: list[int], failures: list[Unreadable]) -> Batch:
        done, shown, views = [], [], []
        self.source.prefetch(indices)
        for start in range(0, len(slots), _PART):
            images, part = [], slice(start, start + _PART)
            for slot, index in zip(slots[part], indices[part], strict=True):
                for candidate in self._candidates(slot, index):
                    try:
                        images.append(self._image(candidate, slot))
                    except Unreadable as failure:
                        failures.append(failure)
                        continue
                    done.append(slot)
                    shown.append(candidate)
                    break
                else:
                    if self.seed is not None:
                        tried = len(done) + len(failures)
                        raise UserError(f"{tried} images were tried and too few can be read; the first: {failures[0]}")
            if images:
                slots_of_images = torch.tensor(done[-len(images) :])
                views.append(named(self.transform(images, slots_of_images, self.seed or 0)))
        labels = None if self.source.labels is None else self.source.labels[torch.tensor(shown, dtype=torch.int64)]
        joined = {name: torch.cat([part[name] for part in views]) for name in (views[0] if views else ())}
        return Batch(joined, labels, torch.tensor(done))

    def _image(self, index: int, slot: int) -> Tensor:
        if self.reduction is None:
            return self.source.read(index)
        return self.source.read_smaller(index, partial(self.reduction, slot=slot, seed=self.seed))

    def _candidates(self, slot: int, index: int) -> Iterator[int]:
        yield index
        if self.seed is not None:
            numbers = uniform(self.seed, "replacement", torch.tensor([slot]), _REPLACEMENTS)[0]
            yield from (numbers * len(self.source)).long().tolist()


class _Tally:
    """Counts the files opened and names those unreadable, and says when the latter are too many."""

    def __init__(self, size: int) -> None:
        self.size, self.seen = size, 0
        self.reasons: dict[str, str] = {}

    def add(self, opened: int, failures: list[Unreadable]) -> None:
        """UserError once the share of unreadable files is above the tolerated one."""
        self.seen = min(self.seen + opened, self.size)
        self.reasons |= {failure.path: failure.reason for failure in failures}
        allowed = TOLERATED * self.seen
        if self.seen < self.size:  # three standard deviations more, not to stop by chance a set within the limit
            allowed += 3 * math.sqrt(allowed)
        if self.seen >= min(_ENOUGH, self.size) and len(self.reasons) > allowed:
            path, reason = next(iter(self.reasons.items()))
            raise UserError(
                f"{len(self.reasons)} of {self.seen} image files cannot be read, more than {TOLERATED:.0%}; "
                f"the first: {printable(path)}: {reason}"
            )


def _check_room(transform: Transform, images: int, workers: int, bytes_per_pixel: int) -> None:
    """OptionError if what workers read ahead, of micro-batches of so many images, does not fit into shared memory."""
    size = getattr(transform, "bytes_per_image", None)  # of three channels of bytes
    if not workers or size is None or not os.path.isdir(_SHARED_MEMORY):
        return
    size = size * bytes_per_pixel // 3
    # Besides those read ahead the main process has one in its hands.
    needed = (_ahead(images, workers) * workers + 1) * min(images, _SENT) * size
    status = os.statvfs(_SHARED_MEMORY)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        right = f"read {needed / 1e6:.0f} MB ahead, and {_SHARED_MEMORY} has {free / 1e6:.0f} MB free: {_MORE_ROOM}"
        raise OptionError("workers", workers, right)


def _ahead(images: int, workers: int) -> int:
    """Parts that each worker reads ahead of micro-batches of so many images."""
    return max(_AHEAD, math.ceil(_AHEAD * images / (_SENT * workers))) if images > _SENT else _AHEAD


class _Joining:
    """A micro-batch that is put together of its parts. missing: its images that were not tried yet."""

    def __init__(self, images: int, pinned: bool) -> None:
        self.images = self.missing = images
        self.pinned, self.filled = pinned, 0
        self.whole: tuple[Tensor, ...] = ()

    def add(self, part: Batch) -> None:
        """Copy the next part, whose own memory is free then; one that is the whole batch stays as it is."""
        tried = min(self.missing, _SENT)
        self.missing -= tried
        if not len(part.slots):
            return
        if tried == self.images and not self.pinned:
            self.whole, self.filled, self.of = part.tensors, len(part.slots), part
            return
        if not self.whole:
            self.of = part
            self.whole = tuple(
                torch.empty((self.images, *one.shape[1:]), dtype=one.dtype, pin_memory=self.pinned)
                for one in part.tensors
            )
        after = self.filled + len(part.slots)
        for joined, one in zip(self.whole, part.tensors, strict=True):
            joined[self.filled : after] = one
        self.filled = after

    @property
    def batch(self) -> Batch | None:
        """All of them; None if none could be read."""
        if not self.whole:
            return None
        *views, slots = (joined[: self.filled] for joined in self.whole)
        labels = None if self.of.labels is None else views.pop()
        return Batch(dict(zip(self.of.views, views, strict=True)), labels, slots)


def _share(batch: Batch) -> None:
    """In a worker, move tensors to shared memory: the thread that sends them would drop those that it cannot move."""
    if get_worker_info() is None:
        return
    try:
        for tensor in (*batch.views.values(), batch.labels, batch.slots):
            if tensor is not None:
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


def _read(
    reader: _Reader,
    work: Iterable[tuple[Tensor, Tensor]],
    images: int,
    workers: int,
    timeout: float,
    device: torch.device | str,
    tally: _Tally,
) -> Iterator[Batch]:
    """Slots and indices, read in order by `workers` processes, or by this one if there are none.

    images: of a micro-batch, at most. Its parts are copied into one batch, in pinned memory for a GPU; torch keeps the
    pinned memory of batches that are gone for those that follow. UserError for what ends the exchange with workers; an
    error of the program's own in one stays as it is.
    """
    under_way: deque[int] = deque()  # images of each micro-batch whose parts are being read

    def parts() -> Iterator[tuple[list[int], list[int]]]:
        for slots, indices in work:
            under_way.append(len(slots))
            for part in zip(slots.split(_SENT), indices.split(_SENT), strict=True):
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
                    read = next(results, None)
                if read is None:
                    return
                if isinstance(read, UserError):
                    raise read
                part, failures = read
                tally.add(len(part.slots) + len(failures), failures)
                joining = joining or _Joining(under_way.popleft(), pinned)
                joining.add(part)
                if joining.missing == 0:
                    batch, joining = joining.batch, None
                    if batch is not None:
                        yield batch
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
