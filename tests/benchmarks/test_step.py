"""The comparison of training steps: what it counts and trains; how fast a contender is is never a test."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import LIMIT
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import step
from benchmarks.peers import PEERS
from ssvit.cli import benchmark
from ssvit.data.batch import Batch
from ssvit.errors import OptionError

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "data=shapes", "data.images=16", "data.held_out_images=8", "data.image_size=16", "encoder.patch_size=4",
    "encoder.width=32", "encoder.depth=2", "encoder.heads=2", "recipe.batch_size=4", "recipe.precision=bf16-mixed",
    "launch.accelerator=cpu", "rounds=1",
)  # fmt: skip
OF = {
    "mae": ("objective.decoder.width=32", "objective.decoder.heads=2"),
    "dino": ("data.augment.local_size=8", "data.augment.local_views=2", "objective.prototypes=64"),
}  # fmt: skip
# Weights that a peer's model has and its method does not use, and weights that are fixed in the first steps.
UNUSED = {
    "model.encoder.cls_token", "model.mask_token", "model.vit.pos_embed", "decoder.pos_embed",
    "model.vit.embeddings.position_embeddings", "model.decoder.decoder_pos_embed", "head.last_layer.weight_g",
    "teacher_head.last_layer.weight_g",
}  # fmt: skip


def config(objective, *options):
    line = step.command.line([f"objective={objective}", *TINY, *OF.get(objective, ()), *options])
    return step.command.compose(line)


@pytest.mark.parametrize(("objective", "name"), [(objective, name) for objective in PEERS for name in PEERS[objective]])
def test_a_peer_learns_as_the_loop_trains_it(objective, name):
    pytest.importorskip(name.split()[0].replace("-", "_"))
    built, gflop = step.build([name], config(objective))
    steps = built[name]
    assert gflop > 0
    before = {key: value.detach().clone() for key, value in steps.state.objective.named_parameters()}
    losses = []
    for _ in range(10):
        assert steps() == 4
        losses.append(steps.numbers.values[steps.numbers.names.index("loss")].item())
    if objective != "dino":  # the target of a teacher's student changes with it
        assert sum(losses[-3:]) < sum(losses[:3])
    moved = {key for key, value in steps.state.objective.named_parameters() if not torch.equal(value, before[key])}
    assert before.keys() - moved <= UNUSED
    assert all(value.isfinite().all() for value in steps.state.objective.parameters())


def test_useful_work_is_no_more_than_a_peer_does():
    pytest.importorskip("timm")
    built, gflop = step.build(["timm + head"], config("masked_patch"))
    timm = built["timm + head"].state.objective
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):
        timm(Batch.of_view(torch.rand(2, 3, 16, 16)), timm.sample(torch.arange(2), seed=0))["loss"].backward()
    assert 0 < gflop <= counter.get_total_flops() / 2 / 1e9


def test_peers_are_chosen_by_parts_of_their_names(monkeypatch):
    monkeypatch.setattr(step, "find_spec", lambda name: True)
    assert step.contenders("mae", ["timm"]) == ["timm + lightly MAE", "timm + lightly MAE, plain attention"]
    assert step.contenders("mae", ["vit-pytorch MAE"]) == ["vit-pytorch MAE"]
    assert step.contenders("latent", None) == []
    with pytest.raises(OptionError, match="peers"):
        step.contenders("mae", ["torchvision"])
    monkeypatch.setattr(step, "find_spec", lambda name: None)
    assert step.contenders("mae", None) == []


def test_plain_attention_computes_the_same():
    pytest.importorskip("timm")
    names = ["timm + head", "timm + head, plain attention"]
    fused, plain = (built.state.objective for built in step.build(names, config("masked_patch"))[0].values())
    plain.load_state_dict(fused.state_dict())
    batch, noise = Batch.of_view(torch.rand(2, 3, 16, 16)), fused.sample(torch.arange(2), seed=0)
    assert torch.allclose(fused(batch, noise)["loss"], plain(batch, noise)["loss"])


def test_the_commands_of_the_pages_are_taken():
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    commands = re.findall(r"^    python -m benchmarks\.step (.+)$", pages, re.MULTILINE)
    assert len(commands) > 2
    for options in commands:
        benchmark.cases(step.command.compose(step.command.line(shlex.split(options))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments", "rows"),
    [
        (
            "step",
            ["objective=mae", *TINY, "peers=[timm]", "output=rates.json"],
            ["ssvit, eager", "ssvit, compiled", "torch product"],
        ),
        ("data", ["1", "16"], ["ssvit, shards of size=256", "Pillow + transforms v1"]),
    ],
)
def test_a_comparison_prints_its_table(tmp_path, module, arguments, rows):
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, env=environment)
    assert done.returncode == 0, done.stderr
    assert all(row in done.stdout for row in rows)
    if module == "step":
        (rates,) = json.loads((tmp_path / "rates.json").read_text()).values()
        assert rates[0]["ratio"] == 1
