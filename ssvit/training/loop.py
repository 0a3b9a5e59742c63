"""Train a model; pre-training and fine-tuning share this loop.

Batches, schedules and all random choices are functions of the step. Weights, optimiser state and step are therefore the
whole state of a run: a run that is killed at any point and started again computes bit-identical weights.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import torch
from lightning_fabric import Fabric
from torch import Tensor

from ssvit import atomic_io
from ssvit.checkpoints import storage
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.run_folder import rows
from ssvit.data.batch import Batch
from ssvit.data.loader import Loader
from ssvit.evaluation.panels.base import Evaluation, Evaluator, with_metrics
from ssvit.evaluation.processes import Interrupted, settle
from ssvit.objectives.base import Objective
from ssvit.options import UserError, print_lines
from ssvit.processes import is_main_process
from ssvit.randomness import key
from ssvit.training import best, runtime
from ssvit.training.estimate import estimate
from ssvit.training.loggers.base import Logger
from ssvit.training.metrics_log import MetricsLog
from ssvit.training.readings import Numbers, Readings
from ssvit.training.recipe import Recipe
from ssvit.training.state import State


class Stopped(UserError):
    """A signal stopped the run, and its state is saved. `status` is the shell's exit status for the signal."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(
            f"stopped by {signal.Signals(signum).name} after step {step}; saved, and goes on if started again"
        )
        self.status = 128 + signum


class Stop:
    """Turn the first SIGTERM or Ctrl-C into a request to stop, checked between steps; a second one stops at once."""

    def __init__(self) -> None:
        self.signum = 0
        self._process, self._interruptible = os.getpid(), False

    def _request(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        if os.getpid() == self._process and is_main_process():
            line = "stops after this step and saves; the same again stops at once\n"
            with contextlib.suppress(OSError):  # stdout of a notebook has no descriptor
                # `print` is not reentrant; on a terminal the message is printed below the progress bar.
                os.write(sys.stdout.fileno(), f"{chr(10) * sys.stdout.isatty()}{line}".encode())
        signal.signal(signum, signal.SIG_DFL if signum == signal.SIGTERM else signal.default_int_handler)
        if self._interruptible and os.getpid() == self._process:  # not in a forked worker
            self._interruptible = False  # `Interrupted` must be raised only once
            raise Interrupted

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise Interrupted in all processes if any of them receives a request to stop.

        The block must not change state that is saved. Within it, processes exchange results only through
        `evaluation.processes.gather`.
        """
        if settle(stops=bool(self.signum)):
            raise Interrupted
        try:
            try:
                self._interruptible = True
                if not self.signum:
                    yield
            finally:
                self._interruptible = False
        except Interrupted:
            pass
        if settle(stops=bool(self.signum)):
            raise Interrupted

    def heeded(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches; raise Interrupted on a request to stop, also while waiting for a batch."""
        while True:
            with self.interruptible():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def __enter__(self) -> "Stop":
        self._former = {signum: signal.signal(signum, self._request) for signum in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._former.items():
            signal.signal(signum, handler)


@runtime.together()
def train(
    fabric: Fabric,
    objective: Objective,
    loader: Loader,
    recipe: Recipe,
    folder: Path,
    *,
    evaluators: Mapping[str, Evaluator],
    run_identity: Mapping[str, object],
    estimated: bool = False,
    loggers: Sequence[Logger] = (),
) -> bool:
    """Train an objective in a run folder until `recipe.steps` updates are complete, from its newest checkpoint if any.

    Args:
        fabric: The processes and devices.
        objective: The objective with its initial weights.
        loader: The training batches.
        recipe: The hyperparameters.
        folder: The run folder.
        evaluators: Evaluators and probes by name.
        run_identity: Entries of each checkpoint's manifest that a continuation must match.
        estimated: Whether to print an estimate of time and memory first.
        loggers: Destinations of metrics in addition to metrics.jsonl, used by the main process only.

    Returns:
        Whether the run was trained; False if it had already finished.

    Raises:
        Stopped: The process received SIGTERM or Ctrl-C; the state is saved.
        UserError: The run cannot continue, for example with another identity or out of memory.
        PeerGone: Another process of the run has ended or does not respond.
    """
    say = print_lines if fabric.is_global_zero else lambda text: None
    state = State(fabric, objective, recipe)
    first = state.restore(folder, run_identity, say)
    history = [row for row in rows(folder) if row["step"] <= first] if first and fabric.is_global_zero else []
    chosen = best.find(history, recipe)
    # A checkpoint without a row of evaluation (a row without a loss) means that the evaluation was interrupted.
    evaluated = any(row["step"] == first and "train/loss" not in row for row in history)
    due = bool(first and fabric.is_global_zero and _due(evaluators, recipe, first))
    finished, pending = map(bool, runtime.agree(fabric, [best.ends(chosen, recipe), due and not evaluated]))
    finished = (finished or first == recipe.steps) and not pending
    if fabric.is_global_zero:  # finish the work of an interrupted run
        if finished:
            storage.merge(Checkpoint.open(folder))
        if chosen and not (finished and chosen.is_noise):
            best.keep(folder, chosen.step)
    if finished:
        say(f"{folder} is finished ({first} steps); overwrite=true starts it anew, name=… starts another")
        return False
    weights = sum(parameter.numel() for parameter in objective.encoder.parameters())
    partly = ""
    if not all(parameter.requires_grad for parameter in objective.encoder.parameters()):
        count = sum(parameter.numel() for parameter in objective.parameters() if parameter.requires_grad)
        partly = f" ({count:,} weights are trained)"
    say(
        f"{folder}: {f'goes on after step {first}' if first else 'starts'}; {weights / 1e6:.2f} million weights in the "
        f"encoder{partly}, {len(loader.source)} images, {fabric.world_size} x {fabric.device.type}, {recipe.backend}"
    )
    if recipe.optimizer == "muon" and not any(group["matrices"] for group in state.optimizer.param_groups):
        say("recipe.optimizer=muon: no weight of a Transformer block is trained, so AdamW updates all weights")
    log = MetricsLog(folder, recipe, first_step=first, is_main=fabric.is_global_zero, loggers=loggers)
    readings = Readings(state, loader, log)
    with Stop() as stop, contextlib.closing(log):
        if first == 0 and (prepared := state.prepare(loader)):
            log.say(prepared)
        if estimated:
            log.say(estimate(state, loader, evaluators, first=first).line)
        batches: Iterator[Batch] = loader.batches(first, recipe.steps)
        if fabric.world_size == 1:  # multiple processes agree on the last step instead
            batches = stop.heeded(batches)
        for complete in range(first + (first > 0 and not pending), recipe.steps + 1):
            step, stopping = complete - 1, False
            is_trained = complete > first  # otherwise the restored step only has to be evaluated
            if is_trained:
                try:
                    readings.add(step, update(state, batches, step, stop))
                except Interrupted:
                    readings.read(every=True)
                    state.take_back()  # discards micro-batches of the incomplete update
                    if step > first and not recipe.due(step, recipe.save_every):
                        state.save(folder, step, run_identity)
                    raise Stopped(stop.signum, step) from None
                except torch.OutOfMemoryError:
                    raise UserError(
                        f"recipe.accumulate={recipe.accumulate}: {fabric.device} is out of memory; "
                        "a larger one makes smaller micro-batches of the same batch"
                    ) from None
                due = bool(_due(evaluators, recipe, complete)) or recipe.due(complete, recipe.log_every)
                stopping = readings.read(every=due or recipe.due(complete, recipe.save_every))
                if fabric.world_size == 1:
                    stopping = bool(stop.signum)
                if stopping:
                    readings.read(every=True)
            try:
                is_best, ended = _evaluate(state, evaluators, log, complete, stop)
            except Interrupted:  # repeated when the run is started again
                is_best, ended, stopping = False, False, True
            if ended:
                log.finish()
            early = ended and complete < recipe.steps
            saves = early or (is_trained and (recipe.due(complete, recipe.save_every) or stopping or ended))
            with log.paused() if saves or is_best else contextlib.nullcontext():
                if saves:
                    state.save(folder, complete, run_identity, wait=stopping or is_best, ended=early)
                if is_best and fabric.is_global_zero:
                    best.keep(folder, complete)
            if ended:
                break
            if stopping:
                raise Stopped(stop.signum or signal.SIGTERM, complete)
    return True


def update(state: State, batches: Iterator[Batch], step: int, stop: Stop | None = None) -> Numbers:
    """Run one optimiser update without synchronising host and device.

    Args:
        state: The training state.
        batches: Iterator over micro-batches.
        step: The step, counted from 0.
        stop: Requests to stop, which are averaged over the processes with the metrics.

    Returns:
        The metrics of the update, on the device.
    """
    fabric, recipe, scheduled = state.fabric, state.recipe, state.schedule(step)
    if recipe.sam:
        micro_batches = [next(batches) for _ in range(recipe.accumulate)]
        logged, outputs = accumulate(state, iter(micro_batches), step, scheduled)
        with state.ascended():
            accumulate(state, iter(micro_batches), step, scheduled)
    else:
        logged, outputs = accumulate(state, batches, step, scheduled)
    norm = runtime.clip(fabric, state.model, state.optimizer, recipe.clip)
    own = [*logged.values(), norm.double(), torch.full_like(norm, stop.signum if stop else 0, dtype=torch.float64)]
    # All processes decide from the same numbers: the mean is not finite if the loss of any process is not.
    numbers = Numbers(tuple(logged), runtime.mean(fabric, torch.stack(own)))
    state.apply(outputs, scheduled, numbers.applied)
    return numbers


def accumulate(
    state: State, batches: Iterator[Batch], step: int, scheduled: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Accumulate the gradients of one update over its micro-batches.

    Args:
        state: The training state.
        batches: Iterator over micro-batches.
        step: The step, counted from 0.
        scheduled: Values of the objective's schedules at this step.

    Returns:
        The means over micro-batches of the objective's scalars, to be logged, and of its tensors, for `after_step`.
    """
    fabric, recipe = state.fabric, state.recipe
    logged: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    for micro in range(recipe.accumulate):
        batch = next(batches).to(fabric.device)._replace(seed=recipe.seed)
        # Dropout samples from torch's global generator, which is seeded by the step for reproducibility.
        torch.manual_seed(key(recipe.seed, f"dropout {step} {micro} {fabric.global_rank}"))
        noise = fabric.to_device(state.sample(batch.slots, seed=recipe.seed))
        with fabric.no_backward_sync(state.model, enabled=micro + 1 < recipe.accumulate):
            result = state.model(batch, noise, scheduled)
            fabric.backward(result["loss"] / recipe.accumulate)
        for name, value in result.items():
            means, part = (logged, value.detach().double()) if value.ndim == 0 else (outputs, value.detach())
            means[name] = means.get(name, 0.0) + part / recipe.accumulate
    return logged, outputs


def _due(evaluators: Mapping[str, Evaluator], recipe: Recipe, step: int) -> dict[str, Evaluator]:
    """Return the evaluators that are due after `step` updates."""
    return {name: one for name, one in evaluators.items() if one.due(step, recipe.steps, recipe.evaluate_every)}


def _evaluate(
    state: State, evaluators: Mapping[str, Evaluator], log: MetricsLog, step: int, stop: Stop
) -> tuple[bool, bool]:
    """Run the evaluators that are due, or all at the end of the run, where their lines and tables are also output.

    Returns whether this step is the best so far, and whether the run ends with it. Raises Interrupted on a request to
    stop; then nothing is recorded.
    """
    recipe, found = state.recipe, None
    row: dict[str, float] = {}

    def measure(evaluators: Mapping[str, Evaluator]) -> dict[str, Evaluation]:
        evaluations: dict[str, Evaluation] = {}
        for name, evaluator in evaluators.items():
            history = with_metrics([*log.history_of(name), {"step": step}], row) if log.is_main else None
            with log.moving(f"evaluating: {name.replace('_', ' ')}"), stop.interruptible():
                evaluations[name] = evaluator(objective, history)
            row.update({f"{name}/{key}": value for key, value in evaluations[name].metrics.items()})
        return evaluations

    due = _due(evaluators, recipe, step)
    if not due:
        return False, step == recipe.steps
    with log.paused(), state.evaluating() as objective:
        evaluations = measure(due)
        if log.is_main:
            found = best.find(with_metrics([*log.history, {"step": step}], row), recipe)
        flags = [found is not None and found.step == step, best.ends(found, recipe)]
        if found is not None and found.is_noise and (step == recipe.steps or flags[1]):
            flags[0] = False
            atomic_io.remove(log.folder / best.NAME)
        is_best, early = map(bool, runtime.agree(state.fabric, [float(flag) for flag in flags]))
        ended = early or step == recipe.steps
        if ended:
            others = {name: one for name, one in evaluators.items() if name not in due}
            evaluations |= measure(others)
        log.record(step, row)
        if not log.is_main:
            return is_best, ended
        for name, evaluation in evaluations.items():
            for line in evaluation.warnings:
                log.say(f"step {step}, {name.replace('_', '-')}: {line}")
            for title, figure in evaluation.figures.items():
                log.show(step, title, figure)
            if ended:
                for line in evaluation.lines:
                    log.say(f"{name.replace('_', '-')}: {line}")
                for file, text in evaluation.tables.items():
                    log.write(file, text)
        if not ended:
            return is_best, ended
        if early:
            log.say(
                f"ended early (recipe.patience={recipe.patience}): {found}, no better in {recipe.patience} evaluations"
            )
        elif found is not None and found.step < step:
            noise = f"no best checkpoint is kept: {found}, not significantly better than any other evaluation"
            log.say(noise if found.is_noise else f"{found}: checkpoint={log.folder / best.NAME}")
        if pictures := sorted(log.folder.glob("*.png")):
            log.say(f"pictures: {', '.join(map(str, pictures))}")
        return is_best, ended
