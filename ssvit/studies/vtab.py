"""The table of VTAB-1k: accuracies of runs on its 19 tasks, and means of its three groups. Standard library only."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ssvit.data.sources.vtab import GROUPS, NAMES
from ssvit.evaluation.significance import standard_error
from ssvit.options import markdown


class Run(NamedTuple):
    """A run on a task. model: what it began from."""

    model: str
    task: str
    accuracy: float
    images: int  # of the test
    chance: float


class Mean(NamedTuple):
    """The mean accuracy of the tasks that are there, of so many; None if there is none."""

    value: float | None
    there: int
    tasks: int


def by_model(runs: Iterable[Run]) -> dict[str, dict[str, list[Run]]]:
    """The runs of each model by task: several differ in their seeds."""
    found: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        found[run.model][run.task].append(run)
    return {model: dict(of_model) for model, of_model in found.items()}


def mean(of_model: dict[str, list[Run]], tasks: Sequence[str]) -> Mean:
    """Every task counts alike, as in the paper."""
    there = [statistics.fmean(run.accuracy for run in of_model[task]) for task in tasks if task in of_model]
    return Mean(statistics.fmean(there) if there else None, len(there), len(tasks))


def facts(runs: Iterable[Run]) -> dict[str, Any]:
    """For JSON, by model: the runs of each task, the means, and the tasks that are absent."""
    return {
        model: {
            "tasks": {task: [run._asdict() for run in found] for task, found in of_model.items()},
            "means": {name: mean(of_model, tasks)._asdict() for name, tasks in [*GROUPS.items(), ("all", NAMES)]},
            "absent": [task for task in NAMES if task not in of_model],
        }
        for model, of_model in by_model(runs).items()
    }


def table(runs: Iterable[Run]) -> str:
    """Markdown: a line for each task and each mean, a column for each model, and which tasks are absent."""
    models = by_model(runs)
    lines = [
        f"| test accuracy (%) | chance | {' | '.join(map(markdown, models))} |",
        "|---|---|" + "---|" * len(models),
    ]
    for group, tasks in GROUPS.items():
        for task in tasks:
            chances = [run.chance for of_model in models.values() for run in of_model.get(task, ())]
            chance = f"{100 * chances[0]:.1f}" if chances else ""
            lines.append(f"| {task} | {chance} | {' | '.join(_cell(of.get(task, [])) for of in models.values())} |")
        lines.append(_means(group, models, tasks))
    lines.append(_means("all 19", models, NAMES))
    for model, of_model in models.items():
        if absent := [task for task in NAMES if task not in of_model]:
            lines += ["", f"{markdown(model)}: {len(absent)} of {len(NAMES)} tasks are absent: {', '.join(absent)}"]
    return "\n".join([*lines, ""])


def _cell(runs: Sequence[Run]) -> str:
    """± the standard error over test images, or the standard deviation over several runs."""
    if not runs:
        return "absent"
    values = [run.accuracy for run in runs]
    if len(runs) > 1:
        return f"{100 * statistics.fmean(values):.1f} ± {100 * statistics.stdev(values):.1f} ({len(runs)} runs)"
    return f"{100 * values[0]:.1f} ± {100 * standard_error(values[0], runs[0].images):.1f}"


def _means(name: str, models: dict[str, dict[str, list[Run]]], tasks: Sequence[str]) -> str:
    found = [mean(of_model, tasks) for of_model in models.values()]
    cells = [
        "absent" if one.value is None
        else f"**{100 * one.value:.1f}**" + (f" ({one.there} of {one.tasks})" if one.there < one.tasks else "")
        for one in found
    ]  # fmt: skip
    return f"| **{name}**, mean | | {' | '.join(cells)} |"
