"""Summarise the jobs of a sweep (-m): a table of the swept options and a metric, and the best job.

Jobs that differ in recipe.seed alone are also summarised by mean and standard deviation, and combinations of the other
options are compared by their means. The best job is never chosen by test images; their metrics are shown next to the
metric of the choice.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ssvit.checkpoints.run_folder import last_values, reported_run, rows
from ssvit.config.composed import Config
from ssvit.errors import UserError, aligned
from ssvit.studies.comparison import MEASURES

_VALIDATION, _TEST = (tuple(f"{part}/{name}" for name in MEASURES) for part in ("validation", "test"))
_TRAIN = "train/loss"
_LOSSES = ("held_out/loss", _TRAIN)
_CHOICE = "_choice"  # suffix of a probe's score on training images
_SEED = "recipe.seed"
_NO_METRIC = "development=0.1 holds out validation images"


class Job(NamedTuple):
    """Describe a run of a sweep: the options in which it differs from other jobs, its folder, and its last metrics."""

    options: Mapping[str, str]
    folder: Path
    metrics: Mapping[str, float]


def metric(metrics: Mapping[str, float]) -> str | None:
    """Return the metric for the comparison of jobs, or None.

    In order of preference: accuracy, mAP or mIoU on validation images, the first probe's score on training images, the
    loss of held-out images, and the training loss, which is not used for classifiers and segmentation models.
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

        The metrics of a job with several runs are those of `reported_run`.

        Raises:
            UserError: If the sweeper requires a value and the job has no metric.
        """
        parts = (option.lstrip("+").partition("=") for option in config.swept)
        metrics = last_values(rows(reported_run(folder)))
        self.jobs.append(Job({name: value for name, _, value in parts}, folder, metrics))
        name = metric(metrics)
        if name is None and (sweeper := config.line.typed.get("hydra/sweeper", "basic")) != "basic":
            raise UserError(
                f"hydra/sweeper={sweeper}: {folder} has no metric for the sweeper to optimise: {_NO_METRIC}"
            )
        return None if name is None else metrics[name]

    def table(self) -> str:
        """Return a table with a line for each job and, for several seeds, for each combination of the other options.

        The last line is the best job or combination with its folders; "" if there are no jobs.
        """
        if not self.jobs:
            return ""
        first, *others = (job.metrics for job in self.jobs)
        shared = [name for name in first if all(name in metrics for metrics in others)]
        name = metric({name: first[name] for name in shared})
        swept = list(dict.fromkeys(option for job in self.jobs for option in job.options))
        measured = [column for column in (*_TEST, (name or "").removesuffix(_CHOICE)) if column in shared]
        columns = list(dict.fromkeys([name, *measured] if name else measured))
        jobs = [[job] for job in self.jobs]
        groups = self._groups([option for option in swept if option != _SEED]) if _SEED in swept else jobs
        lines = [[*swept, *(columns or ["no metric in common"])]]
        for group in [*jobs, *(group for group in groups if len(group) > 1)]:
            values = {**group[0].options, **({_SEED: f"{len(group)} seeds"} if len(group) > 1 else {})}
            cells = [_spread(group, column) for column in columns] or [""]
            lines.append([*(values.get(option, "") for option in swept), *cells])
        text = aligned(lines)
        if len(groups) == 1 < len(jobs):
            return "\n".join(text)  # there is nothing to choose
        if name is None:
            return "\n".join([*text, f"best: not chosen by test images: {_NO_METRIC}"] if columns else text)
        lower = name in _LOSSES
        if lower and any(re.split(r"[.@]", option)[0] in ("objective", "target") for option in swept):
            return "\n".join([*text, "best: not chosen by the losses of different objectives"])
        best = (min if lower else max)(groups, key=lambda group: statistics.fmean(job.metrics[name] for job in group))
        chosen = best[0].options.items()
        options = " ".join(f"{option}={value}" for option, value in chosen if len(best) == 1 or option != _SEED)
        word = f"{'lowest' if lower else 'highest'}{' mean' * (len(best) > 1)}"
        folders = ", ".join(str(job.folder) for job in best)
        return "\n".join([*text, f"best: {options}, {word} {name} {_spread(best, name)}: {folders}"])

    def _groups(self, options: Sequence[str]) -> list[list[Job]]:
        """Return the jobs with equal values of some options."""
        groups = defaultdict(list)
        for job in self.jobs:
            groups[tuple(job.options.get(option) for option in options)].append(job)
        return list(groups.values())


def _spread(jobs: Sequence[Job], name: str) -> str:
    """Format the mean of a metric over jobs and, for several jobs, its sample standard deviation."""
    values = [job.metrics[name] for job in jobs]
    return f"{statistics.fmean(values):.4g}" + (f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else "")
