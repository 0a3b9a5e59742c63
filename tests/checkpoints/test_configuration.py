"""A run's folder holds names of files and values: whatever else stands in it runs nothing, and is refused by name."""

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from command import TINY, one_line
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ssvit.atomic_io import seal
from ssvit.checkpoints.configuration import Configuration, ConfigurationError, flatten, foreign, refers
from ssvit.checkpoints.run_folder import RunError, RunFolder
from ssvit.config.command_line import CommandLine
from ssvit.loading.pretrained import _data

STORED = Path(__file__).parents[1] / "fixtures"
RUN = "masked_patch_synthetic"
CANARY = "canary"  # what an attack makes: a folder in the working directory of the tool


def call(target: str = "os.mkdir", **arguments) -> dict:
    return {"_target_": target, **(arguments or {"path": CANARY})}


@pytest.fixture
def config() -> dict:
    """The content of a run's config.yaml."""
    return yaml.safe_load((STORED / "outputs" / RUN / "config.yaml").read_text())


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with a run under outputs/."""
    shutil.copytree(STORED / "outputs" / RUN, tmp_path / "outputs" / RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVIL", "os.mkdir")
    monkeypatch.setenv("EVIL_NODE", f"{{_target_: os.mkdir, path: {CANARY}}}")
    return tmp_path


def chosen(config: dict, **choices) -> dict:
    """The same with some choices changed."""
    return {**config, "choices": config["choices"] | choices}


def of(config: dict) -> Configuration:
    """The content of a config.yaml as it is read."""
    return Configuration({name: value for name, value in config.items() if name != "choices"}, config["choices"])


# What is put in place of data.source, of which each really makes the canary where it is instantiated as it stands.
SOURCES = {
    "a call": call(),
    "positional arguments": {"_target_": "os.mkdir", "_args_": [CANARY]},
    "nested in an argument": call("builtins.dict", root=call()),
    "in a list": call("builtins.dict", roots=[[1, call()]]),
    "behind a known builder": call("ssvit.data.sources.datasets.os.mkdir", path=CANARY),
    "in an argument of a known builder": call("ssvit.loading.encoder.load_classifier", path=call()),
    "by hydra itself": {"_target_": "hydra.utils.instantiate", "_recursive_": False, "config": call()},
    "a command of a shell": call("torch.utils.collect_env.run", command=f"mkdir {CANARY}"),
    "a copy of files": call("shutil.copytree", src="outputs", dst=CANARY),
    "converted": {**call("builtins.dict", a=call()), "_convert_": "all"},
    "named by the environment": call("${oc.env:EVIL}", path=CANARY),
    "decoded from the environment": "${oc.decode:${oc.env:EVIL_NODE}}",
    "made by a resolver": "${oc.create:{_target_: os.mkdir, path: " + CANARY + "}}",
    "referred to": "${evil}",
    "referred to by parts": call("${evil._target_}", path=CANARY),
}


@pytest.mark.parametrize("way", SOURCES)
def test_each_way_would_run_if_it_were_instantiated(folder, way):
    node = OmegaConf.create({"source": SOURCES[way], "evil": call()})
    with contextlib.suppress(Exception):  # what surrounds the call may fail, once it has run
        instantiate(node.source)
    assert Path(CANARY).is_dir()


@pytest.mark.parametrize("way", SOURCES)
def test_a_folder_calls_nothing(folder, config, way):
    config["data"]["source"], config["evil"] = SOURCES[way], call()
    (folder / "outputs" / RUN / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigurationError, match="may hold values only"):
        Configuration.read(folder / "outputs" / RUN / "config.yaml")
    assert not Path(CANARY).exists()


def attacked(config: dict) -> dict[str, dict | str]:
    """By its way, a whole config.yaml that would have something run."""
    text = yaml.safe_dump(config)
    return {
        "a source": {**config, "data": {**config["data"], "source": call()}},
        "a view": {**config, "data": {**config["data"], "view": call()}},
        "an augmentation": {**config, "data": {**config["data"], "augment": call()}},
        "a value": {**config, "data": {**config["data"], "mean": [call(), 0, 0]}},
        "partial": {
            **config,
            "data": {**config["data"], "source": {**config["data"]["source"], "_partial_": True}},
        },
        "an alias": text.replace("data:\n", f"evil: &evil {{_target_: os.mkdir, path: {CANARY}}}\ndata:\n", 1)
        + "more: *evil\n",
        "a merged key": text + f"a: &a {{_target_: os.mkdir, path: {CANARY}}}\nb: {{<<: *a}}\n",
        "a tag": text + f"evil: !!python/object/apply:os.mkdir [{CANARY}]\n",
        "a target beside values": {
            **config,
            "data": {**config["data"], "source": {**config["data"]["source"], "_target_": "os.mkdir"}},
        },
        "a key of several names": {**config, "data": {**config["data"], "source._target_": "os.mkdir"}},
        "an option that is not there": {**config, "data": {**config["data"], "evil": {"path": CANARY}}},
        "the environment": {**config, "data": {**config["data"], "seed": "${oc.env:EVIL}"}},
        "a resolver in a list": {**config, "data": {**config["data"], "mean": ["${oc.decode:'1'}"]}},
        "a reference with a resolver inside": {
            **config,
            "data": {**config["data"], "seed": "${data.${oc.env:EVIL}}"},
        },
        "a file outside": chosen(config, data="../../../evil"),
        "an absolute file": chosen(config, data="/tmp/evil"),
        "a group outside": chosen(config, **{"../evil@data.augment": "evil"}),
        "a group of hydra's": chosen(config, **{"hydra/callbacks": "evil"}),
        "several in one": chosen(config, data="synthetic,+evil"),
        "an override in a name": chosen(config, **{"augment@data.augment": "x data.source._target_=os.mkdir"}),
        "a file that is not there": chosen(config, data="evil"),
        "no choices": of(config).values,
        "choices of a list": {**config, "choices": ["data"]},
    }


WAYS = list(attacked(yaml.safe_load((STORED / "outputs" / RUN / "config.yaml").read_text())))


@pytest.mark.parametrize("way", WAYS)
def test_no_tool_runs_what_a_folder_says(tool, folder, config, no_torch, way):
    attack = attacked(config)[way]
    text = attack if isinstance(attack, str) else yaml.safe_dump(attack)
    (folder / "outputs" / RUN / "config.yaml").write_text(text)
    name = ("finetune", "evaluate", "knn", "visualize")[WAYS.index(way) % 4]
    line = one_line(tool(name, f"checkpoint=outputs/{RUN}", status=2, PYTHONPATH=no_torch))
    assert f"outputs/{RUN}/config.yaml: " in line
    assert not Path(CANARY).exists()


@pytest.mark.parametrize("block", ["encoder", "view"])
def test_a_manifest_holds_values_alone(tool, folder, no_torch, block):
    file = folder / "outputs" / RUN / "step_00000006" / "manifest.json"
    facts = yaml.safe_load(file.read_text())
    facts[block]["dropout"] = call()
    facts["seal"] = seal(facts)
    file.write_text(json.dumps(facts))
    line = one_line(tool("finetune", f"checkpoint=outputs/{RUN}/step_00000006", status=2, PYTHONPATH=no_torch))
    assert f"{block}.dropout._target_: may hold values only" in line
    assert not Path(CANARY).exists()


def test_what_is_called_cannot_be_typed_either(tool, no_torch):
    line = one_line(tool("pretrain", "data.source._target_=os.mkdir", status=2, PYTHONPATH=no_torch))
    assert line.startswith("ssvit: data.source._target_=os.mkdir: a class must be chosen")


def test_texts_that_refer_to_options_alone():
    for text in ("", "a", "${data.root}", "x ${data.root}/${..name}", "$HOME", "{data}"):
        assert refers(text), text
    for text in ("${oc.env:HOME}", "${data.${name}}", "${hydra:job}", "${}", "a ${b", "${a[0]:1}", "${oc.create:{}}"):
        assert not refers(text), text
    assert foreign({"a": [{"b": "${oc.env:HOME}"}]}) == "a[0].b"
    assert foreign({"a": [{"_x": 1}]}) == "a[0]._x"
    assert foreign({"a": [{"b": 1, "c": None}, "${a.b}"]}) == ""


def test_what_is_written_is_read_again(tmp_path, config):
    builders = {**config, "data": {**config["data"], "source": call("mine", size=3)}}
    del builders["choices"], builders["schema"]
    (tmp_path / "config.yaml").write_bytes(Configuration.of(builders, {"data": "mine", "experiment": None}).write())
    found = Configuration.read(tmp_path / "config.yaml")
    assert found.choices == {"data": "mine", "experiment": None}
    assert found.values == {**builders, "data": {**config["data"], "source": {"size": 3}}}
    assert "_target_" not in (tmp_path / "config.yaml").read_text()


def test_a_set_value_comes_with_the_data_set(folder, config):
    config["data"]["augment"]["flip"], config["data"]["images"] = 0.25, 99
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    node, _ = _data(folder / "config.yaml", CommandLine([]))
    assert node["augment"]["flip"] == 0.25
    assert node["images"] == 99
    assert node["source"]["_target_"] == "ssvit.data.sources.synthetic.synthetic"


def test_a_data_set_of_ones_own_comes_from_ones_own_folder(folder, config):
    (folder / "own" / "data").mkdir(parents=True)
    (folder / "own" / "data" / "mine.yaml").write_text("defaults:\n  - synthetic\n  - _self_\nimages: 7\n")
    (folder / "config.yaml").write_text(yaml.safe_dump(chosen(config, data="mine")))
    right = r"data=mine, .*\(--config-dir\)"
    with pytest.raises(ConfigurationError, match=right):
        _data(folder / "config.yaml", CommandLine([]))
    for words in (["--config-dir", "own"], ["--config-dir=own"], ["-cd", "own"]):
        node, choices = _data(folder / "config.yaml", CommandLine([*words, "recipe.steps=3"]))
        assert choices["data"] == "mine"
        assert node["images"] == 64  # as the run was, not as its file says today
        assert node["source"]["_target_"] == "ssvit.data.sources.synthetic.synthetic"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is empty"),
        (b"[1, 2]", "is damaged"),
        (b"a: [" * 5000, "is damaged"),
        (b"\xff\xfe\x00", "is damaged"),
        (b"a: 1\n" * 300_000, "has more than"),
        (b"1: a\n", "is damaged"),
        (b"a: &a [1]\nb: *a\n", "is damaged"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, text, said):
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(ConfigurationError, match=said) as caught:
        Configuration.read(tmp_path / "config.yaml")
    assert "\n" not in str(caught.value)


def test_a_difference_that_matters_is_named(config):
    old = of(config)
    for change, difference in (
        ({}, None),
        ({"recipe": {**config["recipe"], "lr": 7}}, ("recipe.lr", 7, config["recipe"]["lr"])),
        ({"recipe": {**config["recipe"], "new": 7}}, ("recipe.new", 7, "(absent)")),
        ({"workers": 3}, None),
        ({"data": {**config["data"], "root": "elsewhere"}}, None),
        (chosen(config, objective="supervised"), ("objective", "supervised", "masked_patch")),
        (chosen(config, experiment="x", data="y"), None),
    ):
        assert of({**config, **change}).difference(old) == difference


def test_a_command_is_the_same_in_any_order():
    first, again, other = (CommandLine(options).identity for options in (["a=1", "b=2"], ["b=2", "a=1"], ["a=1"]))
    assert first == again != other


def test_a_configuration_that_cannot_be_written_is_one_line(tmp_path, config):
    (tmp_path / "outputs" / "run" / ".config.yaml.part").mkdir(parents=True)  # what is written first
    folder = RunFolder(str(tmp_path / "outputs"), "run")
    with pytest.raises(RunError) as raised:
        folder.open(of(config), overwrite=False)
    assert str(raised.value) == f"{tmp_path}/outputs/run/config.yaml: cannot be written (Is a directory)"


def test_a_run_that_fails_before_it_begins_leaves_nothing(tmp_path, config):
    """Unless it was there before, or something has been written; `outputs` stays where another run uses it."""
    outputs = tmp_path / "new" / "outputs"

    def fail(name: str, *files: str) -> None:
        with contextlib.suppress(RuntimeError), RunFolder(str(outputs), name) as folder:
            folder.open(of(config), overwrite=False)
            for file in files:
                (folder.path / file).touch()
            raise RuntimeError

    fail("run")
    assert os.listdir(tmp_path) == []
    fail("begun", "metrics.jsonl")
    fail("run")
    assert os.listdir(outputs) == ["begun"]
    (outputs / "run").mkdir()
    fail("run")
    assert sorted(os.listdir(outputs / "run")) == ["config.yaml", "lock"]


def test_a_folder_that_another_process_removed_meanwhile_is_not_taken(tmp_path, config, monkeypatch):
    """Its lock is held by nobody then, but belongs to no folder either."""
    flock = fcntl.flock
    run = tmp_path / "run"

    def removed(file, operation):
        flock(file, operation)
        shutil.rmtree(run)
        run.mkdir()
        (run / "lock").touch()

    monkeypatch.setattr("fcntl.flock", removed)
    with pytest.raises(RunError, match="another process writes in"), RunFolder(str(tmp_path), "run") as folder:
        folder.open(of(config), overwrite=False)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("text", ["lr: 0.1\n", "", "[1, 2", "model: {_target_: mine.Net}\n"])
def test_a_folder_of_something_else_stays_as_it_is(tmp_path, config, text, overwrite):
    mine = tmp_path / "outputs" / "mine"
    mine.mkdir(parents=True)
    for name in ("thesis.tex", "config.yaml", "metrics.jsonl"):
        (mine / name).write_text(text)
    with pytest.raises(RunError) as raised:
        RunFolder(str(mine.parent), "mine").open(of(config), overwrite=overwrite)
    assert str(raised.value) == f"name=mine: {mine} exists and holds no run; use another name"
    assert {path.name: path.read_text() for path in mine.iterdir()} == dict.fromkeys(
        ("thesis.tex", "config.yaml", "metrics.jsonl"), text
    )


def test_a_run_is_known_by_its_configuration_or_its_checkpoints(tmp_path, config):
    new = of(config)
    for lost in ("step_*", "config.yaml"):
        run = tmp_path / lost.strip("_*") / RUN
        shutil.copytree(STORED / "outputs" / RUN, run, ignore=shutil.ignore_patterns(lost))
        with RunFolder(str(run.parent), RUN) as folder:
            folder.open(new, overwrite=True)
        assert sorted(os.listdir(run)) == ["config.yaml", "lock"]
        with RunFolder(str(run.parent), RUN) as folder:
            folder.open(new, overwrite=False)


def test_a_configuration_is_durable_before_the_run_begins(tmp_path, config, monkeypatch):
    """It, its name in the run's folder, and that folder's in outputs: what a power cut must not part."""
    synchronised = []
    monkeypatch.setattr("os.fsync", lambda number: synchronised.append(os.readlink(f"/proc/self/fd/{number}")))
    RunFolder(str(tmp_path / "outputs"), "run").open(of(config), overwrite=False)
    run = f"{tmp_path}/outputs/run"
    assert synchronised == [f"{run}/.config.yaml.part", run, f"{tmp_path}/outputs"]


def test_a_folder_with_a_lost_or_damaged_configuration_keeps_its_checkpoints(tool, folder):
    file = folder / "outputs" / RUN / "config.yaml"
    whole = file.read_bytes()
    file.write_bytes(b"")
    line = one_line(tool("pretrain", *TINY, "recipe.ema=0.9", status=1))
    assert "config.yaml: is empty" in line
    assert "delete the file" in line
    assert "overwrite" not in line
    file.unlink()
    sgd = ("recipe.ema=0.9", "recipe.optimizer=sgd", "recipe.lr=2e-3")
    assert "recipe.optimizer=sgd" in one_line(tool("pretrain", *TINY, *sgd, status=1))
    file.unlink()
    assert "is finished (6 steps)" in tool("pretrain", *TINY, "recipe.ema=0.9").stdout
    assert dict(flatten(yaml.safe_load(file.read_bytes())))["recipe.lr"] == yaml.safe_load(whole)["recipe"]["lr"]
    assert sorted(os.listdir(file.parent)) == sorted(
        ["config.yaml", "lock", "metrics.jsonl", "step_00000004", "step_00000006"]
    )
