"""Draw the figures of measured results in the pages, from the stored rows: python docs/plots.py"""

import hashlib
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import tables
import yaml

from ssvit.evaluation.statistics import of_seeds
from ssvit.figures.base import Canvas, png
from ssvit.figures.plot import Level, Line, Panel, Plot
from ssvit.figures.style import INK, PALE, of_objective, panels

Rows = dict[str, dict[str, list[float]]]
"""Figures in percent, for each seed, by the name of a line and by probe."""
_STARTS = {
    "mae": ("MAE, fine-tuned", of_objective("mae"), "o", "-"),
    "masked_patch": ("masked patch prediction, fine-tuned", of_objective("masked_patch"), "^", "-"),
    "masked_patch_decoder": ("the same with a decoder, fine-tuned", of_objective("masked_patch_decoder"), "v", "-"),
    "frozen": ("MAE, frozen features", of_objective("mae"), "D", (0, (1, 2))),
    "scratch": ("from scratch", "replaced", "s", "-"),
}
_PRETRAININGS = {6: "short", 29: "long"}  # by nominal CPU minutes
_CONTINUED = {
    ("target", "ridge regression (all labels)"): "hand signs: ridge, all labels",
    ("target", "ridge regression (5 labels per class)"): "hand signs: ridge, 5 labels per class",
    ("target", "20-NN (standardised features)"): "hand signs: 20-NN",
    ("other", "20-NN (standardised features)"): "CIFAR-10 afterwards: 20-NN",
}


def dots(series: dict[str, Rows], probes: dict[Any, str], xlabel: str, levels: dict[str, tuple[str, Any]]) -> Canvas:
    """Draw a panel for each probe, with a line of dots in the colour of the objective for each name in the series.

    Args:
        series: Rows by the label of the legend; the dots of all series but the last are hollow. A dot is a mean, next
            to its 95 % interval for three or more seeds, or next to both seeds.
        probes: Titles.
        xlabel: Label of the x axes.
        levels: Dash and rows of vertical lines by the label of the legend.
    """
    names = list(dict.fromkeys(name for rows in series.values() for name in rows))
    figure, axes = panels(len(probes), 3 * len(probes) + 2.5, 1.2 + 0.24 * len(names))
    for axis, (probe, title) in zip(axes, probes.items(), strict=True):
        for label, rows in series.items():
            fill = None if label == list(series)[-1] else "white"
            axis.plot([], "o", color=INK, markersize=5, markerfacecolor=fill, label=label)
            for place, name in enumerate(names):
                if values := rows.get(name, {}).get(probe):
                    color, interval = of_objective(name), of_seeds(values) if len(values) > 2 else None
                    ends = [interval.low, interval.high] if interval else values
                    axis.plot(ends, [place] * len(ends), "-" if interval else ".", color=color, linewidth=2)
                    axis.plot(statistics.fmean(values), place, "o", color=color, markersize=5, markerfacecolor=fill)
        for label, (dash, values) in levels.items():
            if probe in values:
                axis.axvline(values[probe], color=INK, linewidth=1, linestyle=dash, label=label, zorder=1)
        axis.set_yticks(range(len(names)), names if axis is axes[0] else [""] * len(names), fontsize=8)
        axis.tick_params(axis="y", length=0)
        axis.set_ylim(len(names) - 0.4, -0.6)
        axis.set_title(title, loc="left", fontsize=9)
        axis.set_xlabel(xlabel)
        axis.grid(color=PALE, linewidth=0.8)
        axis.spines[["top", "right", "left"]].set_visible(False)
    named = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend([*named.values()], [*named], loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def rows_of(table: str) -> Rows:
    """Return the rows of a table of accuracies in tables.yaml, in its order."""
    spec = yaml.safe_load((tables.DOCS / "tables.yaml").read_text())["accuracies"][table]
    found: Rows = {}
    for label, source in tables.sources(spec["rows"]).items():
        seeds = [tables.values(row) for row in tables.read(source)]
        scores = {probe: [100 * seed[probe] for seed in seeds if probe in seed] for probe in tables.PROBES}
        found[label.replace("`", "")] = {probe: values for probe, values in scores.items() if values}
    return found


def single(values: dict[str, list[float]]) -> dict[str, float]:
    """Return the figures of a row with one seed."""
    return {probe: value for probe, (value,) in values.items()}


def objectives() -> Canvas:
    """Draw all objectives on CIFAR-10 after both budgets; the longer one determines the order."""
    short, long = rows_of("cifar10_6min"), rows_of("cifar10_29min")
    dashes = dict(zip(tables.BASELINES, ("--", ":", "-."), strict=True))
    levels = {name: (dash, single(short[name])) for name, dash in dashes.items()}
    best = {name: values for name, values in (short | long).items() if name not in dashes}
    order = sorted(best, key=lambda name: -statistics.fmean(best[name]["ridge"]))
    series = {
        "6 CPU minutes": {name: short.get(name, {}) for name in order},
        "29 CPU minutes": {name: long.get(name, {}) for name in order},
    }
    probes = {
        "ridge": "ridge regression, 20,000 labels", "knn_standardized": "20-NN, standardised features",
        "finetuned": "fine-tuned, 5,000 labels",
    }  # fmt: skip
    return dots(series, probes, "test accuracy (%)", levels)


def students() -> Canvas:
    """Draw MAE and distillation."""
    found = rows_of("students")
    teacher = single(found.pop("the teacher itself"))
    probes = {
        "ridge": "ridge regression, 20,000 labels", "few_shot": "ridge, 100 labels per class", "knn": "20-NN",
    }  # fmt: skip
    return dots({"": found}, probes, "test accuracy (%)", {"teacher": ("--", teacher)})


def continuations() -> Canvas:
    """Draw the differences of continued weights from the start."""
    titles = yaml.safe_load((tables.DOCS / "tables.yaml").read_text())["continuations"]["continued_signs"]["rows"]
    found: dict[str, dict[Any, list[float]]] = {title: defaultdict(list) for title in titles.values()}
    for row in tables.csv_rows("starting/rows.csv"):
        if (row["start"], row["images"]) == ("public", "signs") and row["method"] in titles and row["difference"]:
            found[titles[row["method"]]][row["measured_on"], row["probe"]].append(100 * float(row["difference"]))
    measured = {title: rows for title, rows in found.items() if rows}
    zero = dict.fromkeys(_CONTINUED, 0.0)
    return dots({"": measured}, _CONTINUED, "difference (points)", {"start": ("-", zero)})


def labels() -> Canvas:
    """Draw accuracy over the number of labels, with bands of the standard deviation, for each time of pre-training."""
    found: dict[int, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in tables.csv_rows("labels/photographs.csv"):
        found[int(row["minutes"])][row["start"]][int(row["labels"])].append(100 * float(row["accuracy"]))
    drawn = []
    for minutes, starts in sorted(found.items()):
        lines = []
        for start, (name, color, marker, dash) in _STARTS.items():
            if start not in starts:
                continue
            counts, seeds = zip(*sorted(starts[start].items()), strict=True)
            means, around = map(statistics.fmean, seeds), map(statistics.stdev, seeds)
            lines.append(Line(counts, [*means], name, color, dash, marker, size=5, around=[*around]))
        drawn.append(
            Panel(
                "top-1 on the test images (%)", lines, [Level(10.0, "chance", form="")], "labelled training images",
                f"CIFAR-10, {_PRETRAININGS[minutes]} pre-training", lines[0].x, log=True,
            )
        )  # fmt: skip
    return Plot(drawn, (4.5 * len(drawn), 4.3), legend="below", shared=True).draw()


def checksum(figure: Canvas) -> str:
    """Return a checksum of the drawn numbers, which the PNG file of a figure has as the text `data`."""
    drawn: list[Any] = [line.get_xydata().round(6).tolist() for axis in figure.axes for line in axis.lines]
    bands = (path for axis in figure.axes for band in axis.collections for path in band.get_paths())
    drawn += [path.vertices.round(6).tolist() for path in bands]
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


def figures() -> Iterator[tuple[str, Canvas]]:
    """Yield the name of each figure in docs/, and the figure."""
    yield "methods/cifar10.png", objectives()
    yield "distillation/results.png", students()
    yield "starting/continuation.png", continuations()
    yield "labels/photographs.png", labels()


if __name__ == "__main__":
    for name, figure in figures():
        (tables.DOCS / name).write_bytes(png(figure, {"data": checksum(figure)}))
