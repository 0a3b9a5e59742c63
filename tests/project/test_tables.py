"""The tables of results on the pages equal those of the stored rows; `python docs/tables.py` writes them."""

import runpy
from pathlib import Path

import pytest

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
