"""What a training step costs here: CPU time, time, floating-point operations."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lightning_fabric import Fabric
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ssvit.data.batch import Batch
from ssvit.data.loader import Loader
from ssvit.kernels.accelerate import accelerate
from ssvit.objectives.base import Objective
from ssvit.schedule import Progress
from ssvit.training import runtime
from ssvit.training.loop import update
from ssvit.training.recipe import Recipe
from ssvit.training.state import State

_ROUNDS = 5
_STEPS = 24  # of a round: batches are read several at a time, so single steps differ


@dataclass(frozen=True)
class Cost:
    """Of one update. images: how many it sees; their views are extra.

    cpu_seconds: over all threads, of the fastest round, the one that other work disturbed least; seconds: by clock,
    of it. preparation: CPU seconds before the first step. flops: floating-point operations of the forward and backward
    passes, and of the matrix products of Muon. backend: what computed the layers.
    """

    images: int
    cpu_seconds: float
    seconds: float
    preparation: float
    flops: int
    backend: str


def measure(fabric: Fabric, objective: Objective, loader: Loader, recipe: Recipe) -> Cost:
    """Take some steps of a run and time them. The objective is trained by them, and nothing is saved."""
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
    accelerate(objective, False)  # the counter knows torch's own operators alone
    of_passes = flops(objective, list(loader.batches(0, 1)), steps=recipe.steps, seed=recipe.seed)
    return Cost(
        images=recipe.batch_size,
        cpu_seconds=cpu_seconds,
        seconds=seconds,
        preparation=preparation,
        flops=recipe.passes * of_passes + _flops_of_update(state),
        backend=runtime.backend(recipe, fabric.device),
    )


def _flops_of_update(state: State) -> int:
    """Floating-point operations of the products in an update of all weights that are trained."""
    for weight in state.objective.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    with FlopCounterMode(display=False) as counter:
        state.optimize(torch.zeros((), dtype=torch.bool, device=state.fabric.device))
    return counter.get_total_flops()


def flops(objective: Objective, batches: Sequence[Batch], *, steps: int = 1, seed: int = 0) -> int:
    """Floating-point operations of a forward and backward pass in the first of so many updates, without kernels.

    Attention is taken in its plain form: matrix products, which can be counted. Batches are made before, since the
    matrix products of crops would be counted, too.
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
