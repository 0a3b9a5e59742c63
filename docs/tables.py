"""Write the tables of measured results into the pages, from the stored rows: python docs/tables.py

A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->` of a page of docs/ or of records/README.md.
NAME is a CSV file in docs/, whose cells are copied, or a table of tables.yaml. A test compares the pages with the rows.
"""

import csv
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from glob import glob
from pathlib import Path
from typing import Any

import yaml

from ssvit.evaluation.statistics import of_seeds
from ssvit.studies import methods, scaling
from ssvit.studies.methods import markdown, mean_std

DOCS = Path(__file__).parent
RECORDS = DOCS.parent / "records"
PAGES = [*sorted(DOCS.rglob("*.md")), RECORDS / "README.md"]
MARKED = re.compile(r"(?<=<!-- table: )(\S+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
PROBES = {
    "ridge": "ridge regression (all labels)", "few_shot": "100 labels per class",
    "few_shot_big_vision": "25 labels per class", "logistic": "logistic regression", "knn": "20-NN",
    "knn_standardized": "20-NN (standardised)", "finetuned": "fine-tuned",
}  # fmt: skip
INTERVAL = "mean difference, 95 % interval over seeds"
BASELINES = ("random weights", "pixels", "no pre-training")


def generate(page: str) -> str:
    """Return the text of a page with its tables."""
    return MARKED.sub(lambda match: f"{match[1]}{match[2]}\n{table(match[1])}\n\n", page)


def table(name: str) -> str:
    if name.endswith(".csv"):
        return markdown(list(csv_rows(name, csv.reader)))
    for make, tables in yaml.safe_load((DOCS / "tables.yaml").read_text()).items():
        if name in tables:
            return markdown(MAKE[make](**tables[name]))
    raise KeyError(name)


def csv_rows(name: str, reader: Any = csv.DictReader) -> Any:
    return reader((DOCS / name).read_text().splitlines())


def accuracies(
    rows: dict[str, str], probes: list[str] | None = None, *, costs: bool = True, titles: dict[str, str] = PROBES
) -> list[list[str]]:
    """Return mean and standard deviation over the seeds of the rows in `sources`."""
    tuned = "finetuned" in (probes or PROBES)
    spent = ["steps of 64", "CPU s a step", "seeds"] if costs else []
    lines = [["method", *spent, *((PROBES | titles)[probe] for probe in probes or PROBES)]]
    for label, source in sources(rows).items():
        if label == "no pre-training" and not tuned:
            continue
        seeds = read(source)
        if costs:
            stages = seeds[0].get("stages", ())
            steps = " + ".join(f"{stage['steps']:,}" for stage in stages)
            spent = [steps, " + ".join(f"{stage['cpu_seconds']:.3f}" for stage in stages), str(len(seeds))]
        cells = [mean_std([values(row)[probe] for row in seeds if probe in values(row)]) for probe in probes or PROBES]
        lines.append([label, *spent, *cells])
    return lines


def sources(rows: dict[str, str]) -> dict[str, str]:
    """Return the sources of rows by label; with a folder, its objectives descend by ridge regression."""
    found = {label: source for label, source in rows.items() if label != "all"}
    if folder := rows.get("all"):
        names = sorted({file.name.partition("_seed")[0] for file in (DOCS / folder).glob("*_seed*.json")})
        found |= {f"`{name}`": f"{folder}/{name}" for name in names}
        ridge = {label: statistics.fmean(values(row)["ridge"] for row in read(found[label])) for label in found}
        found = dict(sorted(found.items(), key=lambda item: -ridge[item[0]]))
        found |= {name: f"{folder}/{name}" for name in BASELINES}
    return found


def read(source: str) -> list[dict[str, Any]]:
    """Return the rows of an objective or baseline, one for each seed, or for each fold if the folder is fold*."""
    folder, _, name = source.rpartition("/")
    if name == "teacher":
        return [{"probes": methods.probes(json.loads((DOCS / folder / "teacher.json").read_text()))}]
    stored = f"{folder}/baselines.json" if name in BASELINES else f"{folder}/{name}_seed*.json"
    rows = [json.loads((DOCS / file).read_text()) for file in sorted(glob(stored, root_dir=DOCS))]
    if name not in BASELINES:
        return rows
    if name == "no pre-training":
        return [{"probes": {}, "finetuned": row["finetuned"]} for row in rows]
    return [{"probes": row["baselines"][name]} for row in rows]


def values(row: dict[str, Any]) -> dict[str, Any]:
    """Return the accuracies of a row by probe, at the chosen layers."""
    return {name: probe["chosen"] for name, probe in row["probes"].items()} | row


def continuations(images: str, other: str, rows: dict[str, str]) -> list[list[str]]:
    """Return mean differences from the start in points, with their range; bold if each seed's interval excludes 0."""
    found: dict[Any, list[list[float]]] = defaultdict(list)
    for row in csv_rows("starting/rows.csv"):
        if (row["start"], row["images"]) == ("public", images) and row["difference"]:
            points = [100 * float(row[name]) for name in ("difference", "low", "high")]
            found[row["method"], row["measured_on"], row["probe"]].append(points)
    ridge, knn = "ridge regression (all labels)", "20-NN (standardised features)"
    columns = [("target", ridge), ("target", "ridge regression (5 labels per class)"), ("target", knn), ("other", knn)]
    lines = [["method", "seeds", ridge, "5 labels per class", "20-NN (standardised)", f"{other} afterwards: 20-NN"]]
    for method, label in rows.items():
        if seeds := len(found[method, "target", ridge]):
            lines.append([label, str(seeds), *(differences(found[method, *column]) for column in columns)])
    return lines


def differences(seeds: list[list[float]]) -> str:
    means = [mean for mean, _, _ in seeds]
    if not means:
        return ""
    mean = signed(statistics.fmean(means))
    text = f"**{mean}**" if all(low > 0 for _, low, _ in seeds) or all(high < 0 for _, _, high in seeds) else mean
    return f"{text} ({signed(min(means))} to {signed(max(means))})" if len(means) > 1 else text


def signed(points: float) -> str:
    return "0.0" if abs(points) < 0.05 else f"{points:+.1f}".replace("-", "\u2212")


def labels(file: str, minutes: int) -> list[list[str]]:
    """Return accuracies over the number of labels, and the differences of pre-training and training from scratch."""
    found: dict[int, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in csv_rows(file):
        if int(row["minutes"]) == minutes:
            found[int(row["labels"])][row["start"]][row["seed"]] = float(row["accuracy"])
    lines = [["labels", "pre-training", "seeds", "accuracy", "from scratch", "difference of each seed", INTERVAL]]
    for count, starts in sorted(found.items()):
        scratch = starts.pop("scratch")
        for start, tuned in sorted(starts.items()):
            apart = [tuned[seed] - scratch[seed] for seed in sorted(tuned)]
            each = ", ".join(signed(100 * value) for value in apart)
            accuracies = [mean_std([*column.values()]) for column in (tuned, scratch)]
            name = "`mae`, frozen features" if start == "frozen" else f"`{start}`"
            lines.append([f"{count:,}", name, str(len(tuned)), *accuracies, each, over_seeds(apart)])
    return lines


def more_labels(titles: dict[str, str]) -> list[list[str]]:
    """Return the accuracies of fine-tuning over the number of labels, and their differences from fewer labels."""
    found: dict[tuple[str, str], dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    photographs = (row for row in csv_rows("labels/photographs.csv") if row["minutes"] == "6")
    for row in [*csv_rows("finetuning/labels.csv"), *photographs]:
        if weights := row.get("weights") or {"mae": "own", "scratch": "random"}.get(row["start"]):
            found[row["images"], weights][int(row["labels"])][int(row["seed"])] = float(row["accuracy"])
    lines = [["images", "weights", "labels", "seeds", "accuracy", f"fewer labels: {INTERVAL}"]]
    for (images, weights), by_labels in sorted(found.items()):
        fewer: dict[int, float] = {}
        for labels, seeds in sorted(by_labels.items()):
            gain = over_seeds([seeds[seed] - fewer[seed] for seed in seeds.keys() & fewer]) if fewer else ""
            cells = [f"{labels:,}", str(len(seeds)), mean_std(list(seeds.values())), gain]
            lines.append([titles[images], titles.get(weights, weights), *cells])
            fewer = seeds
    return lines


def over_seeds(values: list[float], subtracted: list[float] | None = None) -> str:
    """Return the mean of differences, or the difference of two means, in points, with its 95 % interval over seeds."""
    mean = statistics.fmean(values) - statistics.fmean(subtracted or [0])
    mean, *limits = (signed(100 * value) for value in (mean, *(of_seeds(values, subtracted) or ())))
    return f"{mean} ({' to '.join(limits)})" if limits else mean


def paired(values: Iterable[float], subtracted: Iterable[float]) -> str:
    return over_seeds([value - other for value, other in zip(values, subtracted, strict=True)])


def compared(
    rows: dict[str, list[str]], probes: list[str], *, folds: bool = False, titles: dict[str, str] = PROBES
) -> list[list[str]]:
    """Return the differences between the accuracies of two methods, with 95 % intervals over seeds by Welch's test.

    With folds, differences are paired and their intervals are those of the t distribution.
    """
    lines = [["difference", "folds" if folds else "seeds", *((PROBES | titles)[probe] for probe in probes)]]
    for label, pair in rows.items():
        sides = [[values(row) for row in read(source)] for source in pair]
        counts = " and ".join(str(len(side)) for side in sides[: 1 if folds else 2])
        columns = ([[row[name] for row in side] for side in sides] for name in probes)
        lines.append([label, counts, *((paired if folds else over_seeds)(*column) for column in columns)])
    return lines


def scaling_effects(folder: str, effects: dict[str, list[int]]) -> list[list[str]]:
    """Return the differences between two values of each axis, paired and averaged over the values of the other axes."""
    grid = scaling.points(methods.read_rows(DOCS / folder))
    lines = [["objective", "measure", *(f"{axis}: {low:,} to {high:,}" for axis, (low, high) in effects.items())]]
    for objective in dict.fromkeys(point["objective"] for point in grid):
        own = [point for point in grid if point["objective"] == objective]
        for name in own[0]["scores"]:
            cells = []
            for axis, ends in effects.items():
                low, high = ([point["scores"][name] for point in own if point[axis] == end] for end in ends)
                cells.append(paired(high, low))
            lines.append([objective, name, *cells])
    return lines


def segmentation(file: str) -> list[list[str]]:
    """Return the mIoU of each encoder, start and head over the seeds."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    columns = ("encoder", "start", "trained", "head", "steps")
    for row in csv_rows(file):
        found[tuple(row[name] for name in columns)].append(float(row["miou"]))
    cells = ([*names, str(len(values)), mean_std(values)] for names, values in found.items())
    return [[*columns, "seeds", "mIoU (%)"], *cells]


def record(file: str) -> list[list[str]]:
    """Return the entries of the speed record by track, with their costs and accuracies."""
    probes = ("ridge", "knn_standardized", "finetuned")
    lines = [["track", "date", "recipe", "seeds", "CPU min", "10^15 operations", *map(PROBES.get, probes), "commit"]]
    for track, entries in yaml.safe_load((RECORDS / file).read_text()).items():
        for entry in entries:
            seeds = read(f"../{entry['rows']}")
            seconds, flops, _ = methods.total(seeds[0]["stages"]).values()
            cells = [mean_std([values(row)[probe] for row in seeds if probe in values(row)]) for probe in probes]
            spent = [str(len(seeds)), f"{seconds / 60:.1f}", f"{flops / 1e15:.2f}"]
            lines.append([track, str(entry["date"]), entry["change"], *spent, *cells, entry["commit"]])
    return lines


MAKE = {
    "accuracies": accuracies, "continuations": continuations, "scaling_effects": scaling_effects,
    "labels": labels, "record": record, "segmentation": segmentation, "more_labels": more_labels, "compared": compared,
}  # fmt: skip

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(generate(page.read_text()))
