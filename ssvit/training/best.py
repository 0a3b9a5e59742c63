"""Select the best checkpoint of a run by a metric, and decide on early stopping."""

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssvit.checkpoints import storage
from ssvit.checkpoints.manifest import CheckpointError, complete, read
from ssvit.options import OptionError
from ssvit.training.recipe import Recipe

AUTO, NAME = "auto", "best"
History = Sequence[Mapping[str, float | None]]
# recipe.best=auto is the first metric, in the order in which probes were requested, that matches the first of these
# patterns with a match. These metrics are measured on validation images, or on the training images of a probe.
_USUAL = (r"validation/(accuracy|map)", r"probe/\w+_choice")
# Parts of the names of metrics for which lower is better. The features of different images should differ.
_LESS = re.compile(r"(?:^|_)(?:loss|error|alignment|uniformity|feature_cosine|unreadable)")


@dataclass(frozen=True)
class Best:
    """The evaluation with the best value of a metric."""

    metric: str
    step: int
    value: float
    since: int
    """Number of evaluations after this one."""
    error: float | None = None
    """Standard error of the value if it is an accuracy; None otherwise."""
    is_noise: bool = False
    """Whether no two evaluations differ by more than two standard errors of the difference."""

    def __str__(self) -> str:
        value = f"{self.value:.4g}" if self.error is None else f"{100 * self.value:.1f} ± {100 * self.error:.1f} %"
        return f"step {self.step} has the best {self.metric}, {value}"


def find(history: History, recipe: Recipe) -> Best | None:
    """Find the best evaluation among those at which a checkpoint is saved.

    Args:
        history: The rows of metrics.
        recipe: The hyperparameters, with the metric `recipe.best`.

    Returns:
        The best evaluation; None if there is no metric or no evaluation yet.

    Raises:
        OptionError: The metric is not measured in this run.
    """
    if recipe.best is None:
        return None
    names = [name for row in history for name in row if "/" in name and not name.startswith("train/")]
    metric = recipe.best
    if metric == AUTO:
        usual = (name for pattern in _USUAL for name in names if re.fullmatch(pattern, name))
        if (first := next(usual, None)) is None:
            return None
        metric = first
    elif names and metric not in names:
        listed = ", ".join(sorted(name for name in {*names} if not re.search(r"_layer\d+$", name)))
        raise OptionError("recipe.best", metric, f"is not measured here; there are {listed}")
    sign = -1 if _LESS.search(metric.rpartition("/")[2]) else 1
    best, since, lowest, error = (0, -math.inf), 0, math.inf, None
    for row in history:
        step = int(row["step"] or 0)
        if metric in row and step and recipe.due(step, recipe.save_every):
            since += 1
            value = row[metric]
            if value is not None and sign * value > best[1]:
                best, since, error = (step, sign * value), 0, row.get(f"{metric}_error")
            lowest = min(lowest, math.inf if value is None else sign * value)
    is_noise = recipe.best == AUTO and error is not None and best[1] - lowest <= 2 * math.sqrt(2) * error
    return Best(metric, best[0], sign * best[1], since, error, is_noise) if best[0] else None


def ends(best: Best | None, recipe: Recipe) -> bool:
    """Return whether the run stops early: no improvement in the last `recipe.patience` evaluations."""
    return recipe.patience is not None and best is not None and best.since >= recipe.patience


def keep(folder: Path, step: int) -> None:
    """Hard-link or copy the checkpoint of a step to best/; raise CheckpointError if this fails."""
    path = folder / f"step_{step:08d}"
    with contextlib.suppress(CheckpointError):
        if read(folder / NAME)["step"] == step:
            return
    if path in complete(folder):
        storage.link(path, folder / NAME)
