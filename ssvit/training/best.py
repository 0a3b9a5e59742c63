"""Select the best checkpoint of a run by a metric."""

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssvit.checkpoints import storage
from ssvit.checkpoints.manifest import CheckpointError, complete, read_manifest
from ssvit.errors import OptionError
from ssvit.training.recipe import Recipe

AUTO, NAME = "auto", "best"
History = Sequence[Mapping[str, float | None]]
# recipe.best=auto is the first metric, in the order in which probes were requested, that matches the first of these
# patterns with a match. These metrics are measured on validation images, on the training images of a probe, or without
# labels.
_USUAL = (r"validation/(accuracy|map|miou)", r"probe/\w+_choice", r"held_out/loss")
# Parts of the names of metrics for which lower is better. The features of different images should differ.
_LESS = re.compile(r"(?:^|_)(?:loss|error|alignment|uniformity|feature_cosine|unreadable|ece|brier)")


@dataclass(frozen=True)
class Best:
    """The evaluation with the best value of a metric."""

    metric: str
    step: int
    value: float
    error: float | None = None
    """Standard error of the value if it is an accuracy; None otherwise."""
    is_noise: bool = False
    """Whether no two evaluations differ by more than two standard errors of the difference."""

    def conclusion(self, folder: Path) -> str:
        """Return a sentence on the best checkpoint of the run in a folder."""
        value = f"{self.value:.4g}"
        if self.error is not None:
            value = f"{100 * self.value:.1f} % (standard error {100 * self.error:.1f})"
        if self.is_noise:
            return f"no best checkpoint: no two evaluations differ significantly in {self.metric}, at most {value}"
        return f"best checkpoint: {folder / NAME}, step {self.step}, {self.metric} {value}"


def find_best(history: History, recipe: Recipe) -> Best | None:
    """Find the best evaluation after step 0.

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
        usual = [name for pattern in _USUAL for name in names if re.fullmatch(pattern, name)]
        if not usual:
            return None
        metric = usual[0]
    elif names and metric not in names:
        measured = ", ".join(sorted(name for name in {*names} if not re.search(r"_layer\d+$", name)))
        raise OptionError("recipe.best", metric, f"must be a metric of this run: {measured}")
    sign = -1 if _LESS.search(metric.rpartition("/")[2]) else 1
    rows = [row for row in history if metric in row and row["step"]]
    scores = [sign * value for row in rows if (value := row[metric]) is not None]
    if not scores:
        return None
    top = next(row for row in rows if row[metric] == sign * max(scores))
    error = top.get(f"{metric}_error")
    is_noise = recipe.best == AUTO and error is not None and max(scores) - min(scores) <= 2 * math.sqrt(2) * error
    return Best(metric, int(top["step"] or 0), sign * max(scores), error, is_noise)


def link_checkpoint(folder: Path, step: int) -> None:
    """Hard-link or copy the checkpoint of a step to best/; raise CheckpointError if this fails."""
    path = folder / f"step_{step:08d}"
    with contextlib.suppress(CheckpointError):
        if read_manifest(folder / NAME)["step"] == step:
            return
    if path in complete(folder):
        storage.link(path, folder / NAME)
