"""Rates that can be compared: every contender runs once a round, so a busy machine slows all of them alike.

Ratios are taken within a round and their median is what counts; rates differ from machine to machine.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Rate:
    """Items a second of one contender: medians over rounds, per second of work and by the clock.

    A second of work is one of CPU time, over all threads, or one of a GPU's time by its own events. quartiles: of the
    rate per second of work; spread: their distance over its median; ratio: to the reference's rate in the same round,
    the median, and ratio_quartiles. Where measured, share: of the machine's peak, and memory: megabytes at the highest.
    """

    name: str
    per_work_second: float
    per_second: float
    quartiles: tuple[float, float]
    spread: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    share: float | None = None
    memory: float | None = None


@contextmanager
def threads(count: int) -> Iterator[None]:
    """A block, or a function that this decorates, on `count` threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare(
    contenders: Mapping[str, Callable[[], float]], *, reference: str, rounds: int = 7, device: str = "cpu"
) -> list[Rate]:
    """Time contenders, each a function that works once and returns how many items it did.

    One untimed round comes first. The order turns by one place each round.
    """
    names = list(contenders)
    work: dict[str, list[float]] = {name: [] for name in names}
    wall: dict[str, list[float]] = {name: [] for name in names}
    timed = gpu_seconds if device == "cuda" else cpu_seconds
    for name in names:
        contenders[name]()
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            began = time.perf_counter()
            count, seconds = timed(contenders[name])
            wall[name].append(count / (time.perf_counter() - began))
            work[name].append(count / seconds)
    ratios = {name: [own / theirs for own, theirs in zip(work[name], work[reference], strict=True)] for name in names}
    return [
        Rate(
            name=name,
            per_work_second=statistics.median(work[name]),
            per_second=statistics.median(wall[name]),
            quartiles=quartiles(work[name]),
            spread=(quartiles(work[name])[1] - quartiles(work[name])[0]) / statistics.median(work[name]),
            ratio=statistics.median(ratios[name]),
            ratio_quartiles=quartiles(ratios[name]),
        )
        for name in names
    ]


def cpu_seconds(work: Callable[[], float]) -> tuple[float, float]:
    """How many items a function did, and in how much CPU time over all threads."""
    began = time.process_time()
    count = work()
    return count, time.process_time() - began


def gpu_seconds(work: Callable[[], float]) -> tuple[float, float]:
    """By events on the stream, which the host waits for, so that no contender pays for the one before it."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    count = work()
    ended.record()
    ended.synchronize()
    return count, began.elapsed_time(ended) / 1000


def quartiles(rates: Sequence[float]) -> tuple[float, float]:
    """The first and the third; of one rate, that one."""
    if len(rates) < 2:
        return rates[0], rates[0]
    low, _, high = statistics.quantiles(rates, n=4)
    return low, high


def table(title: str, rates: Sequence[Rate]) -> str:
    """The rates as aligned text; share and memory stand in it if any contender has them."""
    width = max(len(rate.name) for rate in rates)
    shares, memories = (any(getattr(rate, name) is not None for rate in rates) for name in ("share", "memory"))
    head = f"  {'':{width}}  items/work s   items/s   spread   ratio   quartiles"
    lines = [title, head + "   share" * shares + "   memory" * memories]
    for r in rates:
        line = f"  {r.name:{width}}  {r.per_work_second:12,.1f} {r.per_second:9,.1f} {r.spread:8.0%} {r.ratio:6.2f}x"
        line += f"   {r.ratio_quartiles[0]:.2f}-{r.ratio_quartiles[1]:.2f}"
        line += ("" if r.share is None else f"{r.share:8.0%}").rjust(8) * shares
        lines.append(line + ("" if r.memory is None else f"{r.memory:6,.0f} MB").rjust(9) * memories)
    return "\n".join(line.rstrip() for line in lines)


def as_json(results: Mapping[str, Sequence[Rate]]) -> dict[str, list[dict[str, Any]]]:
    """Results by title, as JSON can hold them."""
    return {title: [asdict(rate) for rate in rates] for title, rates in results.items()}
