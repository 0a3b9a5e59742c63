"""Measure the throughput of training steps and of the data loader on this machine, and the cost of a step.

Contenders of `measure_rates` run alternately, so that other processes slow all of them equally. Ratios are computed
within a round and summarised by their median; absolute rates differ between machines.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from ssvit.checkpoints.checkpoint import PRETRAIN
from ssvit.data.batch import Batch
from ssvit.data.loader import Loader
from ssvit.engine.clock import cpu_time
from ssvit.errors import aligned
from ssvit.kernels.accelerate import accelerate
from ssvit.objectives.base import Objective
from ssvit.training import runtime
from ssvit.training.estimate import few, flops
from ssvit.training.loop import update
from ssvit.training.options import Training
from ssvit.training.recipe import Recipe
from ssvit.training.runtime import Processes
from ssvit.training.session import Session
from ssvit.training.state import State

_SIDE = {"cpu": 2048, "cuda": 8192}  # size of the square matrices whose product measures the machine's peak rate
_IN_MEMORY, _FILES = 4096, 512  # minimum images per round of the loader, which augments blocks of 4096
_ROUNDS, _STEPS = 5, 24  # of `measure`; single steps differ because several batches are read at a time


@dataclass(frozen=True)
class Rate:
    """Items per second, as medians over the rounds.

    Attributes:
        name: Name of the contender.
        per_work_second: Items per second of CPU time over all threads, or of a GPU's time.
        per_second: Items per second of wall-clock time.
        quartiles: First and third quartile of `per_work_second`.
        ratio: Median ratio to the rate of the reference in the same round; None without a reference.
        ratio_quartiles: First and third quartile of this ratio.
        share: Matrix products of the work relative to the machine's peak, in [0, 1]; None if not measured.
        memory: Peak memory in megabytes; None if not measured.
    """

    name: str
    per_work_second: float
    per_second: float
    quartiles: tuple[float, float]
    ratio: float | None = None
    ratio_quartiles: tuple[float, float] | None = None
    share: float | None = None
    memory: float | None = None


def gpu_clock() -> float:
    """Return the wall-clock time in seconds at which the GPU has finished all work."""
    torch.cuda.synchronize()
    return time.perf_counter()


def measure_rates(
    contenders: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    reference: str | None = None,
    clock: Callable[[], float] = time.process_time,
) -> list[Rate]:
    """Time contenders alternately: once in each round, after one untimed round.

    Args:
        contenders: Functions that do some work and return its number of items.
        rounds: Number of rounds; the order of the contenders rotates by one in each round.
        reference: Contender that ratios are relative to; None for no ratios.
        clock: Function that returns the time in seconds: CPU time over all threads by default.
    """
    names = list(contenders)
    work: dict[str, list[float]] = {name: [] for name in names}
    wall: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        contenders[name]()
    for turn in range(rounds):
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            wall_began, began = time.perf_counter(), clock()
            count = contenders[name]()
            work[name].append(count / (clock() - began))
            wall[name].append(count / (time.perf_counter() - wall_began))
    rates = []
    for name in names:
        rate = Rate(name, statistics.median(work[name]), statistics.median(wall[name]), _quartiles(work[name]))
        if reference is not None:
            ratios = [a / b for a, b in zip(work[name], work[reference], strict=True)]
            rate = replace(rate, ratio=statistics.median(ratios), ratio_quartiles=_quartiles(ratios))
        rates.append(rate)
    return rates


def _quartiles(rates: Sequence[float]) -> tuple[float, float]:
    if len(rates) < 2:
        return rates[0], rates[0]
    low, _, high = statistics.quantiles(rates, n=4)
    return low, high


class Steps:
    """Run training steps on the same images; each call is one update and returns its number of images.

    Args:
        processes: The processes.
        objective: The objective, which is trained.
        recipe: The hyperparameters.
        images: The batch of each step.
    """

    def __init__(self, processes: Processes, objective: Objective, recipe: Recipe, images: Batch) -> None:
        self.recipe = recipe.changed(steps=1_000_000, warmup=0, decay="constant")
        self.state = State(processes, objective, self.recipe)
        images = images.to(processes.device)
        slots = (torch.arange(first, first + len(images.slots)) for first in itertools.count(step=len(images.slots)))
        self.batches = (images._replace(slots=step_slots) for step_slots in slots)
        self.step = 0

    def __call__(self) -> int:
        """Run one update and return its number of images."""
        self.numbers = update(self.state, self.batches, self.step)
        self.step += 1
        return self.recipe.batch_size


def gflop_of_image(objective: Objective, loader: Loader) -> float:
    """Return the GFLOP of the matrix products in the step of an image."""
    return flops(objective.train(), [few(loader, 2)]) / 2 / 1e9


def measure_steps(steps: Mapping[str, Steps], *, gflop: float, rounds: int, reference: str | None = None) -> list[Rate]:
    """Measure training steps and, in the same rounds, a product of large matrices, whose rate is the machine's peak.

    Args:
        steps: The steps by name.
        gflop: GFLOP of the matrix products of an image's step.
        rounds: Number of rounds.
        reference: Step that ratios are relative to; None for no ratios.

    Returns:
        The rate of each step with its share of the peak, and the peak in GFLOP per second.
    """
    state = next(iter(steps.values())).state
    device = state.processes.device
    dtype = torch.bfloat16 if runtime.precision(state.recipe, device) == "bf16-mixed" else torch.float32
    side = _SIDE[device.type]
    matrix = torch.randn(side, side, generator=torch.Generator().manual_seed(0)).to(device, dtype)

    def product() -> float:
        torch.mm(matrix, matrix)
        return 2 * side**3 / 1e9

    name = f"torch product of {side}, {str(dtype).removeprefix('torch.')} (GFLOP)"
    clock = gpu_clock if device.type == "cuda" else time.process_time
    *rates, peak = measure_rates({**steps, name: product}, rounds=rounds, reference=reference, clock=clock)
    return [*(replace(rate, share=rate.per_work_second * gflop / peak.per_work_second) for rate in rates), peak]


def step_and_loader(options: Training, *, rounds: int) -> list[Rate]:
    """Measure a training step, matrix products and the loader in one process.

    Args:
        options: Options of a run, which is not trained.
        rounds: Number of rounds.
    """
    torch.compiler.reset()  # a new batch size would otherwise compile a dynamic shape
    session = Session(options, Path(options.outputs), stage=PRETRAIN)
    recipe, _, objective, loader = session.build(options)
    device = session.processes.device
    case = f"step, {recipe.batch_size} images, {runtime.precision(recipe, device)}"
    gflop = recipe.passes * gflop_of_image(objective, loader)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        steps = Steps(session.processes, objective, recipe, next(loader.batches(0, 1)))
        steps.state.prepare(loader)
        step, peak = measure_steps({case: steps}, gflop=gflop, rounds=rounds)
    except torch.OutOfMemoryError:
        return [Rate(f"{case}: out of memory", 0.0, 0.0, (0.0, 0.0))]
    if device.type == "cuda":
        step = replace(step, memory=torch.cuda.max_memory_allocated() / 1e6)
    count = -(-(_FILES if loader.source.in_memory is None else _IN_MEMORY) // recipe.batch_size)
    batches = loader.batches(0, (rounds + 1) * count)
    images = recipe.batch_size // loader.accumulate
    reading = f"loader, {recipe.batch_size} images, {loader.workers} workers"
    read = {reading: lambda: sum(images for _ in itertools.islice(batches, count * loader.accumulate))}
    return [step, *measure_rates(read, rounds=rounds, clock=time.perf_counter), peak]


def rate_table(title: str, rates: Sequence[Rate]) -> str:
    """Return the rates as an aligned table, with ratios, shares and memory where they exist."""
    columns: dict[str, list[str]] = {
        "": [rate.name for rate in rates],
        "items/work s": [f"{rate.per_work_second:,.1f}" for rate in rates],
        "items/s": [f"{rate.per_second:,.1f}" for rate in rates],
        "spread": [f"{(rate.quartiles[1] - rate.quartiles[0]) / (rate.per_work_second or 1):.0%}" for rate in rates],
        "ratio": ["" if rate.ratio is None else f"{rate.ratio:.2f} x" for rate in rates],
        "quartiles": ["{:.2f}-{:.2f}".format(*rate.ratio_quartiles) if rate.ratio_quartiles else "" for rate in rates],
        "share": ["" if rate.share is None else f"{rate.share:.0%}" for rate in rates],
        "memory": ["" if rate.memory is None else f"{rate.memory:,.0f} MB" for rate in rates],
    }
    shown = [[name, *cells] for name, cells in columns.items() if any(cells)]
    return "\n".join([title, *(f"  {line}".rstrip() for line in aligned(list(zip(*shown, strict=True))))])


def measure(processes: Processes, objective: Objective, loader: Loader, recipe: Recipe) -> dict[str, float | str]:
    """Measure the cost of an update in several rounds of steps. Nothing is saved.

    Args:
        processes: A single process.
        objective: The objective, which is trained.
        loader: The training batches.
        recipe: The hyperparameters.

    Returns:
        images: Images of the update, each counted once however many views it has.
        cpu_seconds: CPU seconds of all threads and data workers, in the fastest round, which other processes disturbed
            least.
        seconds: Wall-clock seconds in the same round.
        preparation: CPU seconds before the first update.
        flops: Floating-point operations of the forward and backward passes and of Muon's matrix products.
        backend: The implementation of the layers, as in `recipe.backend`.
    """
    state = State(processes, objective, recipe)
    began = cpu_time()
    state.prepare(loader)
    preparation = cpu_time() - began
    batches = loader.batches(0, 2 + _ROUNDS * _STEPS)

    first, rounds = 0, []
    for count in (2, *[_STEPS] * _ROUNDS):
        cpu, clock = cpu_time(), time.perf_counter()
        for step in range(first, first + count):
            update(state, batches, step)
        first += count
        rounds.append(((cpu_time() - cpu) / count, (time.perf_counter() - clock) / count))
    cpu_seconds, seconds = min(rounds[1:])
    for module in (objective, *objective.references()):
        accelerate(module, False)  # the counter supports only the operators of torch
    of_passes = flops(objective, list(loader.batches(0, 1)), steps=recipe.steps, seed=recipe.seed)
    return {
        "images": recipe.batch_size,
        "cpu_seconds": cpu_seconds,
        "seconds": seconds,
        "preparation": preparation,
        "flops": recipe.passes * of_passes + _flops_of_update(state),
        "backend": recipe.backend,
    }


def _flops_of_update(state: State) -> int:
    """Return the floating-point operations of the matrix products in an update of all trained weights."""
    for weight in state.objective.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    with FlopCounterMode(display=False) as counter:
        state.optimize(torch.zeros((), dtype=torch.bool, device=state.processes.device))
    return counter.get_total_flops()
