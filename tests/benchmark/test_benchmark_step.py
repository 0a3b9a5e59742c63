"""The benchmark of the training step: what it counts, what it trains, and what it refuses; never how fast it is."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
from command import LIMIT, one_line
from conftest import ROOT
from torch.utils.flop_counter import FlopCounterMode

from ssvit.benchmark import step, step_options
from ssvit.benchmark.peers import PEERS
from ssvit.benchmark.step_options import OBJECTIVES, Size, Step
from ssvit.benchmark.timing import as_json, table
from ssvit.data.batch import Batch
from ssvit.figures.speed import speed
from ssvit.options import OptionError

TINY = Size(
    image_size=16, patch_size=4, width=32, depth=2, heads=2, batch={"cpu": 4, "cuda": 4}, decoder=(2, 32, 2),
    local=(8, 2),
)  # fmt: skip
OPTIONS = {"precision": "bf16-mixed", "compile": False, "device": "cpu", "batch": 4}


def tool(folder, *options, **environment):
    command = [sys.executable, str(ROOT / "tools/benchmark.py"), "part=step", *options]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT, env=environment)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(step_options.SIZES, "small", TINY)


# What is in a peer's model and not in its method, and weights that are fixed.
UNUSED = {
    "model.encoder.cls_token", "model.mask_token", "model.vit.encoder.pos_embedding", "model.vit.pos_embed",
    "decoder.pos_embed", "decoder.positions", "model.vit.embeddings.position_embeddings",
    "model.decoder.decoder_pos_embed", "head.last_layer.weight_g", "teacher_head.last_layer.weight_g",
    "head.prototypes", "teacher.module.head.prototypes",  # frozen in the first steps
}  # fmt: skip


@pytest.mark.parametrize(
    ("objective", "name"), [(objective, name) for objective in OBJECTIVES for name in (step.OURS, *PEERS[objective])]
)
def test_a_contender_learns_as_the_loop_trains_it(objective, name):
    pytest.importorskip(name.split()[0].replace("-", "_"))
    torch.manual_seed(0)
    steps = step.Steps(name, TINY, objective=objective, **OPTIONS)
    before = {key: value.detach().clone() for key, value in steps.objective.named_parameters()}
    losses = []
    for _ in range(20):
        assert steps() == 4
        losses.append(steps.loss)
    # What a teacher's student is measured by moves with it.
    assert min(losses) < losses[0] if objective in ("latent", "dino", "ibot") else sum(losses[-5:]) < sum(losses[:5])
    moved = [key for key, value in steps.objective.named_parameters() if not torch.equal(value, before[key])]
    assert {key for key in before if key not in moved} <= UNUSED
    assert all(value.isfinite().all() for value in steps.objective.parameters())


def test_useful_work_is_that_of_the_written_out_products():
    """Two operations for each multiplication of the forward, twice that backward, none for gradients of the images."""
    d, mlp, n, m, t, p = 32, 128, 16, 8, 17, 3 * 4 * 4
    full = t * (4 * d * d + 2 * d * mlp) + 2 * t * t * d
    last = m * (2 * d * d + 2 * d * mlp) + t * 2 * d * d + 2 * m * t * d
    head = m * d * 512
    assert step.useful(TINY, "masked_patch") == 2 * (3 * (full + last + head) + 2 * n * p * d)


def test_useful_work_is_no_more_than_a_peer_does():
    timm = pytest.importorskip("timm") and PEERS["masked_patch"]["timm + head"](TINY)
    images = torch.rand(2, 3, 16, 16)
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):
        timm(Batch.of(images), timm.sample(torch.arange(2), seed=0))["loss"].backward()
    assert step.useful(TINY, "masked_patch") <= counter.get_total_flops() / 2


def test_the_measures_are_told_and_drawn():
    ((title, rates),) = step.run(Step(model="small", peers=False, memory=True, threads=2), rounds=2).items()
    assert title.startswith("masked_patch, small, 16 px, 4 images a step")
    ours, alone, product = rates
    assert (ours.name, alone.name, product.name) == ("ssvit", "ssvit, 1 thread", "torch product of 2048")
    assert ours.quartiles[0] <= ours.per_work_second <= ours.quartiles[1]
    assert ours.share == pytest.approx(
        ours.per_work_second * step.useful(TINY, "masked_patch") / 1e9 / product.per_work_second
    )
    assert product.share is None
    assert product.memory is None
    assert 0 < ours.memory < 1000
    text = table(title, rates)
    assert "share   memory" in text
    assert len(text.splitlines()) == 5
    assert as_json({title: rates})[title][0] == asdict(ours)
    figure = speed(["a", "b"], [3.0, 1.0], [(2.5, 3.5), (1.0, 1.0)], title="of two", unit="images")
    assert [bar.get_width() for bar in figure.axes[0].patches] == [3.0, 1.0]


def test_threads_are_put_back():
    before = torch.get_num_threads()
    step.run(Step(model="small", peers=False, memory=False, threads=before + 1), rounds=1)
    assert torch.get_num_threads() == before


def test_peers_are_chosen_by_their_library_or_name(monkeypatch):
    built = []

    def compare(contenders, **_):
        built.extend(contenders)
        raise InterruptedError

    monkeypatch.setattr(step, "Steps", lambda name, **_: name)
    monkeypatch.setattr(step, "installed", lambda name: True)
    monkeypatch.setattr(step, "compare", compare)
    for objective, peers in (("masked_patch", ["timm"]), ("mae", ["lightly"]), ("mae", ("vit-pytorch MAE",))):
        built.clear()
        with pytest.raises(InterruptedError):
            step.run(Step(model="small", objective=objective, peers=peers))
        expected = [name for name in PEERS[objective] if peers[0] in name]
        assert [name for name in built if "product" not in name] == ["ssvit", *expected]
    with pytest.raises(OptionError, match="peers"):
        step.run(Step(model="small", objective="mae", peers=["torchvision"]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("objective", "moco"),
        ("model", "huge"),
        ("precision", "fp8"),
        ("threads", 0),
        ("device", "tpu"),
        ("batch", -1),
        ("peers", 1),
        ("peers", "timm"),
    ],
)
def test_wrong_options_are_named(name, value):
    with pytest.raises(OptionError, match=f"^{name}={value}: must be"):
        Step(**{name: value})


def test_the_tool_tells_them_in_one_line_before_torch_is_loaded(tmp_path, no_torch):
    done = tool(tmp_path, "step.model=huge", PYTHONPATH=no_torch)
    assert done.returncode == 2
    assert one_line(done) == "benchmark.py: step.model=huge: must be one of ti, s, b, l, h, small"


@pytest.mark.slow
def test_the_tool_measures_a_step(tmp_path):
    done = tool(
        tmp_path, "rounds=1", "step.model=small", "step.batch=2", "step.memory=false", "output=rates.json",
        "plot=rates.png",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (rates,) = json.loads((tmp_path / "rates.json").read_text()).values()
    installed = [name for name in PEERS["masked_patch"] if step.installed(name)]
    assert [rate["name"] for rate in rates] == ["ssvit", *installed, "torch product of 2048"]
    assert all(name in done.stdout for name in installed)
    assert (tmp_path / "rates.png").stat().st_size > 10_000
