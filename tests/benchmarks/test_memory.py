"""Predicted memory equals what two processes hold, counted without the tracker of torch."""

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
from ranks import own_rank, start

from benchmarks import memory
from ssvit.errors import OptionError

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "objective=masked_patch", "data.image_size=32", "encoder.patch_size=8", "encoder.width=128", "encoder.depth=3",
    "encoder.heads=2", "recipe.optimizer=adamw", "recipe.precision=bf16-mixed", "ranks=[2]", "images=[2]",
)  # fmt: skip


def case(*options):
    (only,) = memory.cases(memory.command.compose(memory.command.line([*TINY, *options])))
    return only


def predicted(folder: Path, *options: str) -> None:
    """Write the prediction for rank 0."""
    (folder / "predicted.json").write_text(json.dumps(asdict(memory.predict(0, 0, case(*options)))))


def counted(folder: Path, *options: str) -> None:
    """Run two steps in a real process, and write the bytes of its shards when the optimiser starts the second one."""
    steps, _ = memory.build(case(*options), None)
    optimizer = steps.state.optimizer
    sizes: dict[str, int] = {}

    def size(tensors) -> int:
        return sum(tensor.to_local().nbytes if hasattr(tensor, "to_local") else tensor.nbytes for tensor in tensors)

    def count(*_) -> None:
        weights = list(steps.state.objective.parameters())
        sizes["weights"], sizes["gradients"] = size(weights), size(weight.grad for weight in weights)
        sizes["optimizer"] = size(value for moments in optimizer.state.values() for value in moments.values())

    optimizer.register_step_pre_hook(count)
    steps()
    steps()
    (folder / f"counted{own_rank()}.json").write_text(json.dumps(sizes))


SMALLER = pytest.param(("recipe.accumulate=2", "encoder.activation_checkpointing=true"), marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [(), SMALLER])
def test_predicted_shards_are_those_of_two_processes(tmp_path, options):
    assert start(counted, 2, tmp_path, *options) == [0, 0]
    assert start(predicted, 1, tmp_path, *options) == [0]
    prediction, *counts = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("predicted", "counted0"))
    assert {name: prediction[name] for name in counts[0]} == counts[0]
    assert counts[0]["weights"] == counts[0]["gradients"] > 0
    # The first moment, the second moment, and a number of steps for each weight tensor.
    assert 0 < counts[0]["optimizer"] - 2 * counts[0]["weights"] < 1000
    assert prediction["peak"] > sum(counts[0][name] for name in ("weights", "optimizer")) + prediction["activations"]


def test_the_command_of_the_page_is_taken():
    page = (ROOT / "docs/distributed.md").read_text()
    (options,) = re.findall(r"^    python -m benchmarks\.memory (.+)$", page, re.MULTILINE)
    cases = memory.cases(memory.command.compose(memory.command.line(shlex.split(options))))
    assert [config.options.recipe.batch_size for config in cases] == [64, 512, 4096, 32768]


def test_labels_are_an_error():
    with pytest.raises(OptionError, match="objective"):
        case("objective=supervised")
