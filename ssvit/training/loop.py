"""Train a model; pre-training and fine-tuning share this loop.

Batches, schedules and all random choices are functions of the step. The state of a run therefore consists of weights,
optimiser state and step: a run that is killed at any point and started again computes bit-identical weights.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType

import torch
from torch import Tensor
from tqdm import tqdm

from ssvit.checkpoints import storage
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.run_folder import rows
from ssvit.config.declaration import Figures
from ssvit.data.batch import Batch
from ssvit.data.loader import Loader
from ssvit.engine import atomic_io
from ssvit.engine.clock import clock
from ssvit.engine.processes import is_main_process
from ssvit.engine.progress import working
from ssvit.engine.randomness import key
from ssvit.errors import UserError, print_lines
from ssvit.evaluation.evaluators.base import Evaluation, Evaluator, with_metrics
from ssvit.evaluation.processes import Interrupted, end_evaluation
from ssvit.objectives.base import Objective
from ssvit.training import best, runtime
from ssvit.training.estimate import Estimate
from ssvit.training.loggers.base import Logger
from ssvit.training.metrics_log import DelayedMetrics, MetricsLog, Numbers
from ssvit.training.recipe import Recipe
from ssvit.training.runtime import Processes
from ssvit.training.state import State


class Stopped(UserError):
    """A signal stopped the run, and its state is saved. `status` is the shell's exit status for the signal."""

    def __init__(self, signum: int, step: int) -> None:
        name = signal.Signals(signum).name
        continued = "the state is saved, and the same command without overwrite=true continues"
        super().__init__(f"stopped by {name} after step {step}; {continued}")
        self.status = 128 + signum


class Stop:
    """Turn the first SIGTERM or Ctrl-C into a request to stop, checked between steps; a second one stops at once."""

    def __init__(self) -> None:
        self.signum = 0
        self._process, self._interruptible = os.getpid(), False

    def _request(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        if os.getpid() == self._process and is_main_process():
            line = "saving after this step, then stopping; a second signal ends the process immediately\n"
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
        `evaluation.processes.all_gather_results`.
        """
        if end_evaluation(is_interrupted=bool(self.signum)):
            raise Interrupted
        with contextlib.suppress(Interrupted):
            try:
                self._interruptible = True
                if not self.signum:
                    yield
            finally:
                self._interruptible = False
        if end_evaluation(is_interrupted=bool(self.signum)):
            raise Interrupted

    def interrupting(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches; raise Interrupted on a request to stop, also while waiting for a batch."""
        while True:
            with self.interruptible():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def __enter__(self) -> "Stop":
        is_main = threading.current_thread() is threading.main_thread()  # others cannot receive signals
        signums = (signal.SIGTERM, signal.SIGINT) if is_main else ()
        self._former = {signum: signal.signal(signum, self._request) for signum in signums}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._former.items():
            signal.signal(signum, handler)


@runtime.detect_lost_peers()
def train(
    processes: Processes,
    objective: Objective,
    loader: Loader,
    recipe: Recipe,
    folder: Path,
    *,
    evaluators: Mapping[str, Evaluator],
    run_identity: Mapping[str, object],
    loggers: Sequence[Logger] = (),
    figures: Figures = "end",
    announced: Callable[..., Estimate] | None = None,
    costs: Mapping[str, float] = MappingProxyType({}),
) -> bool:
    """Train an objective in a run folder until `recipe.steps` updates are complete, from its newest checkpoint if any.

    Args:
        processes: The processes.
        objective: The objective with its initial weights.
        loader: The training batches.
        recipe: The hyperparameters.
        folder: The run folder.
        evaluators: Evaluators and probes by name.
        run_identity: Entries of each checkpoint's manifest that a continuation must match.
        loggers: Destinations of metrics in addition to metrics.jsonl, used by the main process only.
        figures: When figures are drawn.
        announced: `estimate` with its options, whose result is printed before the first step; None for no estimate.
        costs: Numbers that the first row of metrics.jsonl of a new run contains.

    Returns:
        Whether the run was trained; False if it had already finished.

    Raises:
        Stopped: The process received SIGTERM or Ctrl-C; the state is saved.
        UserError: The run cannot continue, for example with another identity or out of memory.
        PeerGone: Another process of the run has ended or does not respond.
    """
    report = print_lines if processes.is_main else lambda text: None
    state = State(processes, objective, recipe)
    first = state.restore(folder, run_identity, loader.source, report)
    history = [row for row in rows(folder) if row["step"] <= first] if first and processes.is_main else []
    # A checkpoint without a row of evaluation means that the evaluation was interrupted. Rows of former versions have a
    # loss without seconds.
    evaluated = any(row["step"] == first and row.keys().isdisjoint({"seconds", "train/loss"}) for row in history)
    due = bool(first and processes.is_main and _due(evaluators, recipe, first))
    pending = processes.any_process(due and not evaluated)
    finished = first == recipe.steps and not pending
    if processes.is_main:  # finish the work of an interrupted run
        if finished:
            storage.merge(Checkpoint.open(folder))
        top = best.find_best(history, recipe)
        if top and not (finished and top.is_noise):
            best.link_checkpoint(folder, top.step)
    if finished:
        report(f"{folder} is finished ({first} steps); overwrite=true restarts it, name=… starts another run")
        return False
    weights = sum(parameter.numel() for parameter in objective.encoder.parameters())
    report(
        f"{folder}: {f'continues after step {first}' if first else 'starts'}; encoder with {weights / 1e6:.2f} million "
        f"weights, {len(loader.source)} images, {processes.world} x {processes.device.type}, {recipe.backend}"
    )
    if recipe.optimizer == "muon" and not any(group.get("matrices") for group in state.optimizer.param_groups):
        report("recipe.optimizer=muon: no matrix of a Transformer block is trained, so AdamW updates all weights")
    began = clock(processes.device)
    if announced and processes.world == 1:
        report(f"estimated: {announced(state, loader, evaluators, first_step=first).time}")
    log = MetricsLog(
        folder, recipe, first_step=first, is_main=processes.is_main, loggers=loggers, figures=figures,
        clock=partial(clock, processes.device),
    )  # fmt: skip
    delayed = DelayedMetrics(state, loader, log)
    with Stop() as stop, contextlib.closing(log), contextlib.ExitStack() as stack:
        if first == 0:
            if costs:
                log.record(0, costs)
            with log.paused(in_seconds=True):
                line = state.prepare(loader)
            if line:
                log.print_line(line)
        read = loader.batches(first, recipe.steps)
        stack.push(contextlib.closing(read))  # all CPU time of its worker processes counts when they have ended
        batches: Iterator[Batch] = read
        if processes.world == 1:  # multiple processes agree on the last step instead
            batches = stop.interrupting(batches)
        for complete in range(first + (first > 0 and not pending), recipe.steps + 1):
            step, stopping = complete - 1, False
            is_trained = complete > first  # otherwise the restored step only has to be evaluated
            if is_trained:
                try:
                    delayed.add(step, update(state, batches, step, stop))
                except Interrupted:
                    delayed.read(every=True)
                    state.discard_update()  # discards micro-batches of the incomplete update
                    if step > first and not recipe.due(step, recipe.save_every):
                        log.record_seconds(step)
                        state.save(folder, step, run_identity, shown=loader.take_fingerprints())
                    raise Stopped(stop.signum, step) from None
                except torch.OutOfMemoryError:
                    raise UserError(
                        f"recipe.accumulate={recipe.accumulate}: {processes.device} is out of memory; a larger value "
                        "divides the batch into smaller micro-batches"
                    ) from None
                due = bool(_due(evaluators, recipe, complete)) or recipe.due(complete, recipe.log_every)
                stopping = delayed.read(every=due or recipe.due(complete, recipe.save_every))
                if processes.world == 1:
                    stopping = bool(stop.signum)
                if stopping:
                    delayed.read(every=True)
            ended = complete == recipe.steps
            try:
                is_best = _evaluate(state, evaluators, log, complete, stop)
            except Interrupted:  # repeated when the run is started again
                is_best, ended, stopping = False, False, True
            if ended:
                log.finish()
            saves = is_trained and (recipe.due(complete, recipe.save_every) or stopping or is_best)
            if saves:
                log.record_seconds(complete)
            with log.paused() if saves or is_best else contextlib.nullcontext():
                if saves:
                    shown = loader.take_fingerprints()
                    state.save(folder, complete, run_identity, shown=shown, wait=stopping or is_best)
                if is_best and processes.is_main:
                    best.link_checkpoint(folder, complete)
            if ended:  # a signal may have arrived during the last evaluation and its figures
                stopping = processes.any_process(bool(stop.signum))
            if stopping:
                raise Stopped(stop.signum or signal.SIGTERM, complete)
    kind = "CPU time" if processes.device.type == "cpu" else "time"
    each = f" in each of {processes.world} processes" if processes.world > 1 else ""
    report(f"{kind} of this run: {tqdm.format_interval(clock(processes.device) - began)}{each}")
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
    processes, recipe, scheduled = state.processes, state.recipe, state.schedule(step)
    if recipe.sam:
        micro_batches = [next(batches) for _ in range(recipe.accumulate)]
        logged, outputs = accumulate(state, iter(micro_batches), step, scheduled)
        with state.ascended():
            accumulate(state, iter(micro_batches), step, scheduled)
    else:
        logged, outputs = accumulate(state, batches, step, scheduled)
    norm = runtime.clip(state.optimizer, recipe.clip)
    values = [*logged.values(), norm.double(), torch.full_like(norm, stop.signum if stop else 0, dtype=torch.float64)]
    # All processes decide from the same numbers: the mean is not finite if the loss of any process is not.
    numbers = Numbers(tuple(logged), processes.mean(torch.stack(values)))
    state.apply(step, outputs, scheduled, numbers.applied)
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
    processes, recipe = state.processes, state.recipe
    logged: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    for micro in range(recipe.accumulate):
        batch = next(batches).to(processes.device)._replace(seed=recipe.seed)
        # Dropout samples from torch's global generator, which is seeded by the step for reproducibility.
        torch.manual_seed(key(recipe.seed, f"dropout {step} {micro} {processes.rank}"))
        noise = state.sample(batch.slots, seed=recipe.seed)
        with processes.accumulating(state.model, more=micro + 1 < recipe.accumulate):
            with processes.computing():
                result = state.model(batch, noise, scheduled)
            (result["loss"] / recipe.accumulate).backward()
        for name, value in result.items():
            means, part = (logged, value.detach().double()) if value.ndim == 0 else (outputs, value.detach())
            means[name] = means.get(name, 0.0) + part / recipe.accumulate
    state.freeze()
    return logged, outputs


def _due(evaluators: Mapping[str, Evaluator], recipe: Recipe, step: int) -> dict[str, Evaluator]:
    """Return the evaluators that are due after `step` updates."""
    interval = recipe.evaluate_every
    return {name: evaluator for name, evaluator in evaluators.items() if evaluator.due(step, recipe.steps, interval)}


def _evaluate(state: State, evaluators: Mapping[str, Evaluator], log: MetricsLog, step: int, stop: Stop) -> bool:
    """Run the evaluators that are due. At the end of the run, these are all, and their lines and tables are output.

    Args:
        state: The training state.
        evaluators: Evaluators by name.
        log: Log of the run.
        step: Number of complete updates.
        stop: Requests to stop.

    Returns:
        Whether the checkpoint of this step is to be kept as the best one.

    Raises:
        Interrupted: A process received a request to stop; nothing is recorded.
    """
    recipe, top = state.recipe, None
    ended = step == recipe.steps
    evaluations: dict[str, Evaluation] = {}
    row: dict[str, float] = {}
    due = _due(evaluators, recipe, step)
    if not due:
        return False
    with log.paused(), state.evaluating() as objective, working(f"evaluating after step {step}", log.print_line):
        for name, evaluator in due.items():
            history = with_metrics([*log.history_of(name), {"step": step}], row) if log.is_main else None
            log.describe(f"evaluating: {name.replace('_', ' ')}")
            with stop.interruptible():
                evaluations[name] = evaluator(objective, history)
            row.update({f"{name}/{key}": value for key, value in evaluations[name].metrics.items()})
        if log.is_main:
            top = best.find_best(with_metrics([*log.history, {"step": step}], row), recipe)
        if ended and top is not None and top.is_noise:
            atomic_io.remove(log.folder / best.NAME)
        is_best = top is not None and top.step == step and not (ended and top.is_noise)
        is_best = state.processes.any_process(is_best)
        log.record(step, row)
        if log.is_main:
            _report(log, step, evaluations, ended=ended)
        if log.is_main and ended:
            if top is not None and top.step < step:
                log.print_line(top.conclusion(log.folder))
            if drawn := sorted(path.name for path in log.folder.glob("*.png")):
                log.print_line(f"figures in {log.folder}: {', '.join(drawn)}")
    return is_best


def _report(log: MetricsLog, step: int, evaluations: Mapping[str, Evaluation], *, ended: bool) -> None:
    """Output the warnings and figures of evaluations and, at the end of the run, their lines and tables."""
    for name, evaluation in evaluations.items():
        for line in evaluation.warnings:
            log.print_line(f"step {step}, {name.replace('_', '-')}: {line}")
        if log.figures == "each" or (ended and log.figures == "end"):
            for title, figure in evaluation.figures.items():
                if figure.is_informative:
                    log.show(step, title, figure)
        for line in evaluation.lines if ended else ():
            log.print_line(f"{name.replace('_', '-')}: {line}")
        for file, text in evaluation.tables.items() if ended else ():
            log.write(file, text)
