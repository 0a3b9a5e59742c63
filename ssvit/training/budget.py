"""Turn a budget of CPU time into the schedule of a run (budget=10min). No torch."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ssvit.checkpoints.run_folder import RunFolder
from ssvit.config.composed import Config
from ssvit.config.dotted import at
from ssvit.errors import OptionError, print_lines, typed

if TYPE_CHECKING:
    from ssvit.training.estimate import Estimate
    from ssvit.training.options import Training
    from ssvit.training.session import Session

SHARE = 0.1  # of the budget, at most, for the evaluations of a run during and after training
EVALUATIONS = 10  # of a run, at most
_FEWEST = 200  # images of an evaluation
# Options that a budget determines unless they are typed.
_PROBING = ("probing.train_images", "probing.test_images")


def steps_within(seconds: float, *, step: float, preparation: float = 0.0) -> int:
    """Return the number of updates within a time.

    Args:
        seconds: The time in seconds.
        step: Seconds of an update.
        preparation: Seconds before the first update.
    """
    return max(0, round((seconds - preparation) / step))


def schedule(steps: int, *, evaluations: int = EVALUATIONS, warmup: int = 20) -> dict[str, int]:
    """Return the options of a recipe that depend on its number of steps.

    Args:
        steps: Number of steps.
        evaluations: Number of evaluations and of checkpoints after the first step.
        warmup: The warm-up is the number of steps divided by this number.
    """
    every = math.ceil(steps / evaluations)
    options = {"steps": steps, "warmup": steps // warmup, "evaluate_every": every, "save_every": every}
    return {**options, "log_every": max(1, steps // 100)}


def session_of(config: Config, folder: RunFolder, stage: str) -> Callable[[], "Session"]:
    """Return a function that builds the session of a command when it is first called, which imports torch."""

    @cache
    def session() -> "Session":
        from ssvit.training.session import Session

        return Session(config.options, folder.path, stage=stage)

    return session


def check(config: Config) -> None:
    """Raise OptionError if both a budget and the number of steps are typed."""
    if config.options.budget is not None and "recipe.steps" in config.line.typed:
        expected = f"must be null with recipe.steps={config.options.recipe.steps}"
        raise OptionError("budget", config.line.typed.get("budget"), expected)


def planned(config: Config, session: Callable[[], "Session"], folder: RunFolder, **limits: int) -> Config:
    """Return a configuration with the schedule for its budget, if it has one. A run that continues keeps its schedule.

    Args:
        config: The configuration.
        session: Function that returns the session of the run, in which the cost of a step is measured.
        folder: Folder of the run.
        limits: Arguments of `schedule`.

    Raises:
        OptionError: The cost of a step cannot be measured in several processes, or exceeds the budget.
    """
    options: Training = config.options
    if options.budget is None:
        return config
    config = config.changed({"budget": options.budget})  # in seconds, however it was typed
    if not options.overwrite and (stored := folder.started()):  # whose other options are checked later
        names = [f"recipe.{name}" for name in schedule(1)] + [*_PROBING, *_held_out(options)]
        values = {name: at(stored.values, name) for name in names if name not in config.line.typed}
        return config.changed({name: value for name, value in values.items() if value is not None})
    estimate = session().estimate(options)
    if estimate.step is None:
        expected = "requires a single process, in which steps are timed; set recipe.steps instead"
        raise OptionError("budget", typed(options.budget), expected)
    changes = chosen(options, estimate, **limits)
    changes = {name: value for name, value in changes.items() if name not in config.line.typed}
    lines = " ".join(f"{name}={value}" for name, value in changes.items())
    print_lines(f"budget={options.budget:g}s: {estimate.step:.2g} s of CPU time for each step: {lines}")
    return config.changed(changes)


def chosen(options: "Training", estimate: "Estimate", **limits: int) -> dict[str, int]:
    """Return the options for a budget: the schedule, and fewer images of evaluations if two of them take too long.

    Args:
        options: Options of the run.
        estimate: The cost of a step and of an evaluation.
        limits: Arguments of `schedule`.
    """
    assert options.budget is not None
    assert estimate.step is not None
    steps = steps_within(options.budget, step=estimate.step, preparation=estimate.preparation)
    if steps < 1:
        least = estimate.preparation + estimate.step
        raise OptionError("budget", options.budget, f"must be at least the {least:.2g} seconds of one step")
    affordable = SHARE * options.budget - estimate.final
    most = limits.get("evaluations", EVALUATIONS)
    count = min(most, int(affordable / estimate.evaluation) - 1) if estimate.evaluation else most  # one is at the start
    result = schedule(steps, **{**limits, "evaluations": max(1, count)})
    changes = {f"recipe.{name}": value for name, value in result.items()}
    share = affordable / (2 * estimate.evaluation) if estimate.evaluation else 1.0
    if share < 1:
        values: dict[str, Any] = {**_held_out(options), **{name: at(options, name) for name in _PROBING}}
        changes |= {name: max(min(_FEWEST, n), int(share * n)) for name, n in values.items() if n is not None}
    return changes


def _held_out(options: "Training") -> Mapping[str, int]:
    """Return the numbers of images of the evaluators that use a part of the held-out images."""
    parts = ((f"evaluators.{name}.images", part) for name, part in options.evaluators.items())
    return {name: part.images for name, part in parts if hasattr(part, "images")}
