"""Estimate the time and memory of a run before it starts.

Memory is counted, and time is measured with one or two small steps. They change no weight, buffer or random state.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm import tqdm

from ssvit.data.batch import Batch
from ssvit.data.loader import Loader
from ssvit.evaluation.panels.base import COST, Evaluator
from ssvit.objectives.base import Objective
from ssvit.objectives.teacher import local
from ssvit.training.state import State

_SECONDS = 1.0  # maximum duration of the timed step
_FIRST, _MOST = 2, 64  # images of the warm-up step, and at most of the timed step


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Time and memory of one process of a run.

    Attributes:
        steps: Optimiser updates.
        step: Seconds of an update; None if not measured.
        evaluations: Seconds of all evaluations; 0 if not measured.
        memory: Bytes by use: weights (with buffers and averaged weights), gradients, state of the optimiser, and
            activations that the forward pass of a micro-batch keeps for the backward pass.
    """

    steps: int
    step: float | None
    evaluations: float
    memory: Mapping[str, int]

    @property
    def line(self) -> str:
        """Return the estimate as one line of text, without start-up, checkpoints and waiting for data."""
        time_text = "time not measured"
        if self.step is not None:
            total = tqdm.format_interval(self.steps * self.step + self.evaluations)
            evaluations = tqdm.format_interval(self.evaluations)
            time_text = f"{total} ({self.steps} steps of {self.step:.2g} s, evaluations {evaluations})"
        sizes = ", ".join(f"{name} {_size(bytes)}" for name, bytes in self.memory.items())
        return f"estimated: {time_text}; {_size(sum(self.memory.values()))} of memory ({sizes})"


def _size(bytes: int) -> str:
    return tqdm.format_sizeof(bytes, "B", 1000)


def estimate(state: State, loader: Loader, evaluators: Mapping[str, Evaluator]) -> Estimate:
    """Estimate the time and memory of a run in each process.

    Time is measured only in a single process without torch.compile. Activations are counted in a forward pass, except
    for a sharded model, since no process has all of its weights.

    Args:
        state: The training state.
        loader: The training batches.
        evaluators: Evaluators by name.
    """
    processes, objective, recipe = state.processes, state.objective, state.recipe
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    held = _bytes([*objective.parameters(), *objective.buffers()])
    gradients = _bytes(trained)
    micro = recipe.batch_size // (recipe.accumulate * processes.world)
    timed = processes.world == 1 and recipe.backend != "compile"
    images, seconds, update, activations = 0, 0.0, 0.0, 0
    if not processes.is_sharded:
        with _restored(objective, processes.device):
            few = min(_FIRST, micro)
            for _ in range(2):  # the first step is slower, since it initialises libraries
                seconds, _ = _step(state, loader, few, backward=timed)
            images = max(few, min(micro, _MOST, int(few * _SECONDS / seconds)))
            seconds, activations = _step(state, loader, images, backward=timed)
            if timed:
                update = min(_update(state) for _ in range(2))
    evaluated = sum(
        evaluator.images
        * sum(evaluator.due(step, recipe.steps, recipe.evaluate_every) for step in range(recipe.steps + 1))
        for evaluator in evaluators.values()
    )
    return Estimate(
        steps=recipe.steps,
        step=seconds / images * recipe.batch_size * recipe.passes + update if timed and images else None,
        evaluations=COST * evaluated * seconds / images if timed and images else 0.0,
        memory={
            "weights": held + (gradients if recipe.ema else 0),
            "gradients": gradients,
            "optimizer": _moments(state),
            "activations": round(activations * micro / max(images, 1)),
        },
    )


def few(loader: Loader, images: int) -> Batch:
    """Return a batch with `images` images on the CPU."""
    small = replace(loader, batch_size=images, accumulate=1, rank=0, world=1, workers=0, device="cpu")
    return next(small.batches(0, 1))


def _step(state: State, loader: Loader, images: int, *, backward: bool) -> tuple[float, int]:
    """Return the seconds of the passes of a batch, and the bytes that the forward pass keeps for the backward pass."""
    processes, objective = state.processes, state.objective
    batch = few(loader, images).to(processes.device)
    began = time.perf_counter()
    noise = objective.sample(batch.slots, seed=state.recipe.seed)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with processes.computing(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
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
    state.optimize(torch.zeros((), dtype=torch.bool, device=state.processes.device))
    return time.perf_counter() - began


def _moments(state: State) -> int:
    """Return the bytes of the optimiser's state: per weight, two values for AdamW, one for SGD and Muon."""
    of_weight = 1 if state.recipe.optimizer == "sgd" else 2
    return sum(
        (1 if group.get("matrices") else of_weight) * _bytes(group["params"]) for group in state.optimizer.param_groups
    )


@contextmanager
def _restored(objective: Objective, device: torch.device) -> Iterator[None]:
    """Restore buffers, gradients and random states after the block."""
    buffers = [(buffer, buffer.clone()) for buffer in objective.buffers()]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
    with torch.no_grad():
        for buffer, former in buffers:
            buffer.copy_(former)
    objective.zero_grad(set_to_none=True)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)
