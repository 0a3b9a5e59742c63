"""Summarise the jobs of a sweep (-m): a table of the swept options and a metric, and the best job.

The best job is never chosen by test images; their metrics are shown next to the metric of the choice.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssvit.checkpoints.run_folder import rows
from ssvit.config.composed import Config
from ssvit.options import UserError

_VALIDATION, _TEST = (tuple(f"{part}/{name}" for name in ("accuracy", "map")) for part in ("validation", "test"))
_TRAIN = "train/loss"
_LOSSES = ("held_out/loss", _TRAIN)
_CHOICE = "_choice"  # suffix of a probe's score on training images
_NO_METRIC = "development=0.1 holds out validation images"


@dataclass(frozen=True)
class Job:
    """Describe a run of a sweep: the options in which it differs from other jobs, and its folder."""

    options: Mapping[str, str]
    folder: Path

    @property
    def metrics(self) -> dict[str, float]:
        """Return the last value of each metric."""
        return {name: value for row in rows(self.folder) for name, value in row.items() if value is not None}


class Sweep:
    """Collect the results of the jobs of a sweep."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def add(self, config: Config, folder: Path) -> float | None:
        """Add the job of a configuration, and return its objective value (`objective_value`)."""
        parts = (option.lstrip("+").partition("=") for option in config.swept)
        self.jobs.append(Job({name: value for name, _, value in parts}, folder))
        return objective_value(folder, config)

    def table(self) -> str:
        """Return the table of all jobs; "" if there are none."""
        return table(self.jobs) if self.jobs else ""


def metric(metrics: Mapping[str, float]) -> str | None:
    """Return the metric for the comparison of jobs, or None.

    In order of preference: accuracy or mAP on validation images, the first probe's score on training images, the loss
    of held-out images, and the training loss, which is not used for classifiers.
    """
    probes = [name for name in metrics if re.fullmatch(rf"probe/\w+{_CHOICE}", name)]
    losses = [name for name in _LOSSES if name != _TRAIN or metrics.keys().isdisjoint(_TEST)]
    return next((name for name in (*_VALIDATION, *probes, *losses) if name in metrics), None)


def objective_value(folder: Path, config: Config) -> float | None:
    """Return the objective value of a job for sweepers such as Optuna.

    Raises:
        UserError: If the sweeper requires a value and the job has no metric.
    """
    metrics = Job({}, folder).metrics
    name = metric(metrics)
    if name is None and (sweeper := config.line.typed.get("hydra/sweeper", "basic")) != "basic":
        raise UserError(f"hydra/sweeper={sweeper}: {folder} has no metric for the sweeper to optimise: {_NO_METRIC}")
    return None if name is None else metrics[name]


def table(jobs: Sequence[Job]) -> str:
    """Return a table with one line for each job, and the best job with its folder."""
    by_job = [job.metrics for job in jobs]
    shared = {name for name in by_job[0] if all(name in metrics for metrics in by_job)}
    name = metric({name: by_job[0][name] for name in by_job[0] if name in shared})
    swept = list(dict.fromkeys(option for job in jobs for option in job.options))
    measured = [column for column in (*_TEST, (name or "").removesuffix(_CHOICE)) if column in shared - {name}]
    columns = [name, *measured] if name else measured
    lines = [[*swept, *(columns or ["no metric in common"])]]
    for job, metrics in zip(jobs, by_job, strict=True):
        cells = [f"{metrics[column]:.4g}" for column in columns] or [""]
        lines.append([*(job.options.get(option, "") for option in swept), *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    if name is None:
        return "\n".join([*text, f"best: not chosen by test images: {_NO_METRIC}"] if columns else text)
    lower = name in _LOSSES
    best = (min if lower else max)(range(len(jobs)), key=lambda index: by_job[index][name])
    options = " ".join(f"{option}={value}" for option, value in jobs[best].options.items())
    word = "lowest" if lower else "highest"
    return "\n".join([*text, f"best: {options}, {word} {name} {by_job[best][name]:.4g}: {jobs[best].folder}"])
