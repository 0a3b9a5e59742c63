"""What a run changes as it goes: the weights, the optimiser's state and the average, set up, saved and put back as one.

How a strategy spreads them over processes is hidden here: a checkpoint is whole, whatever wrote it and reads it.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ssvit.checkpoints import storage
from ssvit.checkpoints.manifest import CheckpointError, completed
from ssvit.kernels.accelerate import accelerate
from ssvit.objectives.base import Objective
from ssvit.options import UserError
from ssvit.schedule import Progress
from ssvit.training import runtime
from ssvit.training.average import Average
from ssvit.training.recipe import Recipe


class State:
    """An objective with its optimiser (and its moving average, if the recipe has one) on the devices of a Fabric.

    `model` is what computes the loss: the objective, compiled and spread as the recipe and the strategy say.
    """

    def __init__(self, fabric: Fabric, objective: Objective, recipe: Recipe) -> None:
        self.fabric, self.objective = fabric, objective.train()  # an encoder comes from its checkpoint in eval mode
        groups = objective.parameter_groups(weight_decay=recipe.weight_decay, layer_decay=recipe.layer_decay)
        if recipe.optimizer == "sgd":
            optimizer = torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, fused=True)
        else:
            optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=tuple(recipe.betas), fused=True)
        backend = runtime.backend(recipe, fabric.device)
        accelerate(objective, backend != "eager" and fabric.device.type == "cpu")
        compiled = torch.compile(objective) if backend == "compile" else objective
        self.model, self.optimizer = fabric.setup(compiled, optimizer)
        # What Fabric has wrapped once more: torch's functions know the module as the strategy spreads it.
        self._spread: nn.Module = self.model._forward_module
        # Not offloaded on a CPU: there all moments of a sharded parameter would be views of one storage.
        self._whole = StateDictOptions(full_state_dict=True, cpu_offload=fabric.device.type != "cpu")
        self.average = Average(objective, recipe.ema) if recipe.ema else None

    def scheduled(self, progress: Progress) -> dict[str, Tensor]:
        """This step's values of the objective's schedules. Tensors, since each new number would compile anew."""
        schedules = self.objective.schedules.items()
        values = {name: torch.tensor(schedule(progress), dtype=torch.float64) for name, schedule in schedules}
        return {name: value.to(self.fabric.device) for name, value in values.items()}

    @torch.no_grad()
    def after_step(self, outputs: Mapping[str, Tensor], progress: Progress, *, applied: bool) -> None:
        """Let the objective change what is no weight; outputs: of this process, the mean over its micro-batches."""
        if type(self.objective).after_step is Objective.after_step:
            return  # nothing to change, so nothing to gather
        means = {name: self.fabric.all_reduce(value, reduce_op="mean") for name, value in outputs.items()}
        # Sharded, a teacher's part of the weights is not the student's.
        with runtime.gathered(self._spread, writeback=True):
            self.objective.after_step(means, self.scheduled(progress), torch.tensor(applied, device=self.fabric.device))

    @contextlib.contextmanager
    def judged(self) -> Iterator[Objective]:
        """The objective as evaluations see it: whole in every process, averaged weights, eval mode, no gradients."""
        averaged = self.average.in_place() if self.average is not None else contextlib.nullcontext()
        self.objective.eval()
        with averaged, runtime.gathered(self._spread), torch.no_grad(), self.fabric.autocast():
            yield self.objective
        self.objective.train()

    def save(self, folder: Path, step: int, facts: Mapping[str, Any]) -> None:
        """Write a checkpoint; every process must call it. CheckpointError in all of them if it cannot be written."""
        moments = get_optimizer_state_dict(self._spread, self.optimizer.optimizer, options=self._whole).get("state", {})
        states = {
            "model": self._weights(),
            "optimizer": {
                f"{name}/{key}": value.clone() for name, own in moments.items() for key, value in own.items()
            },
        }
        if self.average is not None:
            with self.average.in_place():
                states["ema"] = self._weights()
        failure = ""
        if self.fabric.is_global_zero:
            try:
                storage.save(folder, step, states, facts)
            except CheckpointError as error:
                failure = str(error)
        if any(runtime.agree(self.fabric, [float(bool(failure))])):
            raise CheckpointError(failure or "the main process could not save")

    def restore(self, folder: Path, facts: Mapping[str, Any], say: Callable[[str], None]) -> int:
        """Go back to the newest usable checkpoint; returns its step, 0 if there is none.

        UserError if it was written by a run with other facts.
        """
        found = storage.newest(folder, say)
        self.fabric.barrier()
        if found is None:
            return 0
        checkpoint, states = found
        manifest = completed(checkpoint.facts)
        for name, value in completed(facts).items():
            if manifest.get(name) != json.loads(json.dumps(value)):
                raise UserError(
                    f"{name}: is not what the run in {folder} was started with, which is {manifest.get(name)}; "
                    "overwrite=true starts anew"
                )
        if self.average is not None:
            set_model_state_dict(self._spread, states["ema"], options=self._whole)
            self.average.take()
        set_model_state_dict(self._spread, states["model"], options=self._whole)
        optimizer = self.optimizer.optimizer
        # The optimiser's hyperparameters stay those of the recipe. Offloaded, they would be in the main process alone.
        groups = get_optimizer_state_dict(self._spread, optimizer)["param_groups"]
        moments: dict[str, dict[str, Tensor]] = {}
        for name, value in states["optimizer"].items():
            parameter, key = name.rsplit("/", 1)
            moments.setdefault(parameter, {})[key] = value
        both = {"state": moments, "param_groups": groups}
        set_optimizer_state_dict(self._spread, optimizer, both, options=self._whole)
        if self.fabric.is_global_zero:
            storage.set_aside_after(folder, manifest["step"])
        return manifest["step"]

    def _weights(self) -> dict[str, Tensor]:
        """The weights by name, each whole. Copies: torch may give the weights themselves, or views of one storage."""
        return {
            name: tensor.clone() for name, tensor in get_model_state_dict(self._spread, options=self._whole).items()
        }
