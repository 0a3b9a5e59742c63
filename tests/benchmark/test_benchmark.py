"""The benchmark of the data path runs and reports; what it measures is never a test."""

import json
import subprocess
import sys

import pytest
from command import LIMIT
from conftest import ROOT

from ssvit.benchmark.options import Benchmark
from ssvit.benchmark.timing import compare
from ssvit.options import OptionError


def test_every_contender_works_once_a_round_in_turning_order():
    order = []

    def work(name):
        return lambda: order.append(name) or 10

    rates = compare({"a": work("a"), "b": work("b")}, reference="a", rounds=3)
    assert order == ["a", "b", *"ab", *"ba", *"ab"]
    assert [rate.name for rate in rates] == ["a", "b"]
    assert rates[0].ratio == 1
    assert rates[0].ratio_quartiles == (1, 1)
    assert rates[1].ratio_quartiles[0] <= rates[1].ratio <= rates[1].ratio_quartiles[1]


def test_the_benchmark_of_the_probe_needs_its_peer(monkeypatch):
    assert Benchmark(part="probe").part == "probe"
    monkeypatch.setattr("ssvit.benchmark.options.find_spec", lambda name: None)
    assert Benchmark(part="data").part == "data"
    with pytest.raises(OptionError, match="part=probe: needs scikit-learn"):
        Benchmark(part="probe")


@pytest.mark.slow
def test_the_tool_prints_tables_and_writes_json(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/benchmark.py"), "part=data", "rounds=1", "output=rates.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "500x375 JPEG files" in done.stdout
    results = json.loads((tmp_path / "rates.json").read_text())
    assert {rate["name"] for rates in results.values() for rate in rates} >= {"ssvit", "Pillow + transforms v1"}


@pytest.mark.slow
def test_shards_are_measured_beside_a_folder_and_webdataset(tmp_path):
    pytest.importorskip("webdataset")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/benchmark.py"), "part=shards", "rounds=1", "output=rates.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "rates.json").read_text())
    assert len(results) == 2
    assert all(
        {"ssvit, folder", "ssvit, shards", "WebDataset"} <= {rate["name"] for rate in rates}
        for rates in results.values()
    )
