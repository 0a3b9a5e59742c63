"""A run that goes on with fewer processes: the same batch from micro-batches of the same size, or one line."""

import json
import shutil

import pytest
from command import TINY, one_line

from ssvit.training.recipe import Recipe


@pytest.mark.parametrize(
    ("accumulate", "processes", "largest", "expected"),
    [
        (1, 8, 8, 1),
        (1, 4, 8, 2),  # half of the processes take twice as many micro-batches
        (1, 1, 8, 8),
        (2, 2, 8, 4),
        (1, 16, 8, 1),  # more processes, smaller micro-batches
        (3, 4, 4, 3),
        (2, 8, 64, 2),
        (1, 2, 5, 8),  # 32 images are no sevenths: eighths are the largest that fit
    ],
)
def test_a_batch_is_kept_by_accumulation(accumulate, processes, largest, expected):
    batch_size = 64 if accumulate != 3 else 48
    recipe = Recipe(batch_size=batch_size, accumulate=accumulate).shared(processes, largest)
    assert recipe.accumulate == expected
    micro_batch, rest = divmod(batch_size, processes * expected)
    assert (rest, recipe.batch_size) == (0, batch_size)
    assert micro_batch <= largest


def test_half_of_the_processes_go_on_with_the_same_batches(tool, tmp_path):
    """And what cannot be shared is refused."""
    run = tmp_path / "outputs" / "run"
    options = (*TINY, "probe=[]", "name=run")
    tool("pretrain", *options, "fabric.devices=2", "fabric.strategy=ddp")
    rows = (run / "metrics.jsonl").read_text()
    weights = json.loads((run / "step_00000006" / "manifest.json").read_text())
    assert weights["micro_batch"] == 4
    shutil.rmtree(run / "step_00000006")
    refused = one_line(tool("pretrain", *options, "fabric.devices=3", "fabric.strategy=ddp", status=2))
    right = "must be divisible by processes * accumulate = 3 * 1; 2 of these processes can share it"
    assert refused == f"pretrain.py: recipe.batch_size=8: {right}"
    tool("pretrain", *options)
    assert json.loads((run / "step_00000006" / "manifest.json").read_text())["micro_batch"] == 4
    losses = [
        [row["train/loss"] for row in map(json.loads, text.splitlines()) if "train/loss" in row]
        for text in (rows, (run / "metrics.jsonl").read_text())
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
