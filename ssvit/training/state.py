"""Hold the training state (weights, optimiser state, averaged weights), and save and restore it.

A merged checkpoint contains full tensors, independent of the strategy and of the number of processes that wrote it.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm

from ssvit.checkpoints import storage
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.manifest import CheckpointError
from ssvit.data import fingerprints
from ssvit.data.loader import Loader
from ssvit.data.sources.base import Source
from ssvit.engine import private
from ssvit.errors import UserError, printable
from ssvit.evaluation.processes import all_gather_results
from ssvit.kernels.accelerate import accelerate, pack
from ssvit.models.timm_options import options_from, stored
from ssvit.objectives.base import Objective
from ssvit.objectives.schedule import Progress, Schedule
from ssvit.objectives.teacher import approach, local
from ssvit.training import runtime, sharding
from ssvit.training.muon import Muon, block_matrices
from ssvit.training.recipe import Recipe
from ssvit.training.runtime import Processes

_UNRECORDED = (
    "images",
    "contents",
    "teacher",
    "recipe.accumulate",
)  # entries of a run's identity that manifests of earlier versions lack
_DIFFERENCES = {
    "images": "data: has {value:,} training images, and the run in {folder} started with {recorded:,}",
    "data": "data: the names, sizes or labels of training images have changed since the run in {folder} started",
    "contents": "data: the contents of training images have changed since the run in {folder} started",
    "precision": "precision: is {value}, and the run in {folder} started with {recorded}; "
    "recipe.precision={recorded} continues it",
}  # messages for entries whose values are checksums or numbers
_OTHERWISE = "another name=… starts a new run, overwrite=true replaces this one"
_ADAM, _MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)  # running means of the optimisers


class Average:
    """Maintain a moving average of the weights (Polyak averaging), initialised with the weights.

    After each step, average = m * average + (1 - m) * weights with m = min(momentum, (1 + step) / (10 + step)), so that
    the initial weights have no share in the average of a short run (as TensorFlow's ExponentialMovingAverage with
    num_updates). With a sharded model, each process averages its shards.

    Args:
        model: The model; parameters that require a gradient are averaged.
        momentum: Largest decay rate of the average, in [0, 1).

    Attributes:
        by_name: The averaged weights by the names of their parameters.
    """

    def __init__(self, model: nn.Module, momentum: float) -> None:
        self.momentum = momentum
        weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.by_name = {name: weight.detach().clone() for name, weight in weights.items()}
        self._weights, self._average = list(weights.values()), list(self.by_name.values())

    @torch.no_grad()
    def follow(self, step: int, applied: Tensor) -> None:
        """Update the average after a step.

        Args:
            step: The step, counted from 0.
            applied: () bool; the average is unchanged if it is false.
        """
        momentum = min(self.momentum, (1 + step) / (10 + step))
        approach(self._average, [weight.detach() for weight in self._weights], (1 - momentum) * applied.double())

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Exchange the weights for the averaged ones within the block, and restore them bit for bit afterwards."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for weight, average in zip(self._weights, self._average, strict=True):
            saved = weight.detach().clone()
            weight.detach().copy_(average)
            average.copy_(saved)


class RunningStatistics:
    """Track the running means and variances of a model's batch norm layers, updated once for each optimiser update.

    They are averaged over the processes, so that they are identical in all of them. A skipped update restores them.

    Args:
        model: The model, with its initial or restored weights.

    Attributes:
        now: The statistics, which the model's forward passes update, and its counts of forward passes.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
        self.now = [statistic for norm in norms for statistic in norm.buffers()]
        self._before = [statistic.clone() for statistic in self.now]

    @torch.no_grad()
    def follow(self, processes: Processes, applied: Tensor) -> None:
        """Average the statistics over the processes after the forward passes of an update, or restore them.

        Args:
            processes: The processes.
            applied: () bool, whether the update is applied; if not, the statistics are restored.
        """
        # Counts of forward passes include skipped updates and are identical in all processes.
        averaged = [statistic for statistic in self.now if statistic.is_floating_point()]
        if averaged:
            means = processes.mean(torch.cat(averaged))
            torch._foreach_copy_(averaged, means.split([len(statistic) for statistic in averaged]))
        for now, before in zip(self.now, self._before, strict=True):
            if now.is_floating_point():
                now.copy_(torch.where(applied, now, before))
            before.copy_(now)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the statistics of the last update."""
        for now, before in zip(self.now, self._before, strict=True):
            now.copy_(before)


class State:
    """Combine an objective with its optimiser and, if the recipe requests it, a moving average of the weights.

    `model` computes the loss: it is the objective, compiled and sharded according to the recipe and the strategy.

    Args:
        processes: The processes.
        objective: The objective with its initial weights.
        recipe: The hyperparameters.
    """

    def __init__(self, processes: Processes, objective: Objective, recipe: Recipe) -> None:
        self.processes, self.recipe = processes, recipe
        self.objective = objective.train()  # an encoder loaded from a checkpoint is in eval mode
        accelerate(objective, recipe.backend == "kernels")
        for module in objective.references():
            accelerate(module.to(processes.device), recipe.backend == "kernels")
            pack(module)
        self.sample = torch.compile(objective.sample) if recipe.backend == "compile" else objective.sample
        self._twin = sharding.Twin(objective, processes.device) if processes.is_sharded else None
        self.model = processes.prepare_model(objective, recipe)
        private.without_dynamo()
        # Sharding replaces the parameters, so the optimiser is created after it.
        groups = objective.parameter_groups(weight_decay=recipe.weight_decay, layer_decay=recipe.layer_decay)
        optimizer: torch.optim.Optimizer
        beta1, beta2 = recipe.betas
        if recipe.optimizer == "sgd":
            optimizer = torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, fused=True)
        elif recipe.optimizer == "muon":
            optimizer = Muon(
                groups,
                block_matrices(objective),
                lr=recipe.lr,
                betas=(beta1, beta2),
                momentum=recipe.momentum,
                dtype=torch.bfloat16 if processes.precision == "bf16-mixed" else None,
            )
        else:
            optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=(beta1, beta2), fused=True)
        self.optimizer = optimizer
        # Initialised here, so that a checkpoint also has the state of weights that have had no gradient.
        for group in optimizer.param_groups:
            is_adam = recipe.optimizer != "sgd" and not group.get("matrices")
            for weight in group["params"]:
                moments = {key: torch.zeros_like(weight) for key in (_ADAM if is_adam else _MOMENTUM)}
                step = {"step": torch.zeros((), device=weight.device)} if is_adam else {}
                optimizer.state[weight] = moments | step
        self._saves: ProcessGroup | None = None  # of the checkpoint thread, created by the first save
        self._saving: Callable[[], None] | None = None
        self.average = Average(objective, recipe.ema) if recipe.ema else None
        self._statistics = RunningStatistics(objective)
        self._weight_decay = Schedule(start=recipe.weight_decay, end=recipe.weight_decay_end)
        self._values: Mapping[str, float] = {}  # of the objective's schedules at the present step

    def prepare(self, loader: Loader) -> str:
        """Let the objective fit its buffers on rank 0, broadcast them, and return its message, "" if none."""
        if type(self.objective).prepare is Objective.prepare:
            return ""
        # Global batches, so that the result does not depend on the number of processes.
        batches = replace(loader, rank=0, world=1, accumulate=1).batches(0, sys.maxsize)
        with self.processes.waiting_for_main(), self.evaluating() as objective, contextlib.closing(batches):
            line = objective.prepare(batches) if self.processes.is_main else ""
        for buffer in self.objective.buffers() if self.processes.world > 1 else ():
            torch.distributed.broadcast(buffer, 0)
        return line

    def schedule(self, step: int) -> dict[str, Tensor]:
        """Set the optimiser's learning rate and weight decay for a step, and select the weights that are frozen at it.

        Args:
            step: The step, counted from 0.

        Returns:
            The values of `scheduled` as () float64 tensors: torch.compile would recompile for each new Python number.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = group["share"] * self.recipe.learning_rate(step)
            if group["decays"]:
                group["weight_decay"] = self._weight_decay(Progress(step, self.recipe.steps))
        # `torch.full` creates the value on the device: copying a number from the host would synchronise.
        as_tensor = partial(torch.full, (), dtype=torch.float64, device=self.processes.device)
        self._values = self.scheduled(step)
        return {name: as_tensor(fill_value=value) for name, value in self._values.items()}

    def scheduled(self, step: int) -> dict[str, float]:
        """Return the values of the objective's schedules at a step, by name."""
        progress = Progress(step, self.recipe.steps)
        return {name: float(schedule(progress)) for name, schedule in self.objective.schedules.items()}

    @contextlib.contextmanager
    def ascended(self) -> Iterator[None]:
        """Perturb the weights along the gradient (SAM), clear the gradient, and restore the weights on exit.

        The running statistics of batch norm layers are restored too, so that they are those of the unperturbed weights.
        The perturbation has norm `recipe.sam`. The gradient at the perturbed weights approximates that of the largest
        loss within this radius (Foret et al. 2021, arXiv 2010.01412).
        """
        norm = runtime.clip(self.optimizer, 0)
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        moved = [local(weight.detach()) for weight in weights if weight.grad is not None]
        changed = [*moved, *self._statistics.now]
        before = [tensor.clone() for tensor in changed]
        gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
        torch._foreach_add_(moved, torch._foreach_mul(gradients, self.recipe.sam / (norm + 1e-12)))
        self.optimizer.zero_grad(set_to_none=True)
        try:
            yield
        finally:
            torch._foreach_copy_(changed, before)

    @torch.no_grad()
    def apply(self, step: int, outputs: Mapping[str, Tensor], scheduled: Mapping[str, Tensor], applied: Tensor) -> None:
        """Update weights, averages, running statistics and the objective's buffers, and clear the gradients.

        Args:
            step: The step, counted from 0.
            outputs: Tensors that the objective returned in this process, averaged over the micro-batches.
            scheduled: Values of the objective's schedules at this step.
            applied: () bool, on the device; the state is unchanged if it is false.
        """
        self.optimize(applied)
        if self.average is not None:
            self.average.follow(step, applied)
        self._statistics.follow(self.processes, applied)
        if type(self.objective).after_step is not Objective.after_step:  # otherwise the means are not needed
            means = {name: self.processes.mean(value) for name, value in outputs.items()}
            self.objective.after_step(means, scheduled, applied)
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def optimize(self, applied: Tensor) -> None:
        """Update the weights from their gradients; the weights are unchanged if `applied`, () bool, is false."""
        optimizer: Any = self.optimizer
        optimizer.found_inf = (~applied).float()  # fused optimisers skip the step if it is 1
        private.step(self.optimizer)

    def freeze(self) -> None:
        """Clear the gradients of weights that the objective freezes at this step, so that the optimiser skips them."""
        for weight in self.objective.frozen(self._values):
            weight.grad = None

    def discard_update(self) -> None:
        """Discard the forward passes of an incomplete update: restore running statistics, clear gradients."""
        self._statistics.restore()
        self.optimizer.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[Objective]:
        """Yield the objective for evaluations: unsharded, with averaged weights, in eval mode and without gradients."""
        averaged = self.average.swapped_in() if self.average is not None else contextlib.nullcontext()
        with contextlib.ExitStack() as stack:
            stack.enter_context(averaged)
            objective = self.objective
            if self._twin is not None:
                objective = stack.enter_context(self._twin.filled(objective))
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.processes.computing())
            yield objective.eval().measured()
            objective.train()

    def save(
        self, folder: Path, step: int, run_identity: Mapping[str, object], *, shown: bytes = b"", wait: bool = True
    ) -> None:
        """Write a checkpoint. All processes must call this method.

        A sharded model is saved in the background, one file for each process, unless `wait` is true or this is the last
        step, after which the files are merged. A failure in the background is raised by the next call.

        Args:
            folder: The run folder.
            step: Number of complete updates.
            run_identity: Entries of the manifest that a continuation must match.
            shown: Fingerprints of images that this process has shown since the last checkpoint.
            wait: Whether to wait until a sharded checkpoint is written.

        Raises:
            CheckpointError: The checkpoint could not be written; raised in all processes.
        """
        self._finish_saving()
        recorded = b"".join(all_gather_results(lambda: shown))
        if recorded:
            self._in_main(lambda: fingerprints.record(folder, recorded))
        states, metadata = self._states(), dict(run_identity)
        if not self.processes.is_sharded:
            self._in_main(lambda: storage.save(folder, step, states, metadata))
            return
        from ssvit.checkpoints import parts

        if self._saves is None:  # the checkpoint thread must not use the process group of the training thread
            self._saves = cast(ProcessGroup, torch.distributed.new_group(backend="gloo"))
        self._saving = parts.save(folder, step, states, metadata, self._saves)
        if wait or step == self.recipe.steps:
            self._finish_saving()
        if step == self.recipe.steps:
            self._in_main(lambda: storage.merge(Checkpoint.open(folder / f"step_{step:08d}")))

    def _finish_saving(self) -> None:
        """Wait until the pending checkpoint is written."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving()

    def _in_main(self, write: Callable[[], object]) -> None:
        """Call `write` on rank 0 while all processes wait; raise CheckpointError in all of them if it fails."""
        failure = ""
        if self.processes.is_main:
            try:
                write()
            except UserError as error:
                failure = str(error)
        if self.processes.any_process(bool(failure)):
            raise CheckpointError(failure or "rank 0 could not write the checkpoint")

    def _states(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of a checkpoint by kind ("model", "optimizer", "ema") and name, possibly sharded."""
        weights = self.objective.state_dict()
        moments = {name: self.optimizer.state.get(weight, {}) for name, weight in self.objective.named_parameters()}
        states = {
            "model": weights,
            "optimizer": {f"{name}/{key}": value for name, values in moments.items() for key, value in values.items()},
        }
        if self.average is not None:
            states["ema"] = weights | self.average.by_name
        return states

    def _fill(self, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Set tensors, which may be sharded, to full tensors of the main process, which broadcasts them."""
        for name, tensor in tensors.items():
            full = values[name] if self.processes.is_main else torch.empty(tensor.shape)
            full = full.to(tensor.device, tensor.dtype)
            if self.processes.world > 1:
                torch.distributed.broadcast(full.contiguous(), 0)
            local(tensor.detach()).copy_(sharding.shard_of(full, tensor))

    def restore(
        self, folder: Path, run_identity: Mapping[str, object], source: Source, report: Callable[[str], None]
    ) -> int:
        """Restore the newest usable checkpoint, which rank 0 reads and distributes.

        Args:
            folder: The run folder.
            run_identity: Entries that the checkpoint's manifest must match.
            source: The training images, of which an error names the first that has changed.
            report: Function that prints a line.

        Returns:
            The number of complete updates; 0 if there is no checkpoint.

        Raises:
            UserError: The checkpoint was written by a run with another identity or another optimizer.
        """
        newest = storage.newest(folder, report) if self.processes.is_main else None
        manifest: Mapping[str, Any] | None = self.processes.broadcast(newest and dict(newest[0].manifest))
        if manifest is None:
            return 0
        for name, value in run_identity.items():
            recorded = manifest.get(name, value if name in _UNRECORDED else None)
            if name == "encoder" and recorded and isinstance(value, Mapping):
                # Options that the run's version did not have are at their defaults.
                defaults = stored(options_from(recorded))
                recorded = {**{option: defaults[option] for option in value if option in defaults}, **recorded}
            if json.loads(json.dumps(recorded)) != json.loads(json.dumps(value)):
                difference = _DIFFERENCES.get(
                    name, "{name}: must be {recorded}, with which the run in {folder} started"
                )
                difference = difference.format(name=name, recorded=manifest.get(name), value=value, folder=folder)
                if name in ("data", "contents") and (changed := fingerprints.first_difference(folder, source)):
                    difference += f"; the first image that differs is {printable(changed)}"
                raise UserError(f"{difference}; {_OTHERWISE}")
        states = newest[1] if newest else {}
        moments = self._states()["optimizer"]
        if self.processes.broadcast(states.get("optimizer", {}).keys() != moments.keys()):
            raise UserError(
                f"recipe.optimizer={self.recipe.optimizer}: must be the optimizer with which the run in {folder} "
                f"started; {_OTHERWISE}"
            )
        self._fill(moments, states.get("optimizer", {}))
        self._fill(self.objective.state_dict(), states.get("model", {}))
        self._statistics = RunningStatistics(self.objective)
        if self.average is not None:
            with self.average.swapped_in():
                self._fill(self.objective.state_dict(), states.get("ema", {}))
        if self.processes.is_main:
            storage.set_aside_after(folder, manifest["step"])
        return manifest["step"]
