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
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ssvit.atomic_io import seal
from ssvit.checkpoints.configuration import (
    ADDED,
    BUILDERS,
    Configuration,
    ConfigurationError,
    command,
    flatten,
    foreign,
    refers,
)
from ssvit.checkpoints.run_folder import RunError, RunFolder
from ssvit.cli.launch import CONFIGS
from ssvit.cli.pretrained import _data, settled

FIRST = Path(__file__).parent / "fixtures" / "first_edition"
RUN = "masked_patch_synthetic"
CANARY = "canary"  # what an attack makes: a folder in the working directory of the tool


def call(target: str = "os.mkdir", **arguments) -> dict:
    return {"_target_": target, **(arguments or {"path": CANARY})}


@pytest.fixture
def config() -> dict:
    """What stands in the config.yaml of a run of the first edition."""
    return yaml.safe_load((FIRST / "outputs" / RUN / "config.yaml").read_text())


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with a run of the first edition under outputs/."""
    shutil.copytree(FIRST / "outputs" / RUN, tmp_path / "outputs" / RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVIL", "os.mkdir")
    monkeypatch.setenv("EVIL_NODE", f"{{_target_: os.mkdir, path: {CANARY}}}")
    return tmp_path


def second(config: dict, **choices) -> dict:
    """The same as the second edition keeps it, with some choices changed."""
    own = {"objective": "masked_patch", "data": "synthetic", "augment@data.augment": "inception_crop", **choices}
    return yaml.safe_load(Configuration.of(config, own).write())


# What is put in place of data.source, of which each really makes the canary where it is instantiated as it stands.
SOURCES = {
    "a call": call(),
    "positional arguments": {"_target_": "os.mkdir", "_args_": [CANARY]},
    "nested in an argument": call("builtins.dict", root=call()),
    "in a list": call("builtins.dict", roots=[[1, call()]]),
    "behind a known builder": call("ssvit.data.datasets.os.mkdir", path=CANARY),
    "in an argument of a known builder": call("ssvit.checkpoints.loading.load_classifier", path=call()),
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
def test_a_first_editions_folder_calls_nothing_but_its_own_builders(folder, config, way):
    config["data"]["source"], config["evil"] = SOURCES[way], call()
    (folder / "outputs" / RUN / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigurationError, match=r"nothing of it was run|may hold values only"):
        Configuration.read(folder / "outputs" / RUN / "config.yaml")
    assert not Path(CANARY).exists()


def attacked(config: dict) -> dict[str, dict | str]:
    """By its way, a whole config.yaml that would have something run."""
    text = yaml.safe_dump(config)
    new = second(config)
    return {
        "first: a source": {**config, "data": {**config["data"], "source": call()}},
        "first: a view": {**config, "data": {**config["data"], "view": call()}},
        "first: an augmentation": {**config, "data": {**config["data"], "augment": call()}},
        "first: a known builder in a wrong place": {
            **config,
            "data": {**config["data"], "source": call("ssvit.checkpoints.loading.load_encoder", path=".")},
        },
        "first: a value": {**config, "data": {**config["data"], "mean": [call(), 0, 0]}},
        "first: partial": {
            **config,
            "data": {**config["data"], "source": {**config["data"]["source"], "_partial_": True}},
        },
        "first: an alias": text.replace("data:\n", f"evil: &evil {{_target_: os.mkdir, path: {CANARY}}}\ndata:\n", 1)
        + "more: *evil\n",
        "first: a merged key": text + f"a: &a {{_target_: os.mkdir, path: {CANARY}}}\nb: {{<<: *a}}\n",
        "first: a tag": text + f"evil: !!python/object/apply:os.mkdir [{CANARY}]\n",
        "second: a source": {**new, "data": {**new["data"], "source": call()}},
        "second: a target beside values": {
            **new,
            "data": {**new["data"], "source": {**new["data"]["source"], "_target_": "os.mkdir"}},
        },
        "second: a key of several names": {**new, "data": {**new["data"], "source._target_": "os.mkdir"}},
        "second: an option that is not there": {**new, "data": {**new["data"], "evil": {"path": CANARY}}},
        "second: the environment": {**new, "data": {**new["data"], "seed": "${oc.env:EVIL}"}},
        "second: a resolver in a list": {**new, "data": {**new["data"], "mean": ["${oc.decode:'1'}"]}},
        "second: a reference with a resolver inside": {
            **new,
            "data": {**new["data"], "seed": "${data.${oc.env:EVIL}}"},
        },
        "second: a file outside": second(config, data="../../../evil"),
        "second: an absolute file": second(config, data="/tmp/evil"),
        "second: a group outside": second(config, **{"../evil@data.augment": "evil"}),
        "second: a group of hydra's": second(config, **{"hydra/callbacks": "evil"}),
        "second: several in one": second(config, data="synthetic,+evil"),
        "second: an override in a name": second(config, **{"augment@data.augment": "x data.source._target_=os.mkdir"}),
        "second: a file that is not there": second(config, data="evil"),
        "second: choices of a list": {**new, "choices": ["data"]},
    }


WAYS = list(attacked(yaml.safe_load((FIRST / "outputs" / RUN / "config.yaml").read_text())))


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
    assert "a file's name chooses what is called" in line


def test_texts_that_refer_to_options_alone():
    for text in ("", "a", "${data.root}", "x ${data.root}/${..name}", "$HOME", "{data}"):
        assert refers(text), text
    for text in ("${oc.env:HOME}", "${data.${name}}", "${hydra:job}", "${}", "a ${b", "${a[0]:1}", "${oc.create:{}}"):
        assert not refers(text), text
    assert foreign({"a": [{"b": "${oc.env:HOME}"}]}) == "a[0].b"
    assert foreign({"a": [{"_x": 1}]}) == "a[0]._x"
    assert foreign({"a": [{"b": 1, "c": None}, "${a.b}"]}) == ""


def test_what_is_written_is_read_again(tmp_path, config):
    (tmp_path / "config.yaml").write_bytes(Configuration.of(config, {"data": "synthetic", "experiment": None}).write())
    found = Configuration.read(tmp_path / "config.yaml")
    assert found.choices == {"data": "synthetic", "experiment": None}
    without = {name: value for name, value in flatten(config) if "_target_" not in name}
    assert dict(flatten(found.values)) == without
    assert "_target_" not in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize("file", sorted((FIRST / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_data_set_of_the_first_edition_is_found_again(file):
    written = yaml.safe_load(file.read_text())["data"]
    node, choices = _data(file)
    assert choices["data"] == file.stem
    before = {name: BUILDERS.get(str(value), value) for name, value in flatten(written)}
    now = dict(flatten(node))
    assert {name: now[name] for name in before} == before  # builders too, which are those of configs/


def test_a_set_value_comes_with_the_data_set(folder, config):
    config["data"]["augment"]["flip"], config["data"]["images"] = 0.25, 99
    (folder / "config.yaml").write_text(yaml.safe_dump(second(config)))
    node, _ = _data(folder / "config.yaml")
    assert node["augment"]["flip"] == 0.25
    assert node["images"] == 99
    assert node["source"]["_target_"] == "ssvit.data.datasets.synthetic"


def test_a_data_set_of_ones_own_comes_from_ones_own_folder(folder, config, monkeypatch):
    (folder / "own" / "data").mkdir(parents=True)
    (folder / "own" / "data" / "mine.yaml").write_text("defaults:\n  - synthetic\n  - _self_\nimages: 7\n")
    (folder / "config.yaml").write_text(yaml.safe_dump(second(config, data="mine")))
    right = r"data=mine, .*: there is no such file here; give the folder that has it \(--config-dir"
    with pytest.raises(ConfigurationError, match=right):
        _data(folder / "config.yaml")
    for words in (["--config-dir", "own"], ["--config-dir=own"], ["-cd", "own"]):
        monkeypatch.setattr("ssvit.cli.launch._options", [*words, "recipe.steps=3"])
        node, choices = _data(folder / "config.yaml")
        assert choices["data"] == "mine"
        assert node["images"] == 64  # as the run was, not as its file says today
        assert node["source"]["_target_"] == "ssvit.data.datasets.synthetic"


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


def test_options_that_are_new_stand_for_what_was_done_before(config, monkeypatch):
    old = Configuration.of(config, {})
    monkeypatch.setitem(ADDED, "recipe.new", 3)
    for value, difference in ((3, None), (4, ("recipe.new", 4, 3))):
        now = Configuration.of({**config, "recipe": {**config["recipe"], "new": value}}, {"data": "synthetic"})
        assert now.difference(old) == difference


def test_a_run_from_before_the_changes_of_crops_had_none(config):
    changes = yaml.safe_load((CONFIGS / "augment" / "changes" / "none.yaml").read_text())
    augment = config["data"]["augment"]
    before = {name: value for name, value in augment.items() if name not in changes}
    old = Configuration.of({**config, "data": {**config["data"], "augment": before}}, {})
    for jitter, difference in ((0.0, None), (0.8, ("data.augment.jitter", 0.8, 0.0))):
        now = {**config, "data": {**config["data"], "augment": {**augment, "jitter": jitter}}}
        assert Configuration.of(now, {}).difference(old) == difference


# The defaults of pre-training that have changed since.
FORMER = {
    "encoder": "small", "recipe.optimizer": "adamw", "recipe.momentum": 0.9, "recipe.lr": 2e-3, "recipe.warmup": 50,
    "recipe.evaluate_every": 100, "recipe.save_every": 100, "recipe.steps": 600, "probe": "[knn,few_shot]",
    "probing.train_images": 500, "probing.test_images": 750,
}  # fmt: skip


@pytest.mark.parametrize("file", sorted((FIRST / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_run_of_the_first_edition_goes_on_by_the_same_command_with_its_defaults(file):
    former = [f"{name}={value}" for name, value in FORMER.items()]
    options = [f"data={file.stem}", "data.root=/images", f"name=masked_patch_{file.stem}", *former]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        now = settled(compose("pretrain", options))
        assert Configuration.of(now, {"data": file.stem}).difference(Configuration.read(file)) is None
        other = settled(compose("pretrain", [*options, "recipe.lr_end=1e-5"]))
        assert Configuration.of(other, {}).difference(Configuration.read(file)) == ("recipe.lr_end", 1e-5, 0.0)


@pytest.mark.parametrize(("compile", "backend"), [("auto", "auto"), (True, "compile"), (False, "kernels")])
def test_what_computed_the_layers_is_known_by_its_first_name(config, compile, backend):
    recipe = {name: value for name, value in config["recipe"].items() if name not in ("backend", "compile")}
    old = Configuration.of({**config, "recipe": {**recipe, "compile": compile}}, {})
    for now in ("auto", "compile", "kernels", "eager"):
        new = Configuration.of({**config, "recipe": {**recipe, "backend": now}}, {})
        assert new.difference(old) == (None if now == backend else ("recipe.backend", now, backend))


def test_the_first_editions_dropout_was_of_attention_too(config):
    old = Configuration.of({**config, "encoder": {**config["encoder"], "dropout": 0.1}}, {})
    for own, difference in ((0.1, None), (0.0, ("encoder.attention_dropout", 0.0, 0.1))):
        encoder = {**config["encoder"], "dropout": 0.1, "attention_dropout": own}
        assert Configuration.of({**config, "encoder": encoder}, {}).difference(old) == difference


def test_a_difference_that_matters_is_named(config):
    new = Configuration.of(config, {"data": "synthetic", "objective": "masked_patch", "experiment": None})
    assert new.difference(new) is None
    for change, name in (
        ({"recipe": {**config["recipe"], "lr": 7}}, "recipe.lr"),
        ({"workers": 3}, None),
        ({"data": {**config["data"], "root": "elsewhere"}}, None),
    ):
        other = Configuration.of({**config, **change}, new.choices)
        assert (other.difference(new) or (None,))[0] == name
    chosen = Configuration.of(config, {**new.choices, "objective": "supervised"})
    assert chosen.difference(new) == ("objective", "supervised", "masked_patch")
    assert Configuration.of(config, {**new.choices, "experiment": "x", "data": "y"}).difference(new) is None
    # A first edition's file has no choices: what it called is compared.
    assert new.difference(Configuration.of(config, {})) is None
    other = {**config, "objective": {**config["objective"], "_target_": "ssvit.objectives.classify.Classify"}}
    assert Configuration.of(other, new.choices).difference(Configuration.of(config, {}))[0] == "objective"


def test_a_command_is_the_same_in_any_order():
    assert command(["a=1", "b=2"]) == command(["b=2", "a=1"]) != command(["a=1"])


def test_a_configuration_that_cannot_be_written_is_one_line(tmp_path, config):
    (tmp_path / "outputs" / "run" / ".config.yaml.part").mkdir(parents=True)  # what is written first
    folder = RunFolder(str(tmp_path / "outputs"), "run")
    with pytest.raises(RunError) as raised:
        folder.open(Configuration.of(config, {}), overwrite=False)
    assert str(raised.value) == f"{tmp_path}/outputs/run/config.yaml: cannot be written (Is a directory)"


def test_a_run_that_fails_before_it_begins_leaves_nothing(tmp_path, config):
    """Unless it was there before, or something has been written; `outputs` stays where another run uses it."""
    outputs = tmp_path / "new" / "outputs"

    def fail(name: str, *files: str) -> None:
        with contextlib.suppress(RuntimeError), RunFolder(str(outputs), name) as folder:
            folder.open(Configuration.of(config, {}), overwrite=False)
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
        folder.open(Configuration.of(config, {}), overwrite=False)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("text", ["lr: 0.1\n", "", "[1, 2", "model: {_target_: mine.Net}\n"])
def test_a_folder_of_something_else_stays_as_it_is(tmp_path, config, text, overwrite):
    mine = tmp_path / "outputs" / "mine"
    mine.mkdir(parents=True)
    for name in ("thesis.tex", "config.yaml", "metrics.jsonl"):
        (mine / name).write_text(text)
    with pytest.raises(RunError) as raised:
        RunFolder(str(mine.parent), "mine").open(Configuration.of(config, {}), overwrite=overwrite)
    assert str(raised.value) == f"name=mine: {mine} exists and holds no run; use another name"
    assert {path.name: path.read_text() for path in mine.iterdir()} == dict.fromkeys(
        ("thesis.tex", "config.yaml", "metrics.jsonl"), text
    )


def test_a_run_is_known_by_its_configuration_or_its_checkpoints(tmp_path, config):
    new = Configuration.of(config, {"objective": "masked_patch"})
    for lost in ("step_*", "config.yaml"):  # of a run of the first edition
        run = tmp_path / lost.strip("_*") / RUN
        shutil.copytree(FIRST / "outputs" / RUN, run, ignore=shutil.ignore_patterns(lost))
        with RunFolder(str(run.parent), RUN) as folder:
            folder.open(new, overwrite=True)
        assert sorted(os.listdir(run)) == ["config.yaml", "lock"]
        with RunFolder(str(run.parent), RUN) as folder:
            folder.open(new, overwrite=False)


def test_a_configuration_is_durable_before_the_run_begins(tmp_path, config, monkeypatch):
    """It, its name in the run's folder, and that folder's in outputs: what a power cut must not part."""
    synchronised = []
    monkeypatch.setattr("os.fsync", lambda number: synchronised.append(os.readlink(f"/proc/self/fd/{number}")))
    RunFolder(str(tmp_path / "outputs"), "run").open(Configuration.of(config, {}), overwrite=False)
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
    former = ("recipe.ema=0.9", "recipe.optimizer=adamw", "recipe.lr=2e-3")
    assert "recipe.optimizer=muon" in one_line(tool("pretrain", *TINY, "recipe.ema=0.9", status=1))
    file.unlink()
    assert "is finished (6 steps)" in tool("pretrain", *TINY, *former).stdout
    assert dict(flatten(yaml.safe_load(file.read_bytes())))["recipe.lr"] == yaml.safe_load(whole)["recipe"]["lr"]
    assert sorted(os.listdir(file.parent)) == sorted(
        ["config.yaml", "lock", "metrics.jsonl", "step_00000004", "step_00000006"]
    )
