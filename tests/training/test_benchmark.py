"""ssvit benchmark: what it counts and measures; how fast the machine is is never a test."""

import json
from types import SimpleNamespace

import pytest
import tiny
from command import TINY

from ssvit.cli import benchmark as cli
from ssvit.cli import find_command
from ssvit.training import benchmark
from ssvit.training.benchmark import Rate, measure_rates, rate_table


def test_every_contender_works_once_a_round_in_turning_order():
    order = []

    def work(name):
        return lambda: order.append(name) or 10

    rates = measure_rates({"a": work("a"), "b": work("b")}, reference="a", rounds=3)
    assert order == ["a", "b", *"ab", *"ba", *"ab"]
    assert [rate.name for rate in rates] == ["a", "b"]
    assert rates[0].ratio == 1
    assert rates[1].ratio_quartiles[0] <= rates[1].ratio <= rates[1].ratio_quartiles[1]
    assert rates[1].quartiles[0] <= rates[1].per_work_second <= rates[1].quartiles[1]


def test_the_share_is_the_work_of_the_rate_relative_to_the_peak(monkeypatch):
    step = SimpleNamespace(state=tiny.state(tiny.model())[0])
    rates = [Rate(name, rate, rate, (rate, rate)) for name, rate in (("ours", 3.0), ("peak", 8.0))]
    monkeypatch.setattr(benchmark, "measure_rates", lambda contenders, **options: rates)
    shared = benchmark.measure_steps({"ours": step}, gflop=2.0, rounds=1)
    assert [rate.share for rate in shared] == [3 * 2 / 8, None]
    text = rate_table("title", shared).splitlines()
    assert len(text) == 4
    assert text[2].endswith("75%")
    assert "ratio" not in text[1]
    assert "memory" not in text[1]


def test_each_batch_size_is_measured_in_each_precision():
    command = find_command("benchmark")
    cases = cli.cases(command.compose(command.line(["batch_sizes=[4,8]", "precisions=[32-true,64-true]"])))
    assert [(case.options.recipe.precision, case.options.recipe.batch_size) for case in cases] == [
        ("32-true", 4), ("32-true", 8), ("64-true", 4), ("64-true", 8),
    ]  # fmt: skip


def test_the_command_measures_steps_and_the_loader(tool, tmp_path):
    printed = tool("benchmark", *TINY, "rounds=1", "batch_sizes=[4,8]", "output=rates.json").stdout
    rates = json.loads((tmp_path / "rates.json").read_text())
    steps = [rate for rate in rates if rate["name"].startswith("step")]
    assert [rate["name"] for rate in steps] == ["step, 4 images, 32-true", "step, 8 images, 32-true"]
    assert all(rate["per_second"] > 0 and rate["share"] > 0 for rate in steps)
    assert {rate["name"] for rate in rates} >= {"loader, 4 images, 0 workers", "loader, 8 images, 0 workers"}
    assert all(rate["name"] in printed for rate in rates)
    assert not (tmp_path / "outputs").exists()  # nothing of a run is written


RESNET = (
    "encoder=timm", "encoder.model=test_resnet", "data=shapes", "data.images=64",
    "data.held_out_images=8", "recipe.batch_size=4",
)  # fmt: skip


@pytest.mark.parametrize(("options", "sizes"), [(TINY, [16, 24]), (RESNET, [32])])
def test_inference_is_measured_by_batch_size_image_size_and_precision(tmp_path, options, sizes, monkeypatch):
    if options is RESNET:
        pytest.importorskip("timm")
    monkeypatch.setattr("ssvit.kernels.latency._SECONDS", 0.0)
    chosen = ["part=inference", "rounds=1", "batch_sizes=[1,3]", "threads=[1]", f"image_sizes={sizes}"]
    find_command("benchmark").call([*options, *chosen, f"output={tmp_path}/rates.json"])
    rows = json.loads((tmp_path / "rates.json").read_text())
    settings = [(row["image_size"], row["batch_size"]) for row in rows if row["path"] == "32"]
    assert settings == [([size, size], batch) for size in sizes for batch in (1, 3)]
    assert {row["path"] for row in rows} >= {"32", "bf16"}
    assert (tmp_path / "rates.png").exists() == (len(sizes) > 1)
    for row in rows:
        assert 0 < row["median"] <= row["slow"]
        assert row["images_per_second"] == pytest.approx(1000 * row["batch_size"] / row["median"])
        assert row["ratio"] == 1 or row["path"] != "32"
