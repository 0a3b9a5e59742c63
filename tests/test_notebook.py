"""The notebook in examples/: every cell runs from an empty folder."""

from pathlib import Path

import nbformat
import pytest
from command import LIMIT
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"


@pytest.mark.slow
def test_every_cell_runs_from_an_empty_folder(tmp_path):
    book = nbformat.read(NOTEBOOK, as_version=4)
    shown = [cell for cell in book.cells if cell.get("outputs")]
    kinds = [cell.outputs[-1].output_type for cell in shown]
    (setting,) = (cell for cell in book.cells if "STEPS = 300" in cell.source)
    setting.source = setting.source.replace("300", "20")
    NotebookClient(book, timeout=int(LIMIT), resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert len(shown) == 10
    assert [cell.outputs[-1].output_type for cell in shown] == kinds
    assert {path.name for path in (tmp_path / "outputs").iterdir()} >= {
        "masked_patch_synthetic",
        "finetune_masked_patch_synthetic",
    }
