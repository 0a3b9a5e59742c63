"""Summarise a comparison of objectives: rows of plain data, and the table made from them.

A row is one objective with one seed, in a separate file. Accuracies are in [0, 1].
"""

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssvit.errors import UserError
from ssvit.evaluation.baselines import OWN, PIXELS, RANDOM, RANDOM_PREFIX
from ssvit.evaluation.statistics import of_seeds, verdict
from ssvit.evaluation.titles import title

if TYPE_CHECKING:
    from ssvit.figures.plot import Plot

Row = Mapping[str, Any]
_NONE = "\u2013"  # en dash for a missing value
BASELINES = "baselines"  # row of results without pre-training
MARKERS = "osD^vP*Xhd<>"
_GREY, _ACROSS = "#c4c4c4", 4  # colour of other objectives, and maximum number of panels in a row
_AMOUNTS = ("cpu_seconds", "flops", "images")


def read_rows(folder: Path) -> dict[str, Row]:
    """Read the rows of a folder by name, in alphabetical order; raise UserError for other files."""
    return {file.stem: _read(file) for file in sorted(folder.glob("*.json"))}


def _read(file: Path) -> Row:
    try:
        row: Row = json.loads(file.read_text())
        _ = row["protocol"]["options"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{file}: is not a row of ssvit compare or ssvit scaling") from None
    return row


def read_tables(folders: Iterable[Path]) -> dict[str, Row]:
    """Read the rows of all tables in folders and their subfolders; the names of objectives begin with the subfolder.

    With several folders, they begin with the folder. Rows of held-out images, which choose options (development=…), are
    skipped if there are rows of test images.
    """
    rows: dict[str, Row] = {}
    folders = list(folders)
    for folder in folders:
        for file in sorted(folder.rglob("*_seed*.json")):
            row = _read(file)
            if "stages" in row:
                parts = [folder.name] * (len(folders) > 1), file.relative_to(folder).parts[:-1]
                name = "/".join([*chain(*parts), row["objective"]])
                rows[str(file)] = {**row, "objective": name}
    of_test = {file: row for file, row in rows.items() if not _is_held_out(row)}
    return of_test or rows


def _is_held_out(row: Row) -> bool:
    chosen = (option.partition("=") for option in row["protocol"]["options"])
    return any(name == "development" and value != "null" for name, _, value in chosen)


def curve(
    history: Iterable[Mapping[str, Any]], cost: Mapping[str, float], before: Sequence[Mapping[str, Any]]
) -> list[dict[str, float]]:
    """Return the probe results of a stage during training, with the cumulative cost at each step.

    Args:
        history: Rows of metrics of the stage.
        cost: Cost of a step of the stage, and of its preparation.
        before: Costs and steps of the previous stages.
    """
    points = []
    for row in history:
        names = [name for name in row if name.startswith("probe/") and f"{name}_chosen" in row]
        if names:
            spent = total([*before, {**cost, "steps": row["step"]}])
            names += ["probe/chance"] if "probe/chance" in row else []
            points.append({"step": row["step"], **spent, **{name.removeprefix("probe/"): row[name] for name in names}})
    return points


def probes(report: Mapping[str, Any], encoder: str = OWN) -> dict[str, dict[str, Any]]:
    """Return the score of each probe in a report at the layer chosen without test labels and at the last layer.

    Args:
        report: The report.
        encoder: OWN for the evaluated encoder, or the name of a baseline.
    """
    found = {}
    for probe in report["measured"]:
        values, chosen = probe["values"], probe["best"] if encoder == OWN else probe["chosen"][encoder]
        prefix = RANDOM_PREFIX if encoder == RANDOM else ""
        # The last layer of this probe: those of patches have other feature sets than those of images.
        last = [name for own in report["own"] if (name := prefix + own) in values][-1] if encoder != PIXELS else chosen
        layer = {"layer": int(number[1])} if (number := re.search(r"layer(\d+)", chosen)) else {}
        scores = {"chosen": values[chosen][-1], **layer, "last": values[last][-1]}
        found[probe["measure"]] = {"column": probe["columns"][-1], **scores}
    return found


def methods_table(rows: Mapping[str, Row]) -> str:
    """Return Markdown tables of accuracies and costs."""
    by_objective = _rows_by_objective(rows)
    columns = _columns(rows)
    order = list(by_objective)
    accuracies = [["objective", "seeds", *columns.values(), "fine-tuned"]]
    for name in order:
        rows_of_objective = by_objective[name]
        cells = [
            _cell([row["probes"][probe] for row in rows_of_objective if probe in row["probes"]]) for probe in columns
        ]
        tuned = [row["finetuned"] for row in rows_of_objective if "finetuned" in row]
        accuracies.append([name, str(len(rows_of_objective)), *cells, mean_std(tuned)])
    if base := rows.get(BASELINES):
        for name, probes in base["baselines"].items():
            cells = [_cell([probes[probe]] if probe in probes else []) for probe in columns]
            accuracies.append([name, "1", *cells, _NONE])
        if "finetuned" in base:
            accuracies.append(["no pre-training", "1", *[_NONE] * len(columns), mean_std([base["finetuned"]])])
    costs = ["steps x images", "CPU min", "images", "images/CPU s", "TFLOP", "GFLOP/CPU s", "backend, precision"]
    spent = [["objective", *costs]]
    spent += [[name, *_spent(by_objective[name][0]["stages"])] for name in order]
    return f"{markdown(accuracies)}\n\n{markdown(spent)}\n"


def _rows_by_objective(rows: Mapping[str, Row]) -> dict[str, list[Row]]:
    """Return the rows of each objective, in descending order of the mean score of the first probe."""
    grouped = defaultdict(list)
    for name, row in rows.items():
        if name != BASELINES:
            grouped[row["objective"]].append(row)
    first = next(iter(_columns(rows)))
    means = {name: statistics.fmean(_scores(of_objective, first) or [0.0]) for name, of_objective in grouped.items()}
    return {name: grouped[name] for name in sorted(means, key=lambda name: -means[name])}


def _columns(rows: Mapping[str, Row]) -> dict[str, str]:
    """Return the titles of the probes in all rows, by the names of the probes."""
    probes = (probe for row in rows.values() for probe in row.get("probes", {}).items())
    return {name: title(name, score["column"]) for name, score in probes}


def _scores(rows: Sequence[Row], probe: str) -> list[float]:
    """Return the scores of a probe at the chosen layer, of the rows that have it."""
    return [row["probes"][probe]["chosen"] for row in rows if probe in row["probes"]]


def conclusion(rows: Mapping[str, Row]) -> list[str]:
    """Return the result of a comparison: the best objective, the baseline, and the difference from the second best."""
    probe, words = next(iter(_columns(rows).items()))
    scores = {name: _scores(rows_of_objective, probe) for name, rows_of_objective in _rows_by_objective(rows).items()}
    (best, values), *others = scores.items()
    baseline = _scores([{"probes": rows[BASELINES]["baselines"][RANDOM]}] if BASELINES in rows else [], probe)
    lines = [f"{best}: {words} {mean_std(values)} %, baseline (random weights) {mean_std(baseline)} %"]
    for second, second_scores in others[:1]:
        difference = 100 * (statistics.fmean(values) - statistics.fmean(second_scores))
        if (interval := of_seeds(values, second_scores)) is None:
            points, limits = f"{difference:.1f} percentage points", "one seed each; set seeds=3 for a 95 % interval"
            lines.append(f"{best} and {second} differ by {points} ({limits})")
        else:
            limits = f"95 % interval over seeds {100 * interval.low:+.1f} to {100 * interval.high:+.1f}"
            compared = verdict(interval, tested=interval.low < interval.high)  # not for equal results of all seeds
            lines.append(f"{best} is {compared} {second}: {difference:+.1f} percentage points ({limits})")
    return lines


def _at(seconds: float, points: Sequence[Mapping[str, float]], probe: str) -> float:
    """Return the score of a probe after a CPU time, interpolated linearly between the points of a curve."""
    import numpy as np

    times, scores = ([point[name] for point in points] for name in ("cpu_seconds", probe))
    return float(np.interp(seconds, times, scores))


def plot_costs(rows: Mapping[str, Row]) -> "Plot":
    """Plot the first and the last probe and fine-tuning of each objective over the CPU minutes of its pre-training.

    Error bars are 95 % intervals of the mean over the seeds, for objectives with at least two seeds. Points of one
    budget are next to each other, up to 10 % beside it.
    """
    from ssvit.figures import style
    from ssvit.figures.plot import Line, Panel, Plot

    panels = []
    by_objective, titles = _rows_by_objective(rows), {**_columns(rows), "finetuned": "fine-tuned"}
    spent = {name: total(of_objective[0]["stages"])["cpu_seconds"] / 60 for name, of_objective in by_objective.items()}
    budgets, x = sorted({*map(_budget, spent.values())}), _apart(spent)
    for measure in dict.fromkeys([*titles][:1] + [*titles][-2:]):
        lines = []
        for index, (name, of_objective) in enumerate(by_objective.items()):
            scores = [row["finetuned"] for row in of_objective if measure in row] or _scores(of_objective, measure)
            if scores:
                mean, interval = 100 * statistics.fmean(scores), of_seeds(scores)
                around = [100 * (interval.high - interval.low) / 2] if interval else None
                marker, trained = MARKERS[index % len(MARKERS)], of_objective[0]["stages"][-1]["options"]
                color = style.of_objective(name.rpartition("/")[2], *(one.partition("=")[2] for one in trained))
                lines.append(Line([x[name]], [mean], name, color, "", marker, around=around))
        if lines:
            xlabel = "CPU minutes of pre-training"
            panels.append(Panel(f"{titles[measure]} (%)", lines, [], xlabel, xticks=budgets, log=True, close=True))
    height = 4 + 0.05 * len(by_objective)  # the legend has four columns
    return Plot(panels, (4.5 * len(panels), height), legend="below")


def _budget(minutes: float) -> float:
    return float(f"{minutes:.2g}")


def _apart(spent: Mapping[str, float]) -> dict[str, float]:
    """Return CPU minutes by name, up to 10 % apart from the given ones, so that points of one budget do not overlap."""
    apart: dict[str, float] = {}
    for budget in {*map(_budget, spent.values())}:
        equal = [name for name, minutes in spent.items() if _budget(minutes) == budget]
        last = len(equal) - 1
        apart |= {name: spent[name] * 1.1 ** (2 * place / last - 1 if last else 0) for place, name in enumerate(equal)}
    return apart


def curves(rows: Mapping[str, Row]) -> dict[str, list[list[dict[str, float]]]]:
    """Return the curves of each objective, one for each seed."""
    runs_of = defaultdict(list)
    for name, row in rows.items():
        if name != BASELINES and row["curve"]:
            runs_of[row["objective"]].append(row["curve"])
    return dict(runs_of)


def probes_in(runs_of: Mapping[str, list[list[dict[str, float]]]]) -> dict[str, str]:
    """Return the titles of the probes that all curves have, by their names."""
    first, *others = (points[0] for runs in runs_of.values() for points in runs)
    return {
        name: title(name)
        for name in first
        if name not in (*_AMOUNTS, "step", "chance") and all(name in other for other in others)
    }


def plot(runs_of: Mapping[str, list[list[dict[str, float]]]], probe: str) -> "Plot":
    """Plot a probe of each objective over CPU minutes, averaged over seeds.

    Each objective has a panel, in which the others are grey. Panels are ordered by the last accuracy, highest first.
    """
    from ssvit.figures.plot import Line, Panel, Plot
    from ssvit.figures.style import of_objective

    minutes = {name: [point["cpu_seconds"] / 60 for point in runs[0]] for name, runs in runs_of.items()}
    means = {
        name: [100 * statistics.fmean(_at(60 * minute, points, probe) for points in runs) for minute in minutes[name]]
        for name, runs in runs_of.items()
    }
    grey = {name: Line(minutes[name], mean, "", _GREY, "-", "", 1) for name, mean in means.items()}
    panels = []
    for name in sorted(means, key=lambda name: -means[name][-1]):
        others = [line for other, line in grey.items() if other != name]
        own, words = Line(minutes[name], means[name], color=of_objective(name)), f"{name}: {means[name][-1]:.1f} %"
        panels.append(Panel(f"{title(probe)} (%)", [*others, own], (), "CPU minutes", words, close=True))
    across = min(len(panels), _ACROSS)
    down = -(-len(panels) // across)
    return Plot(panels, (3.1 * across, 2.5 * down), down)


def total(stages: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the CPU seconds, floating-point operations and images of stages, each with its steps and cost per step."""
    total = {amount: sum(stage["steps"] * stage[amount] for stage in stages) for amount in _AMOUNTS}
    return total | {"cpu_seconds": total["cpu_seconds"] + sum(stage["preparation"] for stage in stages)}


def _spent(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the cells of the cost of pre-training."""
    seconds, flops, images = total(stages).values()
    return [
        " + ".join(f"{stage['steps']} x {stage['images']}" for stage in stages),
        f"{seconds / 60:.1f}",
        f"{images:,}",
        f"{images / seconds:.0f}",
        f"{flops / 1e12:.1f}",
        f"{flops / seconds / 1e9:.0f}",
        ", ".join(dict.fromkeys(stage[name] for name in ("backend", "precision") for stage in stages if name in stage)),
    ]


def _cell(scores: Sequence[Mapping[str, Any]]) -> str:
    """Return the accuracy at the chosen layer, its number, and the accuracy at the last layer if it differs."""
    chosen, last = ([score[name] for score in scores] for name in ("chosen", "last"))
    layers = "/".join(str(score["layer"]) for score in scores if "layer" in score)
    if not layers:
        return mean_std(chosen)
    return f"{mean_std(chosen)} (layer {layers}" + (")" if chosen == last else f"; last {mean_std(last)})")


def mean_std(values: Sequence[float], digits: int = 1) -> str:
    """Format mean and sample standard deviation in per cent with some decimals; a dash if there are no values."""
    if not values:
        return _NONE
    mean = f"{100 * statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {100 * statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, the first row its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])
