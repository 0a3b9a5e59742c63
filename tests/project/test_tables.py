"""The tables and figures of results are those of the stored rows; docs/tables.py and docs/plots.py write them."""

import runpy
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NAMES = (
    "methods",
    "labels",
    "starting",
    "distillation",
    "optimizers",
    "finetuning",
    "scaling",
    "segmentation",
    "methods/further",
)
PAGES = [*(DOCS / f"{name}.md" for name in NAMES), ROOT / "records" / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_the_tables_of_its_rows(page):
    tables = runpy.run_path(str(DOCS / "tables.py"))
    text = page.read_text()
    assert text.count("<!-- table: ") == text.count("<!-- end -->") > 0
    assert tables["generate"](text) == text


def test_an_edited_number_is_found():
    tables = runpy.run_path(str(DOCS / "tables.py"))
    text = (DOCS / "labels.md").read_text()
    row = "| 500 | `masked_patch` | 3 | "
    edited = text.replace(row, f"{row}1", 1)
    assert edited != text
    assert tables["generate"](edited) == text


def test_figures_show_the_rows(monkeypatch):
    """The text `data` of a PNG file is a checksum of the drawn numbers."""
    monkeypatch.syspath_prepend(DOCS)
    plots = runpy.run_path(str(DOCS / "plots.py"))
    drawn = {name: plots["checksum"](figure) for name, figure in plots["figures"]()}
    assert len(set(drawn.values())) == len(drawn) > 3
    for name, data in drawn.items():
        with Image.open(DOCS / name) as image:
            assert image.info["data"] == data, name
