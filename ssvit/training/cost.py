"""Measure the cost of a training step on this machine: CPU time, wall-clock time and floating-point operations."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lightning_fabric import Fabric
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ssvit.data.batch import Batch
from ssvit.data.loader import Loader
from ssvit.objectives.base import Objective
from ssvit.schedule import Progress
from ssvit.training.loop import update
from ssvit.training.recipe import Recipe
from ssvit.training.state import State

_ROUNDS = 5
_STEPS = 24  # steps of a round; single steps differ because several batches are read at a time


@dataclass(frozen=True)
class Cost:
    """The cost of one update.

    Attributes:
        images: Images of the update, each counted once however many views it has.
        cpu_seconds: CPU seconds over all threads, in the fastest round, which other processes disturbed least.
        seconds: Wall-clock seconds in the same round.
        preparation: CPU seconds before the first update.
        flops: Floating-point operations of the forward and backward passes and of Muon's matrix products.
        backend: eager or compile.
    """

    images: int
    cpu_seconds: float
    seconds: float
    preparation: float
    flops: int
    backend: str


def measure(fabric: Fabric, objective: Objective, loader: Loader, recipe: Recipe) -> Cost:
    """Measure the cost of some training steps. Nothing is saved.

    Args:
        fabric: A Fabric with a single process.
        objective: The objective, which is trained.
        loader: The training batches.
        recipe: The hyperparameters.

    Returns:
        The cost of one update.
    """
    state = State(fabric, objective, recipe)
    began = time.process_time()
    state.prepare(loader)
    preparation = time.process_time() - began
    batches = loader.batches(0, 2 + _ROUNDS * _STEPS)

    first, rounds = 0, []
    for count in (2, *[_STEPS] * _ROUNDS):
        cpu, clock = time.process_time(), time.perf_counter()
        for step in range(first, first + count):
            update(state, batches, step)
        first += count
        rounds.append(((time.process_time() - cpu) / count, (time.perf_counter() - clock) / count))
    cpu_seconds, seconds = min(rounds[1:])
    of_passes = flops(objective, list(loader.batches(0, 1)), steps=recipe.steps, seed=recipe.seed)
    return Cost(
        images=recipe.batch_size,
        cpu_seconds=cpu_seconds,
        seconds=seconds,
        preparation=preparation,
        flops=recipe.passes * of_passes + _flops_of_update(state),
        backend=recipe.backend,
    )


def _flops_of_update(state: State) -> int:
    """Return the floating-point operations of the matrix products in an update of all trained weights."""
    for weight in state.objective.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    with FlopCounterMode(display=False) as counter:
        state.optimize(torch.zeros((), dtype=torch.bool, device=state.fabric.device))
    return counter.get_total_flops()


def flops(objective: Objective, batches: Sequence[Batch], *, steps: int = 1, seed: int = 0) -> int:
    """Count the floating-point operations of the forward and backward passes of batches.

    Attention is computed by plain matrix products, which can be counted.

    Args:
        objective: The objective.
        batches: The batches, prepared by the caller, since the matrix products of crops would be counted too.
        steps: The number of updates of the run, on which the objective's schedules depend.
        seed: The seed of the random choices.

    Returns:
        The number of floating-point operations, with a multiplication and an addition counted separately.
    """
    start = Progress(0, steps)
    scheduled = {
        name: torch.tensor(schedule(start), dtype=torch.float64) for name, schedule in objective.schedules.items()
    }
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        for batch in batches:
            objective(batch, objective.sample(batch.slots, seed=seed), scheduled)["loss"].backward()
    objective.zero_grad(set_to_none=True)
    return counter.get_total_flops()
