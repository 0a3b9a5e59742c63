"""Training and evaluation batches from any step on, independent of the number of workers and processes.

Data sets in memory are gathered and augmented on the device. Other images are read and augmented by worker processes.
In training, an unreadable image is counted and replaced by another one, chosen by a hash of the slot.

Letters: b images, c channels, h, w pixels.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypedDict

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from ssvit.data import sampler
from ssvit.data.batch import Batch, Transform, masks_of_views, named
from ssvit.data.fingerprints import indexed
from ssvit.data.sources.base import Source, Unreadable, masks
from ssvit.data.sources.base_options import PERMUTATION, check_shares
from ssvit.data.workers import PART, TIMEOUT, Read, Result, read_batches, share
from ssvit.engine.randomness import permutation, uniform
from ssvit.errors import OptionError, UserError, printable

TOLERATED = 0.01  # fraction of unreadable files above which a run stops
_ENOUGH = 300  # files opened before that fraction is checked, or all if there are fewer
_REPLACEMENTS = 64  # replacement images tried for an unreadable one
_BLOCK, _MOST = 1 << 24, 4096  # bytes and images of a set in memory that are augmented in one call


class Loading(TypedDict, total=False):
    """Options of reading files in an evaluation, as for `Loader`."""

    workers: int
    timeout: float
    device: torch.device | str


@dataclass(kw_only=True, eq=False)
class Loader:
    """Training batches of a source, a function of seed, step and options.

    Raises:
        OptionError: The batch cannot be split evenly, or exceeds the source.
    """

    source: Source
    transform: Transform
    seed: int
    batch_size: int  # global: of a step, over all `world` processes and `accumulate` micro-batches
    accumulate: int = 1
    repeats: int = 1  # copies of each image in a batch, see `sampler.positions`
    rank: int = 0
    world: int = 1
    order: str = PERMUTATION  # algorithm of an epoch's order, see `sampler.indices`
    workers: int = 0  # processes that read files; unused for a set in memory
    timeout: float = TIMEOUT  # seconds to wait for a batch, 0 for no limit
    device: torch.device | str = "cpu"
    masks: bool = False  # whether batches have the masks of the images as targets
    records: bool = False  # whether fingerprints of the images of the first epoch are collected
    waited: float = field(default=0.0, init=False)  # total seconds spent waiting for data
    unreadable: dict[str, str] = field(init=False)  # reason for each unreadable file, by path
    _fingerprints: list[bytes] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        size = len(self.source)
        check_shares(batch_size=self.batch_size, accumulate=self.accumulate, processes=self.world)
        if self.batch_size > size:
            reason = f"must be no more than the {size} images to train on"
            raise OptionError("batch_size", self.batch_size, reason)
        self._micro_batch = self.batch_size // (self.accumulate * self.world)
        self._recorded = size * self.repeats if self.records else 0  # the slots of the first epoch
        self._tally = Tally(size)
        self.unreadable = self._tally.reasons

    def batches(self, first_step: int, last_step: int) -> Generator[Batch]:
        """Yield the micro-batches of steps first_step to last_step - 1 in order.

        Raises:
            UserError: More than 1 % of the files are unreadable, or a worker died or exceeded `timeout`.
        """
        units = range(first_step * self.accumulate, last_step * self.accumulate)
        read = self._from_files if self.source.in_memory is None else self._from_memory
        with contextlib.closing(read(units)) as batches:
            if torch.device(self.device).type == "cuda":
                yield from self._streamed(batches)
                return
            began = time.perf_counter()
            for batch in batches:
                self.waited += time.perf_counter() - began
                yield batch
                began = time.perf_counter()

    def take_fingerprints(self) -> bytes:
        """Return the fingerprints of the images that were shown since the last call, for `fingerprints.record`."""
        shown = b"".join(self._fingerprints)
        self._fingerprints.clear()
        return shown

    def _streamed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Prepare and copy batches on a separate CUDA stream while the GPU computes the previous steps.

        In training the host does not synchronise with the GPU, so it requests a batch while earlier steps are still
        being computed. The work for the batch (copies, crops of images in memory) overlaps with them on the second
        stream. The time waited is that for which the GPU idled; the host's clock would give more, since the host may
        wait for data while the GPU still has queued steps.
        """
        main, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(main)
        waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        while True:
            requested, ready = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            main.record_event(requested)
            with torch.cuda.stream(side):
                batch = next(batches, None)
            if batch is None:
                return
            main.wait_stream(side)
            main.record_event(ready)
            for tensor in batch.tensors:
                tensor.record_stream(main)  # otherwise the allocator could reuse its memory during the step
            waits.append((requested, ready))
            while waits and waits[0][1].query():
                first, last = waits.popleft()
                self.waited += first.elapsed_time(last) / 1000
            yield batch

    def _slots(self, *units: int) -> tuple[Tensor, Tensor]:
        """Return the slots of micro-batches, numbered across steps, and the indices of their images."""
        shares = {"accumulate": self.accumulate, "rank": self.rank, "world": self.world, "batch_size": self.batch_size}
        slots = torch.cat([sampler.slots(*divmod(unit, self.accumulate), **shares) for unit in units])
        shown = slots
        if self.repeats > 1:
            shown = sampler.positions(slots, batch_size=self.batch_size, repeats=self.repeats)
        return slots, sampler.indices(shown, size=len(self.source), seed=self.seed, order=self.order)

    def _from_memory(self, units: range) -> Generator[Batch]:
        assert self.source.in_memory is not None
        images, labels = self.source.in_memory.to(self.device, non_blocking=True), self.source.labels
        # A small batch costs nearly as much as a large one, so several are augmented in one call. Their grouping does
        # not depend on the first step: rounding that varies with the batch size is then the same after a restart.
        largest = max(images[0].numel(), getattr(self.transform, "bytes_per_image", 0))
        count = max(1, min(_MOST, _BLOCK // largest) // self._micro_batch)
        for start in range(units.start // count * count, units.stop, count):
            block = range(start, min(start + count, units.stop))
            slots, indices = self._slots(*block)
            shown = images.index_select(0, indices.to(self.device))
            of_labels = None if labels is None else labels[indices]
            targets = {"masks": masks(self.source, Tensor.clone, indices)} if self.masks else None
            together = Batch({"image": shown}, of_labels, slots, targets, indices=indices).to(self.device)
            together = together.augmented(self.transform, self.seed)
            for unit in block[max(units.start - start, 0) :]:
                rows = slice((unit - start) * self._micro_batch, (unit - start + 1) * self._micro_batch)
                if self._recorded and (first := indices[rows][slots[rows] < self._recorded]).numel():
                    self._fingerprints.append(indexed(first, self.source.in_memory[first]))
                yield together.map(itemgetter(rows))

    def _from_files(self, units: range) -> Generator[Batch]:
        def add(result: Read) -> None:
            self._tally.add(result.opened, result.failures)
            if result.fingerprints:
                self._fingerprints.append(result.fingerprints)

        reader = _Reader(self.source, self.transform, self.seed, self._recorded, self.masks)
        work = map(self._slots, units)
        return read_batches(reader, work, add, workers=self.workers, timeout=self.timeout, device=self.device)


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
    report: Callable[[int, list[Unreadable]], None] | None = None,
) -> Iterator[Batch]:
    """Yield each image exactly once, in order; `slots` are indices into the source.

    Unreadable files are skipped.

    Args:
        source: Images to evaluate.
        transform: Transform of the images.
        batch_size: Images per batch.
        limit: Evaluate a fixed random subset of this many images; None for all.
        rank: Rank of this process, which takes a contiguous part of the batches.
        world: Number of processes.
        workers: Number of processes that read files; 0 reads in this process.
        timeout: Seconds to wait for a batch, 0 for no limit.
        device: Device of the batches.
        report: Called with the number of opened and the list of unreadable files of each batch; None to raise
            an error if there are many unreadable files.

    Raises:
        UserError: More than 1 % of the files are unreadable, and `report` is None.
    """
    count = len(source)
    indices = torch.arange(count)
    if limit is not None and limit < count:
        indices = permutation(0, "evaluation subset", count)[:limit].sort().values
    # Processes share complete batches, since the last bits of a matrix product depend on the composition of the batch.
    parts = indices.split(batch_size) if len(indices) else ()
    parts = parts[len(parts) * rank // world : len(parts) * (rank + 1) // world]
    if source.in_memory is not None:
        images, labels = source.in_memory, source.labels
        batches = (Batch.of_view(images[part], None if labels is None else labels[part], part) for part in parts)
        return (batch._replace(indices=batch.slots).to(device).augmented(transform, 0) for batch in batches)
    work = ((part, part) for part in parts)
    add = report or Tally(count).add
    reader = _Reader(source, transform, None)

    def tally(result: Read) -> None:
        add(result.opened, result.failures)

    return read_batches(reader, work, tally, workers=workers, timeout=timeout, device=device)


class _Reader(Dataset[Result]):
    """Read and augment images in a worker or in the main process, from lists of slots and of indices.

    A UserError is returned instead of raised, because DataLoader would wrap it in a worker traceback. Without a seed,
    unreadable images are skipped instead of replaced; a batch without any readable image has no views.

    Args:
        source: The images.
        transform: Augmentation or transform.
        seed: Seed of the run; None for an evaluation.
        recorded: Number of slots from the first one whose images' fingerprints are computed.
        masks: Whether batches have the masks of the images. An image without a usable mask counts as unreadable.
    """

    def __init__(
        self, source: Source, transform: Transform, seed: int | None, recorded: int = 0, masks: bool = False
    ) -> None:
        self.source, self.transform, self.seed, self.recorded, self.masks = source, transform, seed, recorded, masks

    def __getitem__(self, work: tuple[list[int], list[int]]) -> Result:
        began = time.process_time()
        try:
            result = self._read(*work)
            share(result.batch)
        except UserError as error:
            return error
        if get_worker_info() is None:
            return result
        return result._replace(cpu_time=time.process_time() - began)

    def _read(self, slots: list[int], indices: list[int]) -> Read:
        failures: list[Unreadable] = []
        labels, recorded = self.source.labels, b""
        none = torch.empty(0, dtype=torch.int64)
        parts = [Batch({}, None if labels is None else labels[:0], none, indices=none)]
        for start in range(0, len(slots), PART):
            part = slice(start, start + PART)
            readable = [
                (slot, *image)
                for slot, index in zip(slots[part], indices[part], strict=True)
                if (image := self._readable(slot, index, failures)) is not None
            ]
            if readable:
                done, shown, images, of_masks = zip(*readable, strict=True)
                of_part, of_images = torch.tensor(done), torch.tensor(shown)
                if first := [row for row, slot in enumerate(done) if slot < self.recorded]:
                    recorded += indexed(of_images[first], [images[row] for row in first])
                views = named(self.transform(list(images), of_part, self.seed or 0))
                of_labels = None if labels is None else labels[of_images]
                targets = None
                if self.masks:
                    targets = {"masks": masks_of_views(of_masks, self.transform, of_part, self.seed or 0)}
                parts.append(Batch(views, of_labels, of_part, targets, indices=of_images))
        return Read(Batch.joined(parts[1:] or parts), failures, recorded)

    def _readable(self, slot: int, index: int, failures: list[Unreadable]) -> tuple[int, Tensor, Tensor | None] | None:
        """Return index, pixels and mask of a slot's image; replace an unreadable one in training, else return None."""
        before = len(failures)
        for candidate in self._candidates(slot, index):
            try:
                return candidate, self.source.read(candidate), self.source.mask(candidate) if self.masks else None
            except Unreadable as failure:
                failures.append(failure)
        if self.seed is not None:
            tried = len(failures) - before
            raise UserError(f"{tried} attempts to read an image failed; the first: {failures[before]}")
        return None

    def _candidates(self, slot: int, index: int) -> Iterator[int]:
        yield index
        if self.seed is not None:
            numbers = uniform(self.seed, "replacement", torch.tensor([slot]), _REPLACEMENTS)[0]
            yield from (numbers * len(self.source)).long().tolist()


def check_readable(readable: int, total: int, files: str = "image files") -> None:
    """Raise UserError if more than the share `TOLERATED` of the images of all processes could not be read."""
    if (unreadable := total - readable) > TOLERATED * total:
        raise UserError(f"{unreadable} of {total} {files} cannot be read, more than {TOLERATED:.0%}")


class Tally:
    """Count opened and unreadable files, and stop the run once too many are unreadable."""

    def __init__(self, size: int) -> None:
        self.size, self.opened = size, 0
        self.reasons: dict[str, str] = {}

    def add(self, opened: int, failures: list[Unreadable]) -> None:
        """Count opened and unreadable files.

        Args:
            opened: Number of files that were opened.
            failures: The unreadable ones among them.

        Raises:
            UserError: The fraction of unreadable files exceeds `TOLERATED`.
        """
        self.opened = min(self.opened + opened, self.size)
        self.reasons |= {failure.path: failure.reason for failure in failures}
        allowed = TOLERATED * self.opened
        if self.opened < self.size:  # plus three standard deviations, so that chance does not stop a run
            allowed += 3 * math.sqrt(allowed)
        if self.opened >= min(_ENOUGH, self.size) and len(self.reasons) > allowed:
            path, reason = next(iter(self.reasons.items()))
            raise UserError(
                f"{len(self.reasons)} of {self.opened} image files cannot be read, more than {TOLERATED:.0%}; "
                f"the first: {printable(path)}: {reason}"
            )
