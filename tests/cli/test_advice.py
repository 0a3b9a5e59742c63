"""The last lines of the commands: all that was measured on the images, and one command that works as it is printed."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command import tiny_options
from composing import untrained
from images import put_set

from ssvit import advice
from ssvit.cli import find_command
from ssvit.evaluation.measured import FOLDER
from ssvit.loading.finding import runs_on

SMALL = tiny_options("data", "target")
RUN = [option for option in SMALL if option.startswith(("recipe", "figures"))]
PROBES = ["probes=[knn]", "probes.knn.k=[1]", "duplicates=false", "figures=none"]


@pytest.fixture
def called(tmp_path, monkeypatch, capsys):
    """A function that calls a command, and returns its last line but one and the next command."""
    monkeypatch.chdir(tmp_path)
    put_set(Path("my set"), 24, (16, 16))

    def call(name, *options):
        capsys.readouterr()
        replace(find_command(name), prefix="ssvit ").call(options)
        *_, before, last = capsys.readouterr().out.splitlines()
        label, program, following, *arguments = shlex.split(last)
        assert (label, program) == ("next:", "ssvit")
        tool = find_command(following)
        assert tool.compose(tool.line(arguments)).options
        return before, following, arguments

    return call


def test_each_command_leads_to_the_next_one(called):
    images = ["data=my set", "outputs=my runs"]
    _, name, options = called("pretrain", *images, *SMALL, "name=run", "probes=[]")
    assert name == "evaluate"
    evaluated, name, options = called(name, *options, *PROBES)
    assert name == "finetune"
    tuned, name, options = called(name, *options, *RUN, "name=tuned", "check_frozen=false")
    (file,) = Path("my runs", FOLDER).iterdir()
    rows = json.loads(file.read_text())["results"]
    assert {row["encoder"] for row in rows} == {"run", "random weights", "pixels", "tuned"}
    best = max(rows, key=lambda row: row["accuracy"])
    assert all(row["encoder"] in tuned for row in rows)
    assert f"{best['encoder']}, {best['method']}, {100 * best['accuracy']:.1f} %" in tuned
    assert "tuned" not in evaluated
    assert name == "predict"
    find_command(name).call(options)


@pytest.mark.parametrize(("method", "exists"), [("20-NN", True), ("20-NN", False), ("fine-tuned", True)])
def test_the_best_frozen_features_are_fine_tuned(called, method, exists):
    untrained(Path("outputs/run"), "data=my set", *SMALL)
    called("evaluate", "checkpoint=outputs/run", *PROBES)
    (file,) = Path("outputs", FOLDER).iterdir()
    kept = json.loads(file.read_text())
    other = Path("outputs", "other")
    if exists:
        shutil.copytree(Path("outputs", "run"), other)
    row = {
        "encoder": "other",
        "method": method,
        "accuracy": 1.0,
        "balanced": None,
        "train_images": 1,
        "path": str(other),
        "of": "",
    }
    file.write_text(json.dumps({**kept, "results": [row, *kept["results"]]}))
    _, name, changed = called("evaluate", "checkpoint=outputs/run", "data=my set", *PROBES)
    assert name == "finetune"
    is_other = method != "fine-tuned" and exists
    assert (f"checkpoint={other}" in changed) == is_other
    assert any(option.startswith("checkpoint=outputs/run") for option in changed) != is_other
    assert any("my set" in option for option in changed)


def test_a_run_on_the_parent_folder_is_compared(called):
    called("pretrain", "data=my set", *SMALL, "name=run", "probes=[]")
    for root, runs in (("my set", 1), ("my set/inner", 1), (str(Path("my set/inner").absolute()), 1), ("my", 0)):
        assert len(runs_on("outputs", "folder", root, "")) == runs
    assert runs_on("outputs", "shards", "my set/inner", "") == []


def test_stores_shards_and_normalization_lead_to_commands(called):
    untrained(Path("outputs/run"), "data=my set", *SMALL)
    _, name, options = called("retrieve", "action=index", "store=my store", "my set")
    assert name == "retrieve"
    find_command(name).call(options)
    assert Path("sheet.png").is_file()
    _, name, options = called("retrieve", "action=query", "store=my store", "my set", "k=2")
    assert (name, "k=2" in options) == ("retrieve", True)
    assert called("pack", "data=my set", "output=my shards")[1] == "pretrain"
    _, name, options = called("normalization", "data=my set", "output=my.yaml")
    assert (name, "data.normalization=my.yaml" in options) == ("pretrain", True)


def test_the_command_after_patches_reads_patches(called):
    untrained(Path("outputs/run"), "data=my set", *SMALL)
    _, name, options = called("retrieve", "action=index", "store=store", "features.pooling=patches", "my set")
    assert (name, "anomaly=store" in options) == ("embed", True)
    _, name, options = called("retrieve", "action=query", "store=store", "patch=0,0", "k=3", "my set/a/00.png")
    assert (name, "anomaly=store" in options) == ("embed", True)


def test_the_command_after_windows_compares_windows(called):
    untrained(Path("outputs/run"), "data=my set", *SMALL)
    windows = ["window=8", "overlap=2"]
    _, name, options = called("retrieve", "action=index", "store=store", *windows, "my set")
    assert (name, {*windows} <= {*options}) == ("retrieve", True)
    find_command(name).call(options)


def test_advice_is_printed_where_it_applies(called):
    untrained(Path("outputs/run"), "data=my set", *SMALL, "data.image_size=8")
    tool = find_command("evaluate")

    def advised(*options):
        config = tool.compose(tool.line(["checkpoint=outputs/run", *PROBES, *options]))
        return advice.improvements(config.options, config.options.encoder.checkpoint())

    assert "data.image_size above 8" in advised()
    assert "image_size" not in advised("data.image_size=16")
    assert "knn_standardized" in advised()
    assert "knn_standardized" not in advised("probes=[knn_standardized]")
