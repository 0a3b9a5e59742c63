"""Estimate the time and memory of the runs of a command before they start, and count operations.

Memory is counted, and time is measured with a few steps that change no weight, buffer or random state. On a CPU it is
CPU time, which other work of the machine changes less than the time by the clock.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from ssvit.data.batch import Batch
from ssvit.data.loader import Loader
from ssvit.engine import private
from ssvit.engine.clock import clock
from ssvit.engine.progress import duration
from ssvit.errors import UserError
from ssvit.evaluation.evaluators.base import COST, Evaluator
from ssvit.objectives.base import Objective
from ssvit.objectives.schedule import Progress
from ssvit.objectives.teacher import local
from ssvit.training.recipe import Recipe
from ssvit.training.state import State

_SECONDS = 1.0  # maximum duration of a timed step
_FIRST, _MOST = 2, 64  # images of the warm-up step, and at most of a timed step
_TIMED = 5  # timed steps, of which the median counts: the first ones allocate memory
_TRIED = 128  # images of an evaluation, at most, by which its cost is measured
Recipes = Callable[[float], Sequence[Recipe]]  # recipes of all runs, from the seconds of an update


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Time and memory of one process of the runs of a command.

    Attributes:
        runs: Number of runs.
        steps: Optimiser updates of the first run.
        step: Seconds of an update of the first run; None if not measured.
        training: Seconds of the updates of all runs; 0 if not measured.
        evaluations: Seconds of the evaluations of all runs; 0 if not measured.
        preparation: Seconds in which the objectives of all runs are fitted to images before the first update.
        measurement: Seconds of this estimate.
        ending: Seconds of the figures of all runs, and of the comparison with other encoders after them.
        evaluation: Seconds of one evaluation during training, by all evaluators that have one.
        final: Seconds of the evaluators that evaluate only after the last step.
        clock: Ratio of the time by the clock to the seconds of the timed steps.
        is_cpu_time: Whether seconds are CPU time instead of time by the clock.
        compiles: Whether the runs are compiled. Seconds are those of layers that are not.
        memory: Bytes by use: weights (with buffers and averaged weights), gradients, state of the optimiser, and
            activations that the forward pass of a micro-batch keeps for the backward pass.
    """

    runs: int = 1
    steps: int
    step: float | None
    training: float = 0.0
    evaluations: float = 0.0
    preparation: float = 0.0
    measurement: float = 0.0
    ending: float = 0.0
    evaluation: float = 0.0
    final: float = 0.0
    clock: float = 1.0
    is_cpu_time: bool = True
    compiles: bool = False
    memory: Mapping[str, int]

    @property
    def total(self) -> float:
        """Return the seconds of all runs, without start-up, checkpoints and waiting for data."""
        return self.training + self.evaluations + self.preparation + self.ending + self.measurement

    @property
    def time(self) -> str:
        """Return the estimated time as text."""
        if self.step is None:
            return "time not measured"
        runs = f"{self.runs} runs, the first" if self.runs > 1 else "training"
        parts = [f"{runs} of {self.steps} steps of {self.step:.2g} s"]
        others = {"figures and comparisons": self.ending, "this estimate": self.measurement}
        others = {"preparation": self.preparation, "evaluations": self.evaluations, **others}
        parts += [f"{name} {tqdm.format_interval(value)}" for name, value in others.items() if value >= 0.5]
        if self.compiles:
            parts.append("measured without torch.compile, compilation not included")
        total = duration(self.total, self.clock if self.is_cpu_time else None)
        return f"{total} ({', '.join(parts)})"

    @property
    def line(self) -> str:
        """Return the estimated time and memory as one line of text."""
        sizes = ", ".join(f"{name} {_size(bytes)}" for name, bytes in self.memory.items())
        return f"estimated: {self.time}; {_size(sum(self.memory.values()))} of memory ({sizes})"


def _size(bytes: int) -> str:
    return tqdm.format_sizeof(bytes, "B", 1000)


def estimate(
    state: State,
    loader: Loader,
    evaluators: Mapping[str, Evaluator],
    *,
    recipes: Recipes | None = None,
    first_step: int = 0,
    ending: Callable[[float], float] = lambda step: 0.0,
) -> Estimate:
    """Estimate the time and memory of the runs of a command in each process.

    Time is measured only in a single process, and without torch.compile: compiling the layers for the images of a timed
    step would take longer than the steps. Activations are counted in a forward pass, except for a sharded model, since
    no process has all of its weights.

    Args:
        state: The training state of the first run.
        loader: The training batches of the first run.
        evaluators: Evaluators of each run by name.
        recipes: Function that returns the recipes of all runs, which train models of the same size; None for a single
            run.
        first_step: Number of updates of the first run that are complete.
        ending: Function that returns the seconds of figures and comparisons after the updates, from those of an update.
    """
    processes, objective, recipe = state.processes, state.objective, state.recipe
    began = clock(processes.device), time.perf_counter()
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    held = _bytes([*objective.parameters(), *objective.buffers()])
    gradients = _bytes(trained)
    micro = recipe.batch_size // (recipe.accumulate * processes.world)
    timed = processes.world == 1
    images, seconds, update, activations, forward = 0, 0.0, 0.0, 0, 0.0
    costs: dict[str, float] = {}
    if not processes.is_sharded:
        with _restored(objective, processes.device):
            few = min(_FIRST, micro)
            for _ in range(2):  # the first step is slower, since it initialises libraries
                seconds, activations = _step(state, loader, few, backward=timed)
            images = max(few, min(micro, _MOST, int(few * _SECONDS / seconds)))
            if images > few:  # otherwise the model is slow, and a few images suffice
                steps = [_step(state, loader, images, backward=timed) for _ in range(_TIMED if timed else 1)]
                seconds, activations = statistics.median(cost for cost, _ in steps), steps[-1][1]
            if timed:
                update = min(_update(state) for _ in range(2))
                costs = {name: _evaluation(state, part, seconds / images) for name, part in evaluators.items()}
                if objective.prepared_images:
                    with torch.no_grad():
                        forward = _step(state, loader, images, backward=False)[0] / images
    counted = bool(timed and images)
    spent = clock(processes.device) - began[0]
    ratio = (time.perf_counter() - began[1]) / max(spent, 1e-9)
    of_image = seconds / images * recipe.passes if counted else 0.0
    step = recipe.batch_size * of_image + update
    runs = [recipe] if recipes is None else recipes(step) if counted else [recipe]
    left = sum(run.steps * (run.batch_size * of_image + update) for run in runs)
    counts = [_counts(evaluators, run) for run in runs]
    done = _counts(evaluators, recipe, until=first_step)
    evaluated = sum(cost * (sum(count[name] for count in counts) - done[name]) for name, cost in costs.items())
    return Estimate(
        runs=len(runs),
        steps=recipe.steps - first_step,
        step=step if counted else None,
        training=left - first_step * step,
        evaluations=evaluated,
        preparation=(len(runs) - (first_step > 0)) * objective.prepared_images * forward,
        measurement=spent,
        ending=ending(step) if counted else 0.0,
        evaluation=sum(cost for name, cost in costs.items() if not evaluators[name].at_end),
        final=sum(cost for name, cost in costs.items() if evaluators[name].at_end),
        clock=ratio,
        is_cpu_time=processes.device.type == "cpu",
        compiles=recipe.backend == "compile",
        memory={
            "weights": held + (gradients if recipe.ema else 0),
            "gradients": gradients,
            "optimizer": _moments(state),
            "activations": round(activations * micro / max(images, 1)),
        },
    )


def _counts(evaluators: Mapping[str, Evaluator], recipe: Recipe, until: int | None = None) -> dict[str, int]:
    """Return the number of evaluations of a run by each evaluator, or of those before the step `until`."""
    steps = range(recipe.steps + 1 if until is None else until)
    return {
        name: sum(evaluator.due(step, recipe.steps, recipe.evaluate_every) for step in steps)
        for name, evaluator in evaluators.items()
    }


def _evaluation(state: State, evaluator: Evaluator, of_image: float) -> float:
    """Return the seconds of an evaluation, measured on a part of its images.

    Args:
        state: The training state.
        evaluator: The evaluator. If it has no trial, an image counts as `COST` of a training image.
        of_image: Seconds of the passes of a training image.
    """
    cost = COST * of_image
    with state.evaluating() as objective:
        for _ in range(2):  # the first one reads the images and initialises libraries
            began = clock(state.processes.device)
            try:
                images = evaluator.trial(objective, _TRIED)
            except UserError:  # such as features that are not finite before the preparation
                images = 0
            if images:
                cost = (clock(state.processes.device) - began) / images
    return cost * evaluator.images


def few(loader: Loader, images: int) -> Batch:
    """Return a batch with `images` images on the CPU."""
    small = replace(loader, batch_size=images, accumulate=1, rank=0, world=1, workers=0, device="cpu")
    return next(small.batches(0, 1))


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


def flops_of_step(objective: Objective, loader: Loader, recipe: Recipe) -> float:
    """Return the floating-point operations of the forward and backward passes of an update of a run.

    They are counted for two images before the objective is sharded, compiled or accelerated, and change no state.
    """
    private.without_dynamo()
    images = min(_FIRST, recipe.batch_size)
    with _restored(objective, torch.device("cpu")):
        counted = flops(objective.train(), [few(loader, images)], steps=recipe.steps, seed=recipe.seed)
    return counted / images * recipe.batch_size * recipe.passes


def _step(state: State, loader: Loader, images: int, *, backward: bool) -> tuple[float, int]:
    """Return the seconds of the passes of a batch, and the bytes that the forward pass keeps for the backward pass."""
    processes, objective = state.processes, state.objective
    began = clock(processes.device)
    batch = few(loader, images).to(processes.device)
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
    return clock(processes.device) - began, sum(kept.values())


def _update(state: State) -> float:
    """Return the seconds of an optimiser update that is skipped and changes nothing."""
    began = clock(state.processes.device)
    state.optimize(torch.zeros((), dtype=torch.bool, device=state.processes.device))
    return clock(state.processes.device) - began


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
