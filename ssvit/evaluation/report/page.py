"""Write the report of probes of frozen features: a self-contained HTML page, and JSON.

The last column of a probe is its headline metric. All text is escaped, since names and paths are arbitrary.
"""

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from ssvit import atomic_io
from ssvit.evaluation.report import side_by_side
from ssvit.evaluation.report.conclusion import higher_baseline
from ssvit.evaluation.report.scores import Scores
from ssvit.evaluation.report.side_by_side import SideBySide
from ssvit.evaluation.statistics import standard_error
from ssvit.figures.base import Figure, png
from ssvit.options import one_line

_CAPTIONS = {
    "side_by_side": "Every encoder by every probe; a line is the 95 % interval over the test images",
    "by_layer": "The last column of each table, over the encoder's layers",
    "by_column": "The chosen features and their baselines, in every column of each table",
    "confusion": "Which class is taken for which by one classifier; the title names it",
    "contact_sheet": "Images measured on, and the training images that are most like them; the cosine distance in "
    "percent of its median over the training images",
    "duplicates": "Images measured on (left) that are nearly the same as a training image (right); the cosine of both",
    "patches": "Images measured on, and the first three principal components of their patches' features as colours",
    "segmentation": "Images measured on, components of patches, masks, and the class that each pixel is taken for",
}
_BASELINES = (
    "Baselines: the same encoder with random weights, its layer chosen alike, and raw pixels. The table names "
    "the one with the higher score. Chance: the share of the most frequent class. After ± in this table: one standard "
    "error of an accuracy on so many images."
)
_SAMPLED = "After ± in these tables: the deviation over samples of labelled images."
_NONE = "\u2013"  # en dash for a missing value
_UNWRITTEN = ("probe", "predictions", "per_image")  # fields of the scores that are not written
_DOTS_AN_INCH = 100  # resolution of CSS pixels, for the size of figures


def write(
    folder: Path,
    *,
    facts: Mapping[str, object],
    scores: Sequence[Scores],
    own: Sequence[str],
    figures: Mapping[str, Figure],
    compared: SideBySide,
    conclusion: Sequence[str],
    commands: Sequence[str] = (),
) -> list[Path]:
    """Write report.html and report.json atomically and return their paths.

    Args:
        folder: Folder of the report.
        facts: Metadata of the evaluation as plain data, see `measured.facts`.
        scores: Results of the probes.
        own: Feature sets of the encoder.
        figures: Figures by name.
        compared: Comparison of the encoders.
        conclusion: Sentences of the conclusion.
        commands: Commands that use the chosen features.

    Raises:
        UserError: If the files cannot be written.
    """
    standings = compared.standings
    facts = _plain(facts)
    values = {
        "checkpoint": str(facts.get("checkpoint", "")),
        "data": data(facts),
        "headline": " ".join(conclusion),
        "summary": summary(scores),
        "baselines": _BASELINES,
        "sentences": compared.sentences(),
        "standings": side_by_side.table(standings) if standings else [],
        "method": side_by_side.METHOD,
        "sampled": _SAMPLED if any(any(row) for one in scores for row in one.deviations.values()) else "",
        "figures": [_inlined(name, figure) for name, figure in figures.items()],
        "probes": [
            {"title": one.title, "chosen": _chosen(one, own), "rows": _rows(one, own), "best": one.best}
            for one in scores
        ],
        "own": own,
        "commands": [one_line(one) for one in commands],
        # Metadata for reproduction.
        "facts": list(_flat({**facts, "near_duplicates": None} | _plain({one.probe: one.options for one in scores}))),
    }
    measured = [
        {"measure": one.probe} | {key: value for key, value in vars(one).items() if key not in _UNWRITTEN}
        for one in scores
    ]
    numbers = {"headline": values["headline"], "facts": facts, "own": own, "measured": measured}
    numbers["commands"] = values["commands"]
    numbers["side_by_side"] = {
        "entries": compared.groups,
        "sentences": values["sentences"],
        "method": side_by_side.METHOD,
        "standings": [asdict(one) for one in standings],
    }
    texts = {
        "report.html": _page(values),
        "report.json": json.dumps(_plain(numbers), indent=1) + "\n",
    }
    return atomic_io.write_files(folder, {name: text.encode() for name, text in texts.items()})


def data(facts: Mapping[str, Any]) -> list[str]:
    """Return sentences on the data: numbers of images and classes, copies and near-duplicates, and image sizes."""
    if "train_images" not in facts:
        return []
    copies, part, chance = facts["copies"]["test_images_in_train"], facts["measured_on"], facts["chance"]
    several = "any of " if facts.get("multi_label") else ""
    least = f"mAP of a random order {_score(chance)} %" if several else f"chance {_score(chance)} %"
    labels = "no labels" if chance is None else f"{several}{len(facts['classes'])} classes ({least})"
    counts = f"{facts['train_images']:,} training and {facts['test_images']:,} {part} images, {labels}"
    sentences = [f"{counts}; data: {facts['data']}"]
    if copies:
        examples = [f"{one['test']} is {one['train']}" for one in facts["copies"]["examples"]]
        more = ["…"] if copies > len(examples) else []
        sentences.append(
            f"{copies} of the {part} images stand among the training images too, pixel for pixel: "
            + ", ".join(examples + more)
        )
    if near := facts.get("near_duplicates"):
        count = near["test_images"]
        share = 100 * count / facts["test_images"]
        rest = "".join(f"; without them {name} {_score(value)} %" for name, value in near["without"].items())
        sentences.append(
            f"{count:,} of the {part} images ({share:.1f} %) are nearly the same as a training image{rest}"
        )
    for name, other in facts.get("against", {}).items():
        size, own = ("x".join(map(str, one["image_size"])) for one in (other, facts))
        if size != own:
            sentences.append(f"{name} sees the images in {size} pixels; the checkpoint sees them in {own}")
    return sentences


def summary(scores: Sequence[Scores]) -> list[list[str]]:
    """Return the results as a table: headings, and one row for each probe."""
    rows = [["probe", "% ± error", "chance %", "baseline %", "points", "chosen features", "baseline"]]
    for one in scores:
        baseline, gain = higher_baseline(one)
        value = one.values[one.best][-1]
        error = standard_error(value, one.images) if one.images and math.isfinite(value) else None
        numbers = (
            _score(value, error),
            _score(one.chance),
            _score(one.values[baseline][-1]) if baseline else _NONE,
            _NONE if gain is None else side_by_side.points(gain),
        )
        rows.append([one.title, *numbers, one.best, baseline or _NONE])
    return rows


def _rows(one: Scores, own: Sequence[str]) -> list[list[str]]:
    """Return a table of headings and one row for each feature set, the baselines last."""
    names = sorted(one.values, key=lambda name: own.index(name) if name in own else len(own))
    return [["%", *one.columns], *([name, *map(_score, one.values[name], one.deviations[name])] for name in names)]


def _score(share: float | None, deviation: float | None = None) -> str:
    """Format a share as a percentage without the sign: 0.523 -> 52.3."""
    if share is None or not math.isfinite(share):
        return _NONE
    return f"{100 * share:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}")


def _plain(value: object) -> Any:
    """Convert to JSON types: tuples to lists, paths to strings, non-finite numbers to None."""
    return json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)


def _flat(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested data as lines with names: {"a": {"b": [1, 2]}} -> a.b, "1, 2"."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else key)
    else:
        yield name, _text(value)


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _page(values: Mapping[str, object]) -> str:
    """Render the page, with each text on a single line; the output of macros is Markup and not changed."""
    environment = Environment(
        loader=PackageLoader("ssvit.evaluation.report"),
        autoescape=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )
    return environment.get_template("report.html.j2").render(values)


def _inlined(name: str, figure: Figure) -> dict[str, Any]:
    """Return a figure as base64 PNG with its size, caption and alternative text."""
    caption = _CAPTIONS.get(name, name.replace("_", " "))
    drawn = figure.draw()
    titles = [" ".join(axis.get_title(loc="left").split()) for axis in drawn.axes]
    width, height = (round(_DOTS_AN_INCH * side) for side in drawn.get_size_inches())
    return {
        "data": base64.b64encode(png(drawn)).decode(),
        "width": width,
        "height": height,
        "caption": caption,
        "alternative": "; ".join([caption, *filter(None, titles)]),
    }


def _chosen(one: Scores, own: Sequence[str]) -> str:
    if sum(name in own for name in one.values) == 1:
        return f"Of {one.best} alone."
    return f"Chosen: {one.best}, by {one.chosen_by}, without test labels."
