"""The notebook in examples/: every cell runs from an empty folder, and its stored output ends with a gain."""

import ast
from pathlib import Path

import nbformat
import pytest
from command import LIMIT
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
CALLS = ("ssvit.pretrain(", "ssvit.finetune(run, ")
FEW_STEPS = (
    "ssvit.pretrain(steps=20, warmup=2, ",
    'ssvit.finetune(run, steps=20, warmup=2, **{"scratch_recipe.steps": 20, "scratch_recipe.warmup": 2}, ',
)


@pytest.fixture
def book():
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.mark.slow
def test_every_cell_runs_from_an_empty_folder(book, tmp_path):
    shown = [cell for cell in book.cells if cell.get("outputs")]
    kinds = [cell.outputs[-1].output_type for cell in shown]
    for call, with_few_steps in zip(CALLS, FEW_STEPS, strict=True):
        (cell,) = (cell for cell in book.cells if call in cell.source)
        cell.source = cell.source.replace(call, with_few_steps)
    NotebookClient(book, timeout=int(LIMIT), resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [cell.outputs[-1].output_type for cell in shown] == kinds
    assert {path.name for path in (tmp_path / "outputs").iterdir()} >= {
        "masked_patch_shapes",
        "compare_masked_patch_shapes",
    }


def test_the_stored_output_shows_a_gain_and_pictures(book):
    (cell,) = (cell for cell in book.cells if cell.source.startswith("means = "))
    means, gain, error = ast.literal_eval(cell.outputs[-1].data["text/plain"])
    assert gain > error > 0
    assert means["pretrained"] > means["scratch"]
    pictures = [
        output for cell in book.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 3
