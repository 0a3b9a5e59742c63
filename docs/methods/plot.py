"""Draw the accuracies of all objectives on CIFAR-10 as cifar10.png: python docs/methods/plot.py"""

import json
import statistics
from pathlib import Path

import yaml

from ssvit.evaluation.statistics import of_seeds
from ssvit.figures.base import png
from ssvit.figures.style import COLORS, INK, PALE, panels

FOLDER = Path(__file__).parent
DOCS = FOLDER.parent
BUDGETS = {"6 CPU minutes": ("cifar10_6min", "replaced"), "29 CPU minutes": ("cifar10_29min", "model")}
PROBES = {
    "ridge": "ridge regression, 20,000 labels",
    "knn_standardized": "20-NN, standardised features",
    "finetuned": "fine-tuned, 5,000 labels",
}
BASELINES = {"random weights": "--", "pixels": ":", "no pre-training": "-."}


def rows(table: str) -> dict[str, list[dict[str, float]]]:
    """Return the accuracies of each objective of a table of tables.yaml, by probe and in percent, for each seed."""
    sources = dict(yaml.safe_load((DOCS / "tables.yaml").read_text())["accuracies"][table]["rows"])
    folder = sources.pop("all")
    names = {file.name.partition("_seed")[0] for file in (DOCS / folder).glob("*_seed*.json")}
    found = {}
    for label, source in (sources | {name: f"{folder}/{name}" for name in names}).items():
        directory, _, name = source.rpartition("/")
        seeds = [json.loads(file.read_text()) for file in sorted((DOCS / directory).glob(f"{name}_seed*.json"))]
        found[label.replace("`", "")] = [scores(row["probes"], row) for row in seeds]
    return found


def scores(probes: dict[str, dict[str, float]], row: dict[str, float]) -> dict[str, float]:
    """Return the accuracies of a row in percent, at the chosen layers."""
    tuned = {"finetuned": 100 * row["finetuned"]} if "finetuned" in row else {}
    return {name: 100 * probe["chosen"] for name, probe in probes.items()} | tuned


def main() -> None:
    """Draw a panel for each probe, with a line for each objective, a dot for each budget, and lines for baselines."""
    measured = {budget: rows(table) for budget, (table, _) in BUDGETS.items()}
    stored = json.loads((FOLDER / "cifar10_6min/baselines.json").read_text())
    levels = {name: scores(probes, {}) for name, probes in stored["baselines"].items()}
    levels["no pre-training"] = scores({}, stored)
    best: dict[str, float] = {}
    for found in measured.values():  # the longest budget determines the order
        best |= {name: statistics.fmean(seed["ridge"] for seed in seeds) for name, seeds in found.items()}
    order = sorted(best, key=lambda name: -best[name])
    figure, axes = panels(len(PROBES), 11.5, 5.2)
    for axis, (probe, title) in zip(axes, PROBES.items(), strict=True):
        for budget, found in measured.items():
            color = COLORS[BUDGETS[budget][1]]
            by_name = ([seed[probe] for seed in found.get(name, ()) if probe in seed] for name in order)
            dots = [(place, values) for place, values in enumerate(by_name) if values]
            axis.plot(
                [statistics.fmean(values) for _, values in dots], [place for place, _ in dots], "o", color=color,
                markersize=5, label=budget,
            )  # fmt: skip
            for place, values in dots:
                if interval := of_seeds(values, [0.0]):
                    axis.plot([interval.low, interval.high], [place, place], color=color, linewidth=2)
        for name, dash in BASELINES.items():
            if probe in levels[name]:
                axis.axvline(levels[name][probe], color=INK, linewidth=1, linestyle=dash, label=name, zorder=1)
        axis.set_yticks(range(len(order)), order if axis is axes[0] else [""] * len(order), fontsize=8)
        axis.tick_params(axis="y", length=0)
        axis.set_ylim(len(order) - 0.4, -0.6)
        axis.set_title(title, loc="left", fontsize=9)
        axis.set_xlabel("test accuracy (%)")
        axis.grid(color=PALE, linewidth=0.8)
        axis.spines[["top", "right", "left"]].set_visible(False)
    named = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend([*named.values()], [*named], loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    (FOLDER / "cifar10.png").write_bytes(png(figure))


if __name__ == "__main__":
    main()
