"""Rates that can be compared: every contender runs once a round, so a busy machine slows all of them alike.

Ratios are taken within a round and their median is what counts; rates differ from machine to machine.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Rate:
    """Items a second of one contender: by CPU time over all threads, by the clock, and beside the reference.

    spread: interquartile range of the rate by CPU time, as a share of its median; ratio: rate by CPU time over the
    reference's, median over rounds.
    """

    name: str
    per_cpu_second: float
    per_second: float
    spread: float
    ratio: float


def compare(contenders: Mapping[str, Callable[[], int]], *, reference: str, rounds: int = 7) -> list[Rate]:
    """Time contenders, each a function that works once and returns how many items it did.

    One untimed round comes first. The order turns by one place each round.
    """
    names = list(contenders)
    cpu: dict[str, list[float]] = {name: [] for name in names}
    wall: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        contenders[name]()
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            began_cpu, began = time.process_time(), time.perf_counter()
            count = contenders[name]()
            wall[name].append(count / (time.perf_counter() - began))
            cpu[name].append(count / (time.process_time() - began_cpu))
    return [
        Rate(
            name=name,
            per_cpu_second=statistics.median(cpu[name]),
            per_second=statistics.median(wall[name]),
            spread=_spread(cpu[name]),
            ratio=statistics.median(ours / theirs for ours, theirs in zip(cpu[name], cpu[reference], strict=True)),
        )
        for name in names
    ]


def _spread(rates: Sequence[float]) -> float:
    if len(rates) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(rates, n=4)
    return (high - low) / middle


def table(title: str, rates: Sequence[Rate]) -> str:
    """The rates as aligned text, the ratios last."""
    width = max(len(rate.name) for rate in rates)
    lines = [title, f"  {'':{width}}  items/CPU s   items/s   spread   ratio"]
    lines += [
        f"  {r.name:{width}}  {r.per_cpu_second:11,.0f} {r.per_second:9,.0f} {r.spread:8.0%} {r.ratio:6.2f}x"
        for r in rates
    ]
    return "\n".join(lines)


def as_json(results: Mapping[str, Sequence[Rate]]) -> dict[str, list[dict[str, Any]]]:
    """Results by title, as JSON can hold them."""
    return {title: [asdict(rate) for rate in rates] for title, rates in results.items()}
