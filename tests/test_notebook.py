"""The notebook in examples/: every cell runs from an empty folder."""

from pathlib import Path

import nbformat
import pytest
from command import LIMIT
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"
SHORTER = {  # calls of the notebook, and the same with fewer steps
    'pretrain(objective="masked_patch")': 'pretrain(objective="masked_patch", steps=20, warmup=2)',
    "finetune(run)": "finetune(run, steps=10, warmup=1, scratch={'steps': 10, 'warmup': 1})",
}


@pytest.mark.slow
def test_every_cell_runs_from_an_empty_folder(tmp_path):
    book = nbformat.read(NOTEBOOK, as_version=4)
    shown = [cell for cell in book.cells if cell.get("outputs")]
    kinds = [cell.outputs[-1].output_type for cell in shown]
    for call, shorter in SHORTER.items():
        (cell,) = (cell for cell in book.cells if call in cell.source and cell.cell_type == "code")
        cell.source = cell.source.replace(call, shorter)
    NotebookClient(book, timeout=int(LIMIT), resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert len(shown) == 9
    assert [cell.outputs[-1].output_type for cell in shown] == kinds
    assert {path.name for path in (tmp_path / "outputs").iterdir()} >= {
        "masked_patch_shapes",
        "finetune_masked_patch_shapes",
    }
