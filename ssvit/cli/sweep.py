"""The results of the jobs of a sweep (-m): a table of the swept options and a metric, and the best job."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssvit.training.metrics_log import rows

_ACCURACIES = ("validation/accuracy", "test/accuracy", "validation/map", "test/map")
_LOSSES = ("held_out/loss", "train/loss")


@dataclass(frozen=True)
class Job:
    """One run of a sweep: the options that it does not share with the others, and its folder."""

    options: Mapping[str, str]
    folder: Path

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: value for row in rows(self.folder) for name, value in row.items() if value is not None}


def metric(metrics: Mapping[str, float]) -> str | None:
    """What jobs are compared by: accuracy or mAP on validation or test images, else the first probe's, else a loss."""
    probes = [name for name in metrics if name.startswith("probe/") and f"{name}_chosen" in metrics]
    return next((name for name in (*_ACCURACIES, *probes, *_LOSSES) if name in metrics), None)


def value(folder: Path) -> float | None:
    """The metric of one job, for a sweeper that searches; None if it has none."""
    metrics = Job({}, folder).metrics
    name = metric(metrics)
    return None if name is None else metrics[name]


def table(jobs: Sequence[Job]) -> str:
    """A line for each job, and the best one with its folder."""
    found = [job.metrics for job in jobs]
    shared = {name: found[0][name] for name in found[0] if all(name in metrics for metrics in found)}
    name = metric(shared)
    swept = list(dict.fromkeys(option for job in jobs for option in job.options))
    lines = [[*swept, name or "no metric in common"]]
    for job, metrics in zip(jobs, found, strict=True):
        lines.append([*(job.options.get(option, "") for option in swept), f"{metrics[name]:.4g}" if name else ""])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    if name is None:
        return "\n".join(text)
    lower = name in _LOSSES
    best = (min if lower else max)(range(len(jobs)), key=lambda place: found[place][name])
    chosen = " ".join(f"{option}={given}" for option, given in jobs[best].options.items())
    word = "lowest" if lower else "highest"
    return "\n".join([*text, f"best: {chosen}, {word} {name} {found[best][name]:.4g}: {jobs[best].folder}"])
