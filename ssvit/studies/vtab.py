"""Summarise VTAB-1k: accuracies on its 19 tasks, and means of its three groups."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ssvit.data.sources.vtab import GROUPS, NAMES
from ssvit.evaluation.statistics import standard_error
from ssvit.options import markdown
from ssvit.studies import methods


class TaskRun(NamedTuple):
    """Store accuracy and number of test images of a run on a task, and the chance level."""

    accuracy: float
    images: int
    chance: float


Models = Mapping[str, Mapping[str, Sequence[TaskRun]]]
"""Runs of each model by task; several runs of a task differ in their seeds."""


def means(tasks: Mapping[str, Sequence[TaskRun]]) -> dict[str, float]:
    """Return the mean accuracy of each task, each group and all tasks, with equal weights, over the available runs."""
    accuracies = {task: statistics.fmean(run.accuracy for run in runs) for task, runs in tasks.items()}
    groups = {**GROUPS, f"all {len(NAMES)}": NAMES}
    values = {group: [accuracies[task] for task in names if task in accuracies] for group, names in groups.items()}
    return accuracies | {group: statistics.fmean(of_group) for group, of_group in values.items() if of_group}


def table(models: Models) -> str:
    """Return a Markdown table of tasks and means (rows) by model (columns), and the missing tasks."""
    rows = [["test accuracy (%)", "chance", *map(markdown, models)]]
    by_model = {model: means(tasks) for model, tasks in models.items()}
    for group, names in {**GROUPS, f"all {len(NAMES)}": ()}.items():
        for task in names:
            chances = [run.chance for tasks in models.values() for run in tasks.get(task, ())]
            chance = f"{100 * chances[0]:.1f}" if chances else ""
            rows.append([task, chance, *(_cell(tasks.get(task, ())) for tasks in models.values())])
        cells = (f"**{100 * mean[group]:.1f}**" if group in mean else "absent" for mean in by_model.values())
        rows.append([f"**{group}**, mean", "", *cells])
    lines = [methods.markdown(rows)]
    for model, tasks in models.items():
        if absent := [task for task in NAMES if task not in tasks]:
            lines += ["", f"{markdown(model)}: {len(absent)} of {len(NAMES)} tasks are absent: {', '.join(absent)}"]
    return "\n".join([*lines, ""])


def _cell(runs: Sequence[TaskRun]) -> str:
    """Format a mean ± the standard error over test images or, for several runs, the standard deviation over runs."""
    if not runs:
        return "absent"
    values = [run.accuracy for run in runs]
    if len(runs) > 1:
        return f"{100 * statistics.fmean(values):.1f} ± {100 * statistics.stdev(values):.1f} ({len(runs)} runs)"
    return f"{100 * values[0]:.1f} ± {100 * standard_error(values[0], runs[0].images):.1f}"
