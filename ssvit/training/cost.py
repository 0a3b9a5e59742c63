"""What a training step costs here: CPU time, time, floating-point operations."""

import math
import time
from dataclasses import dataclass

import torch
from lightning_fabric import Fabric
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ssvit.data.loader import Loader
from ssvit.objectives.base import Objective
from ssvit.schedule import Progress
from ssvit.training import runtime
from ssvit.training.loop import accumulate
from ssvit.training.recipe import Recipe
from ssvit.training.state import State

_ROUNDS = 5
_STEPS = 24  # of a round: batches are read several at a time, so single steps differ


@dataclass(frozen=True)
class Cost:
    """Of one update. images: how many it sees; their views are extra.

    cpu_seconds: over all threads, of the fastest round, the one that other work disturbed least; seconds: by clock,
    of it. flops: floating-point operations of the forward and backward pass, counted without the kernels. backend:
    what computed the layers.
    """

    images: int
    cpu_seconds: float
    seconds: float
    flops: int
    backend: str


def measure(fabric: Fabric, objective: Objective, loader: Loader, recipe: Recipe) -> Cost:
    """Take some steps of a run and time them. The objective is trained by them, and nothing is saved."""
    batches = loader.batches(0, 2 + _ROUNDS * _STEPS)
    flops = _flops(objective, loader, recipe)
    state = State(fabric, objective, recipe)

    def update(step: int) -> None:
        scheduled = state.schedule(step)
        _, outputs = accumulate(state, batches, step, scheduled)
        fabric.clip_gradients(state.model, state.optimizer, max_norm=recipe.clip or math.inf, error_if_nonfinite=False)
        state.optimizer.step()
        state.after_step(outputs, scheduled, applied=True)
        state.optimizer.zero_grad(set_to_none=True)

    first, rounds = 0, []
    for count in (2, *[_STEPS] * _ROUNDS):
        began = time.process_time(), time.perf_counter()
        for step in range(first, first + count):
            update(step)
        first += count
        rounds.append(((time.process_time() - began[0]) / count, (time.perf_counter() - began[1]) / count))
    cpu_seconds, seconds = min(rounds[1:])
    return Cost(recipe.batch_size, cpu_seconds, seconds, flops, runtime.backend(recipe, fabric.device))


def _flops(objective: Objective, loader: Loader, recipe: Recipe) -> int:
    """Of one update. The counter knows torch's own operators, and of attention its plain form."""
    batches = list(loader.batches(0, 1))  # before the counter, which would count the products of crops too
    start = Progress(0, recipe.steps)
    scheduled = {
        name: torch.tensor(schedule(start), dtype=torch.float64) for name, schedule in objective.schedules.items()
    }
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        for batch in batches:
            objective(batch, objective.sample(batch.slots, seed=recipe.seed), scheduled)["loss"].backward()
    objective.zero_grad(set_to_none=True)
    return counter.get_total_flops()
