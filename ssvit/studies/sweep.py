"""Summarise the jobs of a sweep (-m): a table of the swept options and a metric, and the best job.

The best job is never chosen by test images; their metrics are shown next to the metric of the choice.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ssvit.checkpoints.run_folder import rows
from ssvit.config.composed import Config
from ssvit.options import UserError, aligned

_VALIDATION, _TEST = (tuple(f"{part}/{name}" for name in ("accuracy", "map")) for part in ("validation", "test"))
_TRAIN = "train/loss"
_LOSSES = ("held_out/loss", _TRAIN)
_CHOICE = "_choice"  # suffix of a probe's score on training images
_NO_METRIC = "development=0.1 holds out validation images"


class Job(NamedTuple):
    """Describe a run of a sweep: the options in which it differs from other jobs, its folder, and its last metrics."""

    options: Mapping[str, str]
    folder: Path
    metrics: Mapping[str, float]


def metric(metrics: Mapping[str, float]) -> str | None:
    """Return the metric for the comparison of jobs, or None.

    In order of preference: accuracy or mAP on validation images, the first probe's score on training images, the loss
    of held-out images, and the training loss, which is not used for classifiers.
    """
    probes = [name for name in metrics if re.fullmatch(rf"probe/\w+{_CHOICE}", name)]
    losses = [name for name in _LOSSES if name != _TRAIN or metrics.keys().isdisjoint(_TEST)]
    return next((name for name in (*_VALIDATION, *probes, *losses) if name in metrics), None)


class Sweep:
    """Collect the results of the jobs of a sweep."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def add(self, config: Config, folder: Path) -> float | None:
        """Add the job of a configuration, and return its objective value for sweepers such as Optuna.

        Raises:
            UserError: If the sweeper requires a value and the job has no metric.
        """
        parts = (option.lstrip("+").partition("=") for option in config.swept)
        metrics = {name: value for row in rows(folder) for name, value in row.items() if value is not None}
        self.jobs.append(Job({name: value for name, _, value in parts}, folder, metrics))
        name = metric(metrics)
        if name is None and (sweeper := config.line.typed.get("hydra/sweeper", "basic")) != "basic":
            raise UserError(
                f"hydra/sweeper={sweeper}: {folder} has no metric for the sweeper to optimise: {_NO_METRIC}"
            )
        return None if name is None else metrics[name]

    def table(self) -> str:
        """Return a table with one line for each job, and the best job with its folder; "" if there are none."""
        if not self.jobs:
            return ""
        first, *others = (job.metrics for job in self.jobs)
        shared = [name for name in first if all(name in metrics for metrics in others)]
        name = metric({name: first[name] for name in shared})
        swept = list(dict.fromkeys(option for job in self.jobs for option in job.options))
        measured = [column for column in (*_TEST, (name or "").removesuffix(_CHOICE)) if column in shared]
        columns = list(dict.fromkeys([name, *measured] if name else measured))
        lines = [[*swept, *(columns or ["no metric in common"])]]
        for job in self.jobs:
            cells = [f"{job.metrics[column]:.4g}" for column in columns] or [""]
            lines.append([*(job.options.get(option, "") for option in swept), *cells])
        text = aligned(lines)
        if name is None:
            return "\n".join([*text, f"best: not chosen by test images: {_NO_METRIC}"] if columns else text)
        lower = name in _LOSSES
        best = (min if lower else max)(self.jobs, key=lambda job: job.metrics[name])
        options = " ".join(f"{option}={value}" for option, value in best.options.items())
        word = "lowest" if lower else "highest"
        return "\n".join([*text, f"best: {options}, {word} {name} {best.metrics[name]:.4g}: {best.folder}"])
