"""What measures of frozen features found, to be read: a page of HTML that needs nothing beside it, Markdown, and JSON.

The last column of a measure stands for it. Names and paths may hold anything, so all that is written into a page is
escaped, and the page may load nothing.
"""

import base64
import html
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from matplotlib.figure import Figure

from ssvit import atomic_io
from ssvit.evaluation.measured import Measured
from ssvit.evaluation.significance import NOTHING_YET
from ssvit.figures.style import shown
from ssvit.options import UserError

_CAPTIONS = {
    "by_layer": "The last column of each table, over the encoder's layers",
    "by_column": "The chosen features and their baselines, in every column of each table",
    "confusion": "Which class is taken for which",
    "contact_sheet": "Images measured on, and the training images that are most like them",
    "feature_map": "Images with like features lie together",
}
_BASELINES = (
    "Baselines: the same encoder with random weights, and raw pixels. The best, of any layer, is to be beaten. "
    "Chance: the share of the most frequent class."
)
_NONE, _MINUS = "\u2013", "\u2212"  # a dash for what there is not, and the sign that is as wide as a plus
_NUMBERS = range(2, 6)  # columns of the summary
_DOTS_AN_INCH = 100  # of CSS, for pictures
_MARKDOWN = re.compile(r"[\\`*\[\]<>&|~$#!]|(?<![^\W_])_|_(?![^\W_])")  # an underscore within a word has no meaning


def write(
    folder: Path,
    *,
    facts: Mapping[str, Any],
    measured: Sequence[Measured],
    own: Sequence[str],
    figures: Mapping[str, Figure],
) -> list[Path]:
    """Write report.html, report.md and report.json, each whole or not at all: their paths.

    facts: what was measured, how, by which versions, as plain data; checkpoint stands on top. own: the feature sets of
    the encoder; the others are baselines. UserError if the disk refuses.
    """
    facts = _plain(facts)
    texts = {
        "report.html": _page(facts, measured, own, figures),
        "report.md": _markdown(facts, measured, own),
        "report.json": _json(facts, measured, own),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            atomic_io.replace(folder / name, text.encode())
        atomic_io.synchronise(folder)
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be written ({error.strerror or error})") from None
    return [folder / name for name in texts]


def headline(measured: Sequence[Measured], own: Sequence[str]) -> str:
    """In a sentence or two: do the chosen features beat the best baseline, and by how many percentage points; which are
    not above chance, so that they tell nothing.
    """
    silent = [found for found in measured if not found.tells]
    telling = [found for found in measured if found.tells]
    nothing = ", ".join(f"{_named(found)} (chance {_score(found.chance)} %)" for found in silent)
    nothing = nothing and f"{nothing}: not {NOTHING_YET}."
    gains = {_words(found.measure): gain for found in telling if (gain := _gain(found, own)) is not None}
    if gains:
        beaten = sum(gain > 0 for gain in gains.values())
        how_many = {len(gains): "each measure", 0: "no measure"}.get(beaten, f"{beaten} of {len(gains)} measures")
        points = ", ".join(f"{name} {_signed(gain)}" for name, gain in gains.items())
        told = f"The encoder's features beat the best baseline by {how_many}: {points} percentage points."
    elif telling:
        told = f"No baseline was measured beside the encoder's features: {', '.join(map(_named, telling))}."
    else:
        return nothing
    return f"{told} {nothing}".rstrip()


def summary(measured: Sequence[Measured], own: Sequence[str]) -> list[list[str]]:
    """The headline as a table: headings, and a row for each measure."""
    rows = [["measure", "column", "%", "chance %", "baseline %", "points", "chosen features", "best baseline"]]
    for found in measured:
        baseline, gain = _baseline(found, own), _gain(found, own)
        scores = [_score(found.values[name][-1]) if name else _NONE for name in (found.best, baseline)]
        chance = _NONE if found.chance is None else _score(found.chance)
        scores.insert(1, chance)
        points = _NONE if gain is None else _signed(gain)
        rows.append([_words(found.measure), found.columns[-1], *scores, points, found.best, baseline or _NONE])
    return rows


def _named(found: Measured) -> str:
    return f"{_words(found.measure)} {_score(found.values[found.best][-1])} %"


def _baseline(found: Measured, own: Sequence[str]) -> str | None:
    """The best of the baselines, whichever layer it is of: what is to be beaten is not to be weak by chance."""
    others = [name for name, row in found.values.items() if name not in own and math.isfinite(row[-1])]
    return max(others, key=lambda name: found.values[name][-1], default=None)


def _gain(found: Measured, own: Sequence[str]) -> float | None:
    """In percentage points, rounded as it is written, so that +0.0 beats nothing; None if it cannot be told."""
    baseline = _baseline(found, own)
    gain = found.values[found.best][-1] - found.values[baseline][-1] if baseline else math.nan
    return round(100 * gain, 1) if math.isfinite(gain) else None


def _rows(found: Measured, own: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each feature set and its cells, the baselines last."""
    for name in (*own, *(name for name in found.values if name not in own)):
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


def _facts(facts: Any, measured: Sequence[Measured]) -> list[tuple[str, str]]:
    """All that is known of how the numbers came about."""
    return list(_flat(facts | {found.measure: _plain(found.options) for found in measured}))


def _json(facts: Any, measured: Sequence[Measured], own: Sequence[str]) -> str:
    report = {
        "headline": headline(measured, own),
        "facts": facts,
        "own": list(own),
        "measured": [_plain(vars(found)) for found in measured],
    }
    return json.dumps(report, indent=1, allow_nan=False) + "\n"


def _markdown(facts: Any, measured: Sequence[Measured], own: Sequence[str]) -> str:
    def escape(text: str) -> str:
        return _MARKDOWN.sub(r"\\\g<0>", shown(text))

    def table(rows: Sequence[Sequence[str]], numbers: range) -> list[str]:
        lines = [f"| {' | '.join(row)} |" for row in rows]
        rule = "".join("---:|" if place in numbers else "---|" for place in range(len(rows[0])))
        return [lines[0], f"|{rule}", *lines[1:], ""]

    rows = [[escape(cell) for cell in row] for row in summary(measured, own)]
    lines = ["# Frozen features", "", escape(headline(measured, own)), "", *table(rows, _NUMBERS), _BASELINES, ""]
    for found in measured:
        rows = [["%", *map(escape, found.columns)]]
        for name, cells in _rows(found, own):
            row = [escape(name), *cells]
            rows.append([f"**{cell}**" for cell in row] if name == found.best else row)
        lines += [f"## {escape(_words(found.measure))}", "", escape(_chosen(found, own)), ""]
        lines += table(rows, range(1, len(rows[0])))
    named = _facts(facts, measured)
    return "\n".join([*lines, "## Facts", "", *(f"- {escape(name)}: {escape(text)}" for name, text in named), ""])


def _page(facts: Any, measured: Sequence[Measured], own: Sequence[str], figures: Mapping[str, Figure]) -> str:
    tables = []
    for found in measured:
        kinds = {name: "" if name in own else "baseline" for name in found.values} | {found.best: "best"}
        rows = [["%", *found.columns], *([name, *cells] for name, cells in _rows(found, own))]
        drawn = _table(rows, range(1, len(rows[0])), ["", *(kinds[row[0]] for row in rows[1:])])
        tables.append(f"<h3>{_escape(_words(found.measure))}</h3>\n<p>{_escape(_chosen(found, own))}</p>\n{drawn}")
    named = _facts(facts, measured)
    rows = summary(measured, own)
    return _PAGE.substitute(
        checkpoint=_escape(str(facts.get("checkpoint", ""))),
        headline=_escape(headline(measured, own)),
        summary=_table(rows, _NUMBERS, [""] * len(rows)),
        baselines=_BASELINES,
        figures="\n".join(_inlined(name, figure) for name, figure in figures.items()),
        tables="\n".join(tables),
        facts="\n".join(f"<dt>{_escape(name)}</dt><dd>{_escape(text)}</dd>" for name, text in named),
    )


def _escape(text: str) -> str:
    return html.escape(shown(text))


def _table(rows: Sequence[Sequence[str]], numbers: range, kinds: Sequence[str]) -> str:
    """The first row and the first column are headings; kinds: the class of each row."""
    drawn = []
    for place, (kind, row) in enumerate(zip(kinds, rows, strict=True)):
        cells = []
        for column, cell in enumerate(row):
            tag = "td" if place and column else "th"
            align = ' class="number"' if column in numbers else ""
            cells.append(f"<{tag}{align}>{_escape(cell)}</{tag}>")
        drawn.append(f'<tr class="{kind}">{"".join(cells)}</tr>')
    head, *body = drawn
    inner = f"<thead>{head}</thead><tbody>\n" + "\n".join(body) + "\n</tbody>"
    return f'<div class="wide" tabindex="0"><table>{inner}</table></div>'


def _inlined(name: str, figure: Figure) -> str:
    """A figure as PNG within the page; its axes' titles say in words what is to be seen."""
    png = io.BytesIO()
    figure.savefig(png, format="png")
    caption = _CAPTIONS.get(name, _words(name))
    titles = [" ".join(axis.get_title(loc="left").split()) for axis in figure.axes]
    alternative = _escape("; ".join([caption, *filter(None, titles)]))
    width, height = (round(_DOTS_AN_INCH * side) for side in figure.get_size_inches())
    data = base64.b64encode(png.getvalue()).decode()
    return (
        f'<figure><div class="wide" tabindex="0"><img src="data:image/png;base64,{data}" width="{width}" '
        f'height="{height}" alt="{alternative}"></div><figcaption>{_escape(caption)}</figcaption></figure>'
    )


def _chosen(found: Measured, own: Sequence[str]) -> str:
    if len(own) == 1:
        return f"Of {found.best} alone."
    return f"Chosen: {found.best}, by {found.chosen_by}, without test labels."


_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>Frozen features: $checkpoint</title>
<style>
:root { color-scheme: light dark; --ink: #222; --soft: #666; --line: #ddd; --paper: #fff; --best: #e3eff8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --soft: #a2a2a2; --line: #3c3c3c; --paper: #181a1c; --best: #1d3a50; }
}
body { margin: 0 auto; max-width: 70rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1, h2, h3 { line-height: 1.2; margin: 2rem 0 0.5rem; }
h1 { margin-top: 0.5rem; }
p { margin: 0.5rem 0; max-width: 45rem; }
.checkpoint, figcaption, dt, .baseline { color: var(--soft); }
.headline { font-size: 1.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 0.2rem 0.5rem; text-align: left; font-weight: inherit; white-space: nowrap; }
thead { border-bottom: 2px solid var(--line); font-weight: 600; }
tbody tr { border-bottom: 1px solid var(--line); }
tr { background: var(--paper); }
th:first-child { position: sticky; left: 0; background: inherit; }
.number { text-align: right; }
.best { background: var(--best); font-weight: 600; }
figure { margin: 1rem 0 2rem; }
figure .wide { width: fit-content; max-width: 100%; background: #fff; }
img { display: block; height: auto; max-width: max(100%, 45rem); }
figcaption { margin-top: 0.3rem; }
dt { margin-top: 0.4rem; }
dd { margin: 0; }
summary { cursor: pointer; font-size: 1.5rem; font-weight: 600; margin-top: 2rem; }
</style>
</head>
<body>
<h1>Frozen features</h1>
<p class="checkpoint">$checkpoint</p>
<p class="headline">$headline</p>
$summary
<p>$baselines</p>
<h2>Figures</h2>
$figures
<h2>Tables</h2>
$tables
<details><summary>Facts</summary><dl>
$facts
</dl></details>
</body>
</html>
""")
