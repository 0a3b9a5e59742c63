"""What probes of frozen features found, to be read: a page of HTML that needs nothing beside it, Markdown, and JSON.

The last column of a probe stands for it. Names and paths may hold anything, so all that is written into a page is
escaped, and the page may load nothing.
"""

import base64
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader
from matplotlib.figure import Figure
from torch import Tensor

from ssvit import atomic_io
from ssvit.evaluation.neighbours import search
from ssvit.evaluation.scores import Scores, Split
from ssvit.evaluation.significance import NOTHING_YET
from ssvit.figures import classes
from ssvit.figures.contact_sheet import NEIGHBOURS, QUERIES, Neighbour, Row, contact_sheet
from ssvit.figures.feature_map import feature_map
from ssvit.figures.probes import by_column, by_layer
from ssvit.figures.segmentation import segmentation
from ssvit.figures.style import shown
from ssvit.options import UserError

_CAPTIONS = {
    "by_layer": "The last column of each table, over the encoder's layers",
    "by_column": "The chosen features and their baselines, in every column of each table",
    "confusion": "Which class is taken for which",
    "contact_sheet": "Images measured on, and the training images that are most like them",
    "feature_map": "Images with like features lie together",
    "segmentation": "Images measured on, their masks, and the class that each pixel is taken for",
}
_BASELINES = (
    "Baselines: the same encoder with random weights, and raw pixels. The best, of any layer, is to be beaten. "
    "Chance: the share of the most frequent class."
)
_NONE, _MINUS = "\u2013", "\u2212"  # a dash for what there is not, and the sign that is as wide as a plus
_NUMBERS = range(2, 6)  # columns of the summary
_SEGMENTED = 6  # images in a picture
_DOTS_AN_INCH = 100  # of CSS, for pictures
_MARKDOWN = re.compile(r"[\\`*\[\]<>&|~$#!]|(?<![^\W_])_|_(?![^\W_])")  # an underscore within a word has no meaning


def write(
    folder: Path,
    *,
    facts: Mapping[str, Any],
    scores: Sequence[Scores],
    own: Sequence[str],
    figures: Mapping[str, Figure],
) -> list[Path]:
    """Write report.html, report.md and report.json, each whole or not at all: their paths.

    facts: what was measured, how, by which versions, as plain data; checkpoint stands on top. own: the feature sets of
    the encoder; the others are baselines. UserError if the disk refuses.
    """
    facts = _plain(facts)
    texts = {
        "report.html": _page(facts, scores, own, figures),
        "report.md": _markdown(facts, scores, own),
        "report.json": _json(facts, scores, own),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            atomic_io.replace(folder / name, text.encode())
        atomic_io.synchronise(folder)
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be written ({error.strerror or error})") from None
    return [folder / name for name in texts]


def figures(splits: Mapping[str, Split], scores: Sequence[Scores]) -> dict[str, Figure]:
    """By name, of the split of each probe; images are shown by the features that k-NN has chosen, or else the first of
    the probes of whole images.
    """
    of_images = [found for found in scores if splits[found.probe].test.masks is None]
    made = {"by_column": by_column(scores)}
    if of_images:
        split = splits[of_images[0].probe]
        chosen = next((found for found in of_images if found.probe == "knn"), of_images[0]).best
        if len(split.own) > 1:
            made = {"by_layer": by_layer(of_images, split.own)} | made
        for found in of_images:
            if found.predictions is not None:
                made["confusion"] = confusion(split, found.predictions)
        made["contact_sheet"] = neighbours(split, chosen)
        made["feature_map"] = feature_map(split.test.values[chosen], split.test.labels, split.classes)
    for found in scores:
        if splits[found.probe].test.masks is not None and found.predictions is not None:
            made["segmentation"] = segmented(splits[found.probe], found.predictions)
    return made


def segmented(split: Split, predictions: Tensor) -> Figure:
    """A few test images, evenly from all, with their masks and predictions (m, h, w)."""
    test = split.test
    rows = torch.arange(min(_SEGMENTED, len(test))) * len(test) // min(_SEGMENTED, len(test))
    return segmentation(test.images(rows, split.eval_transform), test.masks[rows], predictions[rows])


def confusion(split: Split, predictions: Tensor) -> Figure:
    """Which class is taken for which."""
    truth, k = split.test.labels, len(split.classes)
    counts = torch.bincount(truth * k + predictions.cpu(), minlength=k * k).view(k, k)
    accuracy = counts.trace().item() / len(truth)
    return classes.confusion(counts, split.classes, accuracy=accuracy, part=split.part)


def neighbours(split: Split, name: str) -> Figure:
    """Test images, evenly from all classes, and the training images whose features of a name are most like theirs."""
    train, test = split.train, split.test
    by_class = test.labels.argsort(stable=True)
    rows = by_class[torch.arange(min(QUERIES, len(test))) * len(test) // min(QUERIES, len(test))]
    nearest = search(test.values[name][rows], train.values[name], min(NEIGHBOURS, len(train)))
    sheet = []
    for image, label, similarities, places in zip(
        test.images(rows, split.eval_transform),
        test.labels[rows].tolist(),
        nearest.similarities.tolist(),
        nearest.indices,
        strict=True,
    ):
        labels, images = train.labels[places].tolist(), train.images(places, split.eval_transform)
        alike = [
            Neighbour(picture, similarity, split.classes[own], own == label)
            for picture, similarity, own in zip(images, similarities, labels, strict=True)
        ]
        sheet.append(Row(image, split.classes[label], alike))
    return contact_sheet(sheet)


def headline(scores: Sequence[Scores], own: Sequence[str]) -> str:
    """In a sentence or two: do the chosen features beat the best baseline, and by how many percentage points; which are
    not above chance, so that they tell nothing.
    """
    silent = [found for found in scores if not found.tells]
    telling = [found for found in scores if found.tells]
    nothing = ", ".join(f"{_named(found)} (chance {_score(found.chance)} %)" for found in silent)
    nothing = nothing and f"{nothing}: not {NOTHING_YET}."
    gains = {_words(found.probe): gain for found in telling if (gain := _gain(found, own)) is not None}
    if gains:
        beaten = sum(gain > 0 for gain in gains.values())
        how_many = {len(gains): "each probe", 0: "no probe"}.get(beaten, f"{beaten} of {len(gains)} probes")
        points = ", ".join(f"{name} {_signed(gain)}" for name, gain in gains.items())
        told = f"The encoder's features beat the best baseline by {how_many}: {points} percentage points."
    elif telling:
        told = f"No baseline was measured beside the encoder's features: {', '.join(map(_named, telling))}."
    else:
        return nothing
    return f"{told} {nothing}".rstrip()


def summary(scores: Sequence[Scores], own: Sequence[str]) -> list[list[str]]:
    """The headline as a table: headings, and a row for each probe."""
    rows = [["probe", "column", "%", "chance %", "baseline %", "points", "chosen features", "best baseline"]]
    for found in scores:
        baseline, gain = _baseline(found, own), _gain(found, own)
        scores = [_score(found.values[name][-1]) if name else _NONE for name in (found.best, baseline)]
        chance = _NONE if found.chance is None else _score(found.chance)
        scores.insert(1, chance)
        points = _NONE if gain is None else _signed(gain)
        rows.append([_words(found.probe), found.columns[-1], *scores, points, found.best, baseline or _NONE])
    return rows


def _named(found: Scores) -> str:
    return f"{_words(found.probe)} {_score(found.values[found.best][-1])} %"


def _baseline(found: Scores, own: Sequence[str]) -> str | None:
    """The best of the baselines, whichever layer it is of: what is to be beaten is not to be weak by chance."""
    others = [name for name, row in found.values.items() if name not in own and math.isfinite(row[-1])]
    return max(others, key=lambda name: found.values[name][-1], default=None)


def _gain(found: Scores, own: Sequence[str]) -> float | None:
    """In percentage points, rounded as it is written, so that +0.0 beats nothing; None if it cannot be told."""
    baseline = _baseline(found, own)
    gain = found.values[found.best][-1] - found.values[baseline][-1] if baseline else math.nan
    return round(100 * gain, 1) if math.isfinite(gain) else None


def _rows(found: Scores, own: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each feature set and its cells, the baselines last."""
    for name in sorted(found.values, key=lambda name: own.index(name) if name in own else len(own)):
        yield name, [_score(*pair) for pair in zip(found.values[name], found.deviations[name], strict=True)]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _score(share: float, deviation: float | None = None) -> str:
    """0.523 -> 52.3, of a hundred."""
    if not math.isfinite(share):
        return _NONE
    return f"{100 * share:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}")


def _signed(points: float) -> str:
    return f"{points:+.1f}".replace("-", _MINUS)


def _plain(value: Any) -> Any:
    """As JSON has it: no tuples, no paths, no numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Plain data as named lines: {"a": {"b": [1, 2]}} -> a.b, "1, 2"."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else key)
    else:
        yield name, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _facts(facts: Any, scores: Sequence[Scores]) -> list[tuple[str, str]]:
    """All that is known of how the numbers came about."""
    return list(_flat(facts | {found.probe: _plain(found.options) for found in scores}))


def _json(facts: Any, scores: Sequence[Scores], own: Sequence[str]) -> str:
    report = {
        "headline": headline(scores, own),
        "facts": facts,
        "own": list(own),
        "measured": [_plain(_numbers(found)) for found in scores],
    }
    return json.dumps(report, indent=1, allow_nan=False) + "\n"


def _numbers(found: Scores) -> dict[str, Any]:
    numbers = {name: value for name, value in vars(found).items() if name not in ("probe", "predictions")}
    return {"measure": found.probe, **numbers}


def _markdown(facts: Any, scores: Sequence[Scores], own: Sequence[str]) -> str:
    def escape(text: str) -> str:
        return _MARKDOWN.sub(r"\\\g<0>", shown(text))

    def table(rows: Sequence[Sequence[str]], numbers: range) -> list[str]:
        lines = [f"| {' | '.join(row)} |" for row in rows]
        rule = "".join("---:|" if place in numbers else "---|" for place in range(len(rows[0])))
        return [lines[0], f"|{rule}", *lines[1:], ""]

    rows = [[escape(cell) for cell in row] for row in summary(scores, own)]
    lines = ["# Frozen features", "", escape(headline(scores, own)), "", *table(rows, _NUMBERS), _BASELINES, ""]
    for found in scores:
        rows = [["%", *map(escape, found.columns)]]
        for name, cells in _rows(found, own):
            row = [escape(name), *cells]
            rows.append([f"**{cell}**" for cell in row] if name == found.best else row)
        lines += [f"## {escape(_words(found.probe))}", "", escape(_chosen(found, own)), ""]
        lines += table(rows, range(1, len(rows[0])))
    named = _facts(facts, scores)
    return "\n".join([*lines, "## Facts", "", *(f"- {escape(name)}: {escape(text)}" for name, text in named), ""])


def _page(facts: Any, scores: Sequence[Scores], own: Sequence[str], figures: Mapping[str, Figure]) -> str:
    # Names are one line of text wherever they stand; a table, which is Markup, is none.
    page = Environment(
        loader=PackageLoader("ssvit.evaluation"),
        autoescape=True,
        finalize=lambda value: shown(value) if type(value) is str else value,
    ).get_template("report.html.j2")
    probes = [
        {
            "title": _words(found.probe),
            "chosen": _chosen(found, own),
            "head": ["%", *found.columns],
            "rows": [[name, *cells] for name, cells in _rows(found, own)],
            "kinds": {name: "" if name in own else "baseline" for name in found.values} | {found.best: "best"},
        }
        for found in scores
    ]
    return page.render(
        checkpoint=str(facts.get("checkpoint", "")),
        headline=headline(scores, own),
        summary=summary(scores, own),
        numbers=_NUMBERS,
        baselines=_BASELINES,
        figures=[_inlined(name, figure) for name, figure in figures.items()],
        probes=probes,
        facts=_facts(facts, scores),
    )


def _inlined(name: str, figure: Figure) -> dict[str, Any]:
    """A figure as PNG in base64, its size and caption, and what is to be seen, by its axes' titles."""
    png = io.BytesIO()
    figure.savefig(png, format="png")
    caption = _CAPTIONS.get(name, _words(name))
    titles = [" ".join(axis.get_title(loc="left").split()) for axis in figure.axes]
    width, height = (round(_DOTS_AN_INCH * side) for side in figure.get_size_inches())
    return {
        "data": base64.b64encode(png.getvalue()).decode(),
        "width": width,
        "height": height,
        "caption": caption,
        "alternative": "; ".join([caption, *filter(None, titles)]),
    }


def _chosen(found: Scores, own: Sequence[str]) -> str:
    if sum(name in own for name in found.values) == 1:
        return f"Of {found.best} alone."
    return f"Chosen: {found.best}, by {found.chosen_by}, without test labels."
