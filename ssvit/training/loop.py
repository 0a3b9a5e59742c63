"""The training loop, the same for pre-training and fine-tuning, and what keeps a long run safe.

Batches, learning rate and every random choice are functions of the step, so the weights, the optimiser's state and
the step are all that a checkpoint needs: a run that is killed anywhere and started again ends with the same bits.
"""

import contextlib
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning_fabric import Fabric

from ssvit.data.loader import Loader
from ssvit.evaluation.base import Evaluator
from ssvit.objectives.base import Objective
from ssvit.options import UserError
from ssvit.randomness import key
from ssvit.training import checkpoint, engine
from ssvit.training.average import Average
from ssvit.training.journal import Journal
from ssvit.training.recipe import Recipe, parameter_groups

BAD_STEPS = 5  # in a row, after which going on would only waste time


class Stopped(UserError):
    """The run was asked to stop by a signal; everything is saved. `status` is the shell's for that signal."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}; saved, the same command goes on")
        self.status = 128 + signum


class Stop:
    """Turns the first SIGTERM or Ctrl-C into a request that the loop reads between steps; a second one acts at once."""

    def __init__(self) -> None:
        self.signum = 0

    def _request(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        signal.signal(signum, signal.SIG_DFL if signum == signal.SIGTERM else signal.default_int_handler)

    @classmethod
    @contextlib.contextmanager
    def listening(cls) -> Iterator["Stop"]:
        """Listen while the block runs, then put the former handlers back."""
        stop = cls()
        former = {signum: signal.signal(signum, stop._request) for signum in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield stop
        finally:
            for signum, handler in former.items():
                signal.signal(signum, handler)


def agree(fabric: Fabric, values: list[float]) -> list[float]:
    """The mean of each value over all processes: the same list in every one, NaN where any process has NaN."""
    if fabric.world_size == 1:
        return values
    return fabric.all_reduce(torch.tensor(values, dtype=torch.float64), reduce_op="mean").tolist()


def train(
    fabric: Fabric,
    objective: Objective,
    loader: Loader,
    recipe: Recipe,
    folder: Path,
    *,
    evaluators: Mapping[str, Evaluator],
    facts: Mapping[str, Any],
) -> bool:
    """Train `objective` in a run folder until recipe.steps updates are complete, going on from what is there.

    facts: what the run is bound to, stored in each checkpoint; a checkpoint with other facts is refused. Returns
    False if the run was finished already. Raises Stopped after SIGTERM or Ctrl-C, UserError where it cannot go on.
    """
    say = print if fabric.is_global_zero else _ignore
    found = checkpoint.newest(folder, say)
    fabric.barrier()
    first = 0 if found is None else found[0]["step"]
    optimizer = torch.optim.AdamW(
        parameter_groups(objective.named_parameters(), recipe.weight_decay),
        lr=recipe.lr,
        betas=tuple(recipe.betas),
        fused=True,
    )
    compiled = torch.compile(objective) if engine.compiles(recipe, fabric.device) else objective
    model, optimizer = fabric.setup(compiled, optimizer)
    # What Fabric wraps (the module as the strategy spreads it, and torch's optimiser) is what a checkpoint holds.
    spread = model._forward_module, optimizer.optimizer
    average = Average(objective, recipe.ema) if recipe.ema else None
    averaged = average.in_place if average is not None else contextlib.nullcontext
    if found is not None:
        manifest, states = found
        for name, value in facts.items():
            if manifest.get(name) != value:
                raise UserError(f"{name}: is not what the run in {folder} was started with; overwrite=true starts anew")
        if average is not None:
            checkpoint.restore_weights(spread[0], states["ema"])
            average.take()
        checkpoint.restore(*spread, states)
        if fabric.is_global_zero:
            checkpoint.set_aside_after(folder, first)
    if first == recipe.steps:
        say(f"{folder} is finished ({first} steps); overwrite=true starts it anew, name=… starts another")
        return False
    if first:
        say(f"going on in {folder} after step {first}")

    journal = Journal(folder, recipe, first_step=first, speaks=fabric.is_global_zero)

    def evaluate(step: int) -> None:
        began = time.perf_counter()
        objective.eval()
        with averaged(), engine.gathered(spread[0]), torch.no_grad(), fabric.autocast():
            metrics = {name: evaluator.measure(objective) for name, evaluator in evaluators.items()}
            row = {f"{name}/{key}": value for name, group in metrics.items() for key, value in group.items()}
            journal.record(step, row)
            for name, evaluator in evaluators.items():
                if fabric.is_global_zero:
                    for title, figure in evaluator.draw(objective, journal.history_of(name)).items():
                        journal.show(step, title, figure)
                if step == recipe.steps:
                    for line in evaluator.explain(metrics[name]):
                        journal.say(f"{name.replace('_', '-')}: {line}")
        objective.train()
        journal.pause(time.perf_counter() - began)

    def save(step: int) -> None:
        began = time.perf_counter()
        states = checkpoint.gather(*spread)
        if average is not None:
            with averaged():
                states["ema"] = checkpoint.gather_weights(spread[0])
        failure = ""
        if fabric.is_global_zero:
            try:
                checkpoint.save(folder, step, states, facts)
            except checkpoint.CheckpointError as error:
                failure = str(error)
        if any(agree(fabric, [float(bool(failure))])):
            raise checkpoint.CheckpointError(failure or "the main process could not save")
        journal.pause(time.perf_counter() - began)

    told: set[str] = set()

    def tell_unreadable() -> None:
        for path in sorted(loader.unreadable.keys() - told):
            journal.say(f"unreadable, another image takes its place: {path}: {loader.unreadable[path]}")
        told.update(loader.unreadable)

    bad = 0
    with Stop.listening() as stop, contextlib.closing(journal):
        if first == 0:
            evaluate(0)
        batches = loader.batches(first, recipe.steps)
        for step in range(first, recipe.steps):
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate(step)
            outputs: dict[str, float] = {}
            for micro in range(recipe.accumulate):
                batch = next(batches)
                # Dropout and stochastic depth draw from torch's own generator: tied to the step, like the rest.
                torch.manual_seed(key(recipe.seed, f"dropout {step} {micro} {fabric.global_rank}"))
                draw = _to(fabric.device, objective.draw(batch.slots, seed=recipe.seed))
                images, labels = _to(fabric.device, (batch.images, batch.labels))
                with fabric.no_backward_sync(model, enabled=micro + 1 < recipe.accumulate):
                    result = model(images, labels, draw)
                    fabric.backward(result["loss"] / recipe.accumulate)
                for name, value in result.items():
                    outputs[name] = outputs.get(name, 0.0) + value.item() / recipe.accumulate
            norm = fabric.clip_gradients(
                model, optimizer, max_norm=recipe.clip or math.inf, error_if_nonfinite=False
            ).item()
            *values, norm, asked = agree(fabric, [*outputs.values(), norm, float(stop.signum)])
            outputs = dict(zip(outputs, values, strict=True))
            if math.isfinite(outputs["loss"]) and math.isfinite(norm):
                optimizer.step()
                bad = 0
                if average is not None:
                    average.follow()
            else:
                bad += 1
                journal.say(f"step {step + 1}: skipped, the loss is {outputs['loss']:g}, the gradient's norm {norm:g}")
            optimizer.zero_grad(set_to_none=True)
            complete = step + 1
            shown = {**outputs, "lr": recipe.learning_rate(step), "gradient_norm": norm}
            journal.train(complete, shown, waited=loader.waited)
            tell_unreadable()
            if bad == BAD_STEPS:
                raise UserError(
                    f"the loss or gradient was not finite {BAD_STEPS} steps in a row, up to step {complete}: the run "
                    f"stops; a lower recipe.lr than {recipe.lr:g} or recipe.precision=32-true may help"
                )
            if recipe.due(complete, recipe.evaluate_every):
                evaluate(complete)
            if recipe.due(complete, recipe.save_every) or asked:
                save(complete)
            if asked and complete < recipe.steps:
                raise Stopped(stop.signum or signal.SIGTERM, complete)
    return True


def _ignore(text: str) -> None:
    """What a process says that is not the main one."""


def _to(device: torch.device, values: Sequence[Any]) -> Any:
    """A tuple of tensors, or None, on a device."""
    moved = [value if value is None else value.to(device, non_blocking=True) for value in values]
    return type(values)(*moved) if hasattr(values, "_fields") else tuple(moved)
