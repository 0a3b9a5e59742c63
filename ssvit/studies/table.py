"""Tabulate finished runs: accuracies on data sets (rows) by model (columns), as in Table 2 of the ViT paper.

Runs of several seeds are one cell, with their mean and standard deviation. Runs of a model on a data set that differ in
another option have separate columns. The 19 tasks of VTAB-1k are followed by the means of their three groups.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from ssvit.checkpoints.checkpoint import Checkpoint, stages_of
from ssvit.checkpoints.configuration import Configuration
from ssvit.checkpoints.run_folder import FLOPS, last_values, rows
from ssvit.config.dotted import at
from ssvit.data.sources.vtab import GROUPS, NAMES
from ssvit.errors import UserError, markdown, typed
from ssvit.studies import methods
from ssvit.studies.comparison import TEST_OR_VALIDATION, FinalScore, scored

_SEED = "recipe.seed"
_NOT_COMPARED = ("name", _SEED, "compare", "scratch", "sweep", "table4")  # options that do not change a single run
_KINDS = ("csv", "folder", "huggingface", "shards")  # choices of data that are named by their path
_VTAB = "vtab/"  # prefix of the rows of VTAB-1k
_TASKS = {f"{_VTAB}{name}" for name in NAMES}
_ALL = f"all {len(NAMES)}"
OPERATIONS = "operations of pre-training"  # in the paper in exaFLOPs (Table 6)
_FIVE = "average of five"  # the mean of these data sets in Figure 5 and Table 7 of the paper
_OF_FIVE = ("imagenet", "cifar10", "cifar100", "oxford_pets", "flowers102")

Scores = dict[str, dict[int, FinalScore]]
"""Scores of a model by row of the table and seed."""


class FinishedRun(NamedTuple):
    """Describe a finished run by its options and its score."""

    configuration: Configuration
    score: FinalScore

    def value(self, option: str) -> Any:
        """Return the value of an option or the choice of a group; None if there is none."""
        value = at(self.configuration.values, option)
        return self.configuration.choices.get(option) if value is None else value

    @property
    def model(self) -> str:
        """Return the initial weights, or the encoder if they are random."""
        encoder = self.value("encoder.model") or self.configuration.choices.get("encoder")
        named = f" ({encoder})" if encoder not in (None, "pretrained") else ""
        is_part = self.configuration.choices.get("data") == "vtab" and not self.value("data.all_images")
        return (self.value("encoder.path") or f"random weights{named}") + " (800 images)" * is_part

    @property
    def row(self) -> str:
        """Return the data set, the number of training images of a subset, and a measure other than test accuracy."""
        choice, images = self.configuration.choices.get("data"), self.value("subset.images")
        name = (self.value("data.table") or self.value("data.root")) if choice in _KINDS else choice
        remarks = (f"{images:,} training images" if images else "", self.score.part, self.score.measure)
        name = f"{_VTAB}{self.value('data.task')}" if choice == "vtab" else name
        return ", ".join([str(name), *(remark for remark in remarks if remark not in ("", "test", "top-1"))])


def read_runs(folders: Iterable[Path]) -> tuple[list[FinishedRun], list[str]]:
    """Return the finished runs of classifiers in folders and their subfolders, and the folders of unfinished ones.

    Runs that choose options (development=…) are skipped. A run with ReaL labels has a second score.
    """
    runs, unfinished = [], []
    for file in (file for folder in folders for file in sorted(folder.rglob("config.yaml"))):
        with suppress(UserError, OSError):
            configuration, history = Configuration.read(file), rows(file.parent)
            scores, steps = scored(history, TEST_OR_VALIDATION), at(configuration.values, "recipe.steps")
            if not scores or configuration.values.get("development") is not None:
                continue
            last = scores[-1]
            if last.step != steps:
                unfinished.append(f"{file.parent} (step {last.step} of {steps})")
                continue
            runs.append(FinishedRun(configuration, last))
            if (real := last_values(history).get(f"{last.part}/accuracy_real")) is not None:
                runs.append(FinishedRun(configuration, last._replace(accuracy=real, measure="ReaL", chance=None)))
    return runs, unfinished


def columns(runs: Sequence[FinishedRun]) -> tuple[dict[str, Scores], dict[str, float]]:
    """Group the runs into columns of the table.

    The name of a column has the options in which runs of the model on the same data set differ, as far as they are
    needed to distinguish these runs.

    Returns:
        The scores of each column by row and seed, where a seed that was repeated with equal options counts once; and
        the floating-point operations of the pre-training, for columns where they are known.
    """
    cells: dict[tuple[str, str], list[FinishedRun]] = defaultdict(list)
    options: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        cells[run.model, run.row].append(run)
    for (model, _), cell in cells.items():
        for run, other in combinations(cell, 2):
            if all(run.value(option) == other.value(option) for option in options[model]) and (
                difference := run.configuration.difference(other.configuration, _NOT_COMPARED)
            ):
                options[model].append(difference[0])
    models: dict[str, Scores] = {}
    flops: dict[str, float] = {}
    for run in runs:
        column = ", ".join([run.model, *(f"{name}={typed(run.value(name))}" for name in options[run.model])])
        start = run.value("encoder.path")
        if column not in models and start and (spent := _operations(Path(start))):
            flops[column] = spent
        scores = models.setdefault(column, {}).setdefault(run.row, {})
        scores.setdefault(run.value(_SEED) or 0, run.score)
    return models, flops


def _operations(path: Path) -> float | None:
    """Return the operations of the run of a checkpoint and of the runs that it continues; None if one is unknown."""
    try:
        stages = stages_of(Checkpoint.open(path))
        of_stages = [last * next(row[FLOPS] for row in rows(run) if FLOPS in row) for run, _, last in stages or ()]
    except (UserError, OSError, StopIteration):
        return None
    return sum(of_stages) if stages else None


def accuracies(scores: Scores) -> dict[str, list[float]]:
    """Return the accuracies of each row, and the means of five data sets of the paper and of groups of VTAB-1k.

    Means are of each seed if all rows have the same seeds, otherwise of the rows' means. The mean of the five data
    sets requires all of them, which may have validation images instead of test images.
    """
    values = {row: [of_seeds[seed].accuracy for seed in sorted(of_seeds)] for row, of_seeds in scores.items()}
    five = [next(filter(scores.__contains__, (name, f"{name}, validation")), "") for name in _OF_FIVE]
    means = {_FIVE: five if all(five) else []}
    for group, names in {**GROUPS, _ALL: NAMES}.items():
        means[f"{_VTAB}{group}"] = [task for name in names if (task := f"{_VTAB}{name}") in scores]
    for title, of_mean in means.items():
        rows_ = [values[row] for row in of_mean]
        is_paired = len({tuple(sorted(scores[row])) for row in of_mean}) == 1
        seeds = zip(*rows_, strict=True) if is_paired else [[*map(statistics.fmean, rows_)]]
        values |= {title: [*map(statistics.fmean, seeds)]} if rows_ else {}
    return values


def results_table(models: Mapping[str, Scores], flops: Mapping[str, float]) -> str:
    """Return a Markdown table of data sets (rows) by model (columns), and the missing tasks of VTAB-1k.

    Args:
        models: Scores by column.
        flops: Floating-point operations of the pre-training by column, where they are known.
    """
    values = {model: accuracies(scores) for model, scores in models.items()}
    examples = {row: next(iter(seeds.values())) for scores in models.values() for row, seeds in scores.items()}
    titles = {row: markdown(row) for row in examples if row not in _TASKS}
    if any(_FIVE in of_model for of_model in values.values()):
        titles[_FIVE] = f"**{_FIVE}**, mean of ImageNet, CIFAR-10, CIFAR-100, Pets and Flowers"
    if _TASKS & examples.keys():
        for group, names in {**GROUPS, _ALL: ()}.items():
            titles |= {f"{_VTAB}{name}": name for name in names} | {f"{_VTAB}{group}": f"**{group}**, mean"}
    lines = [["accuracy (%)", "chance", *map(markdown, models)]]
    for row, title in titles.items():
        chance = examples[row].chance if row in examples else None
        cells = (methods.mean_std(values[model].get(row, ()), 2) for model in models)
        lines.append([title, "" if chance is None else f"{100 * chance:.1f}", *cells])
    if flops:
        spent = (_prefixed(flops[model]) if model in flops else "" for model in models)
        lines.append([OPERATIONS, "", *spent])
    text = [methods.markdown(lines)]
    if counts := {len(seeds) for scores in models.values() for seeds in scores.values()} - {1}:
        number = " to ".join(map(str, sorted({min(counts), max(counts)})))
        text += ["", f"± sample standard deviation over {number} seeds; without ±: one run"]
    for model, scores in models.items():
        if _TASKS & scores.keys() and (absent := [name for name in NAMES if f"{_VTAB}{name}" not in scores]):
            text += ["", f"{markdown(model)}: {len(absent)} of {len(NAMES)} tasks are absent: {', '.join(absent)}"]
    return "\n".join([*text, ""])


def _prefixed(flops: float) -> str:
    """Return a number of floating-point operations with a prefix, such as 556 GFLOP."""
    return re.sub("([A-Z]?)$", r" \1FLOP", tqdm.format_sizeof(flops, divisor=1000), count=1)
