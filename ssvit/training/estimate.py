"""Estimate the time and memory of a run before it starts.

Memory is counted, and time is measured with one or two small steps. They change no weight, buffer or random state.
"""

import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from lightning_fabric import Fabric
from torch import Tensor

from ssvit.data.loader import Loader
from ssvit.evaluation.panels.base import COST, Evaluator
from ssvit.objectives.base import Objective
from ssvit.objectives.teacher import local
from ssvit.training import sharding
from ssvit.training.state import State

_SECONDS = 1.0  # maximum duration of the timed step
_FIRST, _MOST = 2, 64  # images of the warm-up step, and at most of the timed step


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Time and memory of one process of a run.

    Attributes:
        steps: Optimiser updates that remain.
        weights: Bytes of weights, buffers and averaged weights.
        gradients: Bytes of the gradients.
        moments: Bytes of the optimiser's state.
        activations: Bytes that the forward pass of a micro-batch keeps for the backward pass.
        resident: Bytes of the process before the first step, weights included; 0 if unknown.
        step: Seconds of an update; None if not measured.
        evaluations: Seconds of all evaluations; None if not measured.
        images: Images of the timed step.
    """

    steps: int
    weights: int
    gradients: int
    moments: int
    activations: int
    resident: int
    step: float | None
    evaluations: float | None
    images: int

    @property
    def memory(self) -> int:
        """Return the peak memory in bytes."""
        return (self.resident or self.weights) + self.gradients + self.activations + self.moments

    @property
    def seconds(self) -> float | None:
        """Return the seconds of all steps and evaluations, without start-up, checkpoints and waiting for data.

        None if not measured.
        """
        return None if self.step is None else self.steps * self.step + (self.evaluations or 0)

    @property
    def line(self) -> str:
        """Return the estimate as one line of text."""
        if self.seconds is None or self.step is None:
            time_text = "time after the first steps"
        else:
            each = f"{self.step:.2g} s each, measured on {self.images} images"
            steps = f"{duration(self.steps * self.step)} of steps ({each})"
            time_text = f"{duration(self.seconds)} = {steps} + {duration(self.evaluations or 0)} of evaluations"
        parts = (self.weights, "weights"), (self.gradients + self.moments, "gradients and moments")
        counted = ", ".join(f"{size(part)} {name}" for part, name in (*parts, (self.activations, "activations")))
        return f"estimated: {time_text}; {size(self.memory)} of memory (counted: {counted})"


def duration(seconds: float) -> str:
    """Format a duration in seconds as 85 s, 12 min, 3 h 20 min or 4 days."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes / 1440:.0f} days"


def size(bytes: int) -> str:
    """Format a number of bytes as 45 MB or 1.2 GB."""
    return f"{bytes / 1e6:.0f} MB" if bytes < 1e9 else f"{bytes / 1e9:.1f} GB"


def estimate(state: State, loader: Loader, evaluators: Mapping[str, Evaluator], *, first: int = 0) -> Estimate:
    """Estimate the time and memory of the remaining steps in each process.

    Time is measured only in a single process without torch.compile. Activations are counted in a forward pass, except
    for a sharded model, since no process has all of its weights.

    Args:
        state: The training state.
        loader: The training batches.
        evaluators: Evaluators by name.
        first: Number of complete steps.
    """
    fabric, objective, recipe = state.fabric, state.objective, state.recipe
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    held = _bytes([*objective.parameters(), *objective.buffers()])
    gradients = _bytes(trained)
    micro = recipe.batch_size // (recipe.accumulate * fabric.world_size)
    timed = fabric.world_size == 1 and recipe.backend != "compile"
    count, seconds, update, activations = 0, 0.0, 0.0, 0.0
    resident = _resident() if fabric.device.type == "cpu" else 0
    if not sharding.is_sharded(fabric):
        with _taken_back(objective, fabric):
            few = min(_FIRST, micro)
            for _ in range(2):  # the first step is slower, since it initialises libraries
                took, fixed = _step(state, loader, few, backward=timed)
            count = max(few, min(micro, _MOST, int(few * _SECONDS / took)))
            larger, saved = _step(state, loader, count, backward=timed) if count > few else (took, fixed)
            if timed:
                update = min(_update(state) for _ in range(2))
        seconds = _at(micro, few, took, count, larger)
        activations = _at(micro, few, fixed, count, saved)
    of_one = seconds / micro if timed and count else None
    seen = sum(
        one.images * sum(one.due(step, recipe.steps, recipe.evaluate_every) for step in range(first, recipe.steps + 1))
        for one in evaluators.values()
    )
    return Estimate(
        steps=recipe.steps - first,
        weights=held + (gradients if recipe.ema else 0),
        gradients=gradients,
        moments=_moments(state),
        activations=round(activations),
        resident=resident,
        step=None if of_one is None else of_one * recipe.batch_size * recipe.passes + update,
        evaluations=None if of_one is None else COST * seen * of_one,
        images=count,
    )


def _at(images: int, few: int, of_few: float, count: int, of_count: float) -> float:
    """Extrapolate a quantity linearly to a number of images, from two measurements or from 0 and the larger one."""
    each = (of_count - of_few) / (count - few) if of_count > of_few and count > 2 * few else of_count / count
    return of_count + each * (images - count)


def _step(state: State, loader: Loader, images: int, *, backward: bool) -> tuple[float, int]:
    """Return the seconds of the passes of a batch, and the bytes that the forward pass keeps for the backward pass."""
    fabric, objective = state.fabric, state.objective
    small = replace(loader, batch_size=images, accumulate=1, rank=0, world=1, workers=0)
    (batch,) = small.batches(0, 1)
    batch = batch.to(fabric.device)
    began = time.perf_counter()
    noise = fabric.to_device(objective.sample(batch.slots, seed=state.recipe.seed))
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with fabric.autocast(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = objective(batch, noise, state.schedule(0))["loss"]
    for tensor in (*objective.parameters(), *objective.buffers(), *batch.views.values()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    if backward:
        loss.backward()
        loss.item()
    return time.perf_counter() - began, sum(kept.values())


def _update(state: State) -> float:
    """Return the seconds of an optimiser update that is skipped and changes nothing."""
    began = time.perf_counter()
    state.optimize(torch.zeros((), dtype=torch.bool, device=state.fabric.device))
    return time.perf_counter() - began


def _moments(state: State) -> int:
    """Return the bytes of the optimiser's state: per weight, two values for AdamW, one for SGD and Muon."""
    of_weight = 1 if state.recipe.optimizer == "sgd" else 2
    return sum(
        (1 if group.get("matrices") else of_weight) * _bytes(group["params"]) for group in state.optimizer.param_groups
    )


@contextmanager
def _taken_back(objective: Objective, fabric: Fabric) -> Iterator[None]:
    """Restore buffers, gradients and random states after the block."""
    buffers = [(buffer, buffer.clone()) for buffer in objective.buffers()]
    devices = [fabric.device] if fabric.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
    with torch.no_grad():
        for buffer, former in buffers:
            buffer.copy_(former)
    objective.zero_grad(set_to_none=True)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


def _resident() -> int:
    """Return the peak resident memory of this process in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
