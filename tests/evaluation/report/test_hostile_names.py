"""Names of classes, files and sets are shown as they are: no HTML, Markdown, mathematics, escapes or references."""

import csv
import json
import re

import numpy as np
import pytest
import torch
from command import tiny_options
from PIL import Image
from plots import Page
from test_report import METADATA

from ssvit.cli import predict
from ssvit.errors import UserError, markdown, one_line
from ssvit.evaluation.report import page as report
from ssvit.exchange import card
from ssvit.exchange.options import Export
from ssvit.figures import contact_sheet
from ssvit.figures.base import png
from ssvit.figures.intervals import Dot, Intervals
from ssvit.figures.matrices import Confusion
from ssvit.figures.pictures import Gallery, Mosaic, Picture
from ssvit.figures.plot import Line, Panel, Plot
from ssvit.figures.style import fitted
from ssvit.models.vit_options import ViT
from ssvit.studies import table
from ssvit.studies.comparison import FinalScore

NAMES = (
    "<img src=x onerror=alert(1)>", r"$\frac{$", "$x^2$", "red\x1b[31m\x1b]0;title\x07", "right\u202egpj.exe",
    "\u200f\u2066marks", "two\nlines", "_hidden[a](b)|*", "${oc.env:HOME}", "\udcff\udcfebytes", '=1+1,"q"',
)  # fmt: skip
IMAGE = torch.zeros(3, 8, 8)
named = pytest.mark.parametrize("name", NAMES, ids=ascii)


LINES = [Line([0, 1], [0, 1], f"a head of {name}") for name in NAMES]
PAIRS = [*zip(NAMES[:6], NAMES[5:], strict=True)]  # a sheet has at most eight queries
# A figure of each kind that shows names.
FIGURES = {
    "confusion": Confusion(torch.eye(len(NAMES)), NAMES, f"{NAMES[1]}\naccuracy"),
    "intervals": Intervals({"probe": [Dot(name, (0.1, 0.2), 0.15) for name in NAMES]}, {}),
    "queries": contact_sheet.contact_sheet(
        [[contact_sheet.query(IMAGE, one), contact_sheet.neighbour(IMAGE, 0.5, other)] for one, other in PAIRS]
    ),
    "neighbours": contact_sheet.contact_sheet(
        [[contact_sheet.query(IMAGE, other), contact_sheet.neighbour(IMAGE, 0.5, one)] for one, other in PAIRS]
    ),
    "gallery": Gallery([[Picture(IMAGE)] * len(NAMES)], titles=NAMES),
    "mosaic": Mosaic(
        dict.fromkeys(("image", "true", "predicted"), torch.stack([IMAGE, IMAGE])),
        {f"class {name}": "red" for name in NAMES},
    ),
    "plot": Plot([Panel("", LINES)], (5, 4)),
    "below": Plot([Panel("", LINES)], (5, 4), legend="below"),
}


@pytest.mark.parametrize("kind", FIGURES)
def test_figures_show_names_without_mathematics(kind):
    figure = FIGURES[kind].draw()
    png(figure)
    texts = [text for text in figure.findobj(lambda one: hasattr(one, "get_parse_math")) if text.get_text()]
    assert not any(text.get_parse_math() for text in texts)
    shown = [line for text in texts for line in text.get_text().split("\n")]
    assert all(line.isprintable() for line in shown)
    assert all(any(one_line(name)[:3] in line for line in shown) for name in NAMES)


@named
def test_a_name_is_fitted_as_one_line(name):
    shown, letters = fitted(name, 8, 1e6), filter(str.isalnum, name)
    assert shown.isprintable()
    rest = iter(shown)
    assert all(letter in rest for letter in letters)


@named
def test_pages_show_names_as_text(name, tmp_path):
    page, numbers = report.write(
        tmp_path, metadata=METADATA | {"checkpoint": name, "classes": [name], name: name}, scores=[], feature_sets=[],
        figures={"confusion": Plot([Panel("")], (2, 1))}, tables=[[["probe", f"from {name}"]]], standings=[],
        conclusion=[name],
    )  # fmt: skip
    shown = Page(page.read_text())
    assert {"script", "a"}.isdisjoint(tag for tag, _ in shown.tags)
    assert len(shown.all("img")) == 1
    assert shown.text.count(one_line(name)) >= 3
    assert all(line.isprintable() for line in page.read_text().split("\n"))
    assert json.loads(numbers.read_text())["metadata"]["classes"] == [name]
    (tmp_path / "config.yaml").write_text(json.dumps({"schema": 1, "choices": {"objective": name}}))
    encoder = ViT(image_size=8, patch_size=4, width=8, depth=1, heads=1).build().arguments
    own = Export(format="safetensors")
    of_model = card.write(
        run=tmp_path, step=1, encoder=encoder, options=own, preprocessing="", classes=[name], task="classification",
        remarks=[], origins=[],
    )  # fmt: skip
    listed = of_model.partition("## Classes\n\n")[2].partition("\n")[0]
    assert listed.isprintable()
    assert not re.search(r"(?<!\\)[<\[|$*]", listed.replace(r"\\", ""))


@named
def test_markdown_tables_show_names_as_text(name):
    scores = {row: {0: FinalScore(1, 0.5, "test", 0.5, 8)} for row in ("vtab/cifar", name)}
    lines = table.results_table({name: scores}, {}).split("\n")
    assert sum(markdown(name) in line for line in lines) == 3
    assert all(line.isprintable() for line in lines)


@named
def test_tables_of_names_are_read_back_or_refused(name, tmp_path):
    table = tmp_path / "labels.csv"
    try:
        table.write_bytes(predict.csv_of_labels([predict.PseudoLabel("a.png", name, 0.5)]))
    except UserError:
        assert "\udcff" in name  # no UTF-8
    else:
        with open(table, newline="") as file:
            assert [row["label"] for row in csv.DictReader(file)] == [name]


def test_commands_print_names_as_text_and_follow_no_reference(tool, tmp_path):
    random = np.random.default_rng(0)
    for part, count in (("train", 3), ("test", 1)):
        for name in NAMES:
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                image = Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8))
                image.save(folder / f"{number}{name}.png")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / f"{NAMES[3]}.png").write_bytes(b"no image")
    data = ("data=folder", "data.root=photos", "data.image_size=16")
    model = tiny_options("data", "target")
    printed = [
        tool("pretrain", "objective=supervised", *data, *model, "probes=[]", "name=run").stdout,
        tool("predict", "checkpoint=outputs/run", "photos/test", "top=1", "output=answers.json").stdout,
        tool("predict", "checkpoint=outputs/run", f"photos/test/{NAMES[8]}", "top=11").stdout,
        tool("evaluate", "checkpoint=outputs/run", *data[:2], "probes=[knn]", "figures=none").stdout,
        tool("retrieve", "action=index", "store=store", "checkpoint=outputs/run", "photos/train").stdout,
        tool("retrieve", "action=query", "store=store", "checkpoint=outputs/run", "photos/test", "sheet=s.png").stdout,
    ]
    refused = [
        tool("predict", "checkpoint=outputs/run", "damaged", status=1),
        tool("predict", f"checkpoint=outputs/{NAMES[3]}", "damaged", status=2),
        tool("pretrain", "data=folder", f"data.root={NAMES[3]}", status=2),
    ]
    printed += [text for done in refused for text in (done.stdout, done.stderr)]
    assert all(line.isprintable() for text in printed for line in text.split("\n"))
    assert len(printed[1].strip().split("\n")) == 2 + len(NAMES)
    assert NAMES[8] in printed[2]
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert {one["image"].rpartition("/")[2].removeprefix("0") for one in answers} == {f"{one}.png" for one in NAMES}
    stored = json.loads((tmp_path / "outputs" / "run" / "evaluation" / "report.json").read_text())
    assert sorted(stored["metadata"]["classes"]) == sorted(NAMES)
