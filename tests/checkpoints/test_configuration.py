"""A run folder contains names of files and values; anything else is rejected by its name and never executed."""

import contextlib
import fcntl
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from command import TINY, one_line

from ssvit import cli
from ssvit.checkpoints import manifest
from ssvit.checkpoints.configuration import Configuration, ConfigurationError, code_entry
from ssvit.checkpoints.manifest import CheckpointError
from ssvit.checkpoints.run_folder import RunError, RunFolder, discard_former
from ssvit.config.command_line import CommandLine
from ssvit.engine.atomic_io import sealed
from ssvit.loading.pretrained import _data

STORED = Path(__file__).parents[1] / "fixtures"
RUN = "masked_patch_shapes"
CANARY = "canary"  # the folder that an attack creates in the working directory of the command
CALL = {"_target_": "os.mkdir", "path": CANARY}


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
    """Return the configuration with some choices changed."""
    return {**config, "choices": config["choices"] | choices}


def of(config: dict) -> Configuration:
    """The content of a config.yaml as it is read."""
    values = {name: value for name, value in config.items() if name not in ("choices", "schema")}
    return Configuration(values, config["choices"])


def attacked(config: dict) -> dict[str, dict | str]:
    """Return config.yaml files that would execute code in a command that composes or instantiates them."""
    text = yaml.safe_dump(config)

    def data(**changes) -> dict:
        return {**config, "data": {**config["data"], **changes}}

    return {
        "a call": data(source=CALL),
        "a call in a list": data(source={"roots": [[1, CALL]]}),
        "decoded from the environment": data(source="${oc.decode:${oc.env:EVIL_NODE}}"),
        "made by a resolver": data(source="${oc.create:{_target_: os.mkdir, path: " + CANARY + "}}"),
        "partial": data(view={**config["data"]["view"], "_partial_": True}),
        "an alias": text.replace("data:\n", f"evil: &evil {{_target_: os.mkdir, path: {CANARY}}}\ndata:\n", 1)
        + "more: *evil\n",
        "a merged key": text + f"a: &a {{_target_: os.mkdir, path: {CANARY}}}\nb: {{<<: *a}}\n",
        "a tag": text + f"evil: !!python/object/apply:os.mkdir [{CANARY}]\n",
        "a key of several names": data(**{"source._target_": "os.mkdir"}),
        "an unknown option": data(evil={"path": CANARY}),
        "a resolver in a list": data(mean=["${oc.decode:'1'}"]),
        "a reference with a resolver inside": data(seed="${data.${oc.env:EVIL}}"),
        "a file outside": chosen(config, data="../../../evil"),
        "an absolute file": chosen(config, data="/tmp/evil"),
        "a group outside": chosen(config, **{"../evil@data.augment": "evil"}),
        "a group of hydra's": chosen(config, **{"hydra/callbacks": "evil"}),
        "several in one": chosen(config, data="shapes,+evil"),
        "an override in a name": chosen(config, **{"augment@data.augment": "x data.source._target_=os.mkdir"}),
        "an unknown file": chosen(config, data="evil"),
        "no choices": of(config).values,
        "choices of a list": {**config, "choices": ["data"]},
    }


WAYS = list(attacked(yaml.safe_load((STORED / "outputs" / RUN / "config.yaml").read_text())))


@pytest.mark.parametrize("way", WAYS)
def test_no_content_of_a_run_folder_is_executed(folder, config, way):
    attack = attacked(config)[way]
    (folder / "config.yaml").write_text(attack if isinstance(attack, str) else yaml.safe_dump(attack))
    with pytest.raises(ConfigurationError, match=f"^{folder}/config.yaml: "):
        _data(folder / "config.yaml", CommandLine([]))
    assert not Path(CANARY).exists()


@pytest.mark.parametrize("command", ["finetune", "visualize"])
def test_commands_reject_code_in_a_run_folder(tool, folder, config, no_torch, command):
    config["data"]["source"] = CALL
    (folder / "outputs" / RUN / "config.yaml").write_text(yaml.safe_dump(config))
    line = one_line(tool(command, f"checkpoint=outputs/{RUN}", status=2, PYTHONPATH=no_torch))
    assert f"outputs/{RUN}/config.yaml: " in line
    assert not Path(CANARY).exists()


@pytest.mark.parametrize("block", ["encoder", "view"])
def test_a_manifest_contains_values_only(folder, block):
    file = folder / "outputs" / RUN / "step_00000006" / "manifest.json"
    facts = json.loads(file.read_text())
    facts[block]["dropout"] = CALL
    file.write_bytes(sealed(facts))
    with pytest.raises(CheckpointError, match=rf"{block}\.dropout\._target_: "):
        manifest.read_manifest(file.parent)


def test_the_first_option_that_could_be_code_is_named():
    assert code_entry({"a": [{"b": "${oc.env:HOME}"}]}) == "a[0].b"
    assert code_entry({"a": [{"_x": 1}]}) == "a[0]._x"
    assert code_entry({"a": [{"b": 1, "c": None}, "$HOME", "{data}"]}) == ""


def test_a_stored_configuration_is_read_back_without_builders(tmp_path):
    data = {"_part_": "data/mine", "size": 3, "image_size": 16, "view": {"size": "???"}}
    builders = {"data": data, "encoder": {"_part_": "encoder/vit", "image_size": 16}}
    (tmp_path / "config.yaml").write_bytes(
        Configuration.of_values(builders, {"data": "mine", "experiment": "my.v1"}).serialized()
    )
    found = Configuration.read(tmp_path / "config.yaml")
    assert found.choices == {"data": "mine", "experiment": "my.v1"}
    del data["_part_"], builders["encoder"]["_part_"]
    assert found.values == builders
    assert "_part_" not in (tmp_path / "config.yaml").read_text()


def test_values_of_the_data_set_are_those_of_the_run(folder, config):
    config["data"]["augment"]["flip"], config["data"]["images"] = 0.25, 99
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    node, _ = _data(folder / "config.yaml", CommandLine([]))
    assert (node["augment"]["flip"], node["images"]) == (0.25, 99)
    assert node["_part_"] == "data/shapes"


def test_a_data_set_of_the_user_is_composed_from_the_configuration_folder(folder, config):
    (folder / "own" / "data").mkdir(parents=True)
    (folder / "own" / "data" / "mine.yaml").write_text("defaults:\n  - shapes\n  - _self_\nimages: 7\n")
    (folder / "config.yaml").write_text(yaml.safe_dump(chosen(config, data="mine")))
    with pytest.raises(ConfigurationError, match=r"data=mine, .*--config-dir"):
        _data(folder / "config.yaml", CommandLine([]))
    node, choices = _data(folder / "config.yaml", CommandLine(["--config-dir", "own"]))
    assert (choices["data"], node["images"]) == ("mine", 64)  # the value of the run, not of the current file


@pytest.mark.parametrize(
    "text", [b"", b"[1, 2]", b"a: [" * 5000, b"\xff\xfe\x00", b"a: 1\n" * 300_000, b"1: a\n", b"a: &a [1]\nb: *a\n"]
)
def test_a_damaged_file_is_reported_in_one_line(tmp_path, text):
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(ConfigurationError, match=r"config\.yaml: ") as caught:
        Configuration.read(tmp_path / "config.yaml")
    assert "\n" not in str(caught.value)


def test_a_relevant_difference_is_named(config):
    old = of(config)
    for change, difference in (
        ({}, None),
        ({"recipe": {**config["recipe"], "lr": 7}}, ("recipe.lr", 7, config["recipe"]["lr"])),
        ({"recipe": {**config["recipe"], "new": 7}}, ("recipe.new", 7, "(absent)")),
        ({"workers": 3, "probe": {"mine": {}}, "probing": {"every": 7}}, None),
        ({"data": {**config["data"], "root": "elsewhere"}}, None),
        (chosen(config, objective="supervised"), ("objective", "supervised", "masked_patch")),
        (chosen(config, experiment="x", data="y"), None),
    ):
        assert of({**config, **change}).difference(old) == difference


def test_a_run_of_a_version_without_an_option_is_continued_with_its_default(config):
    for value, difference in ((7, None), (8, ("recipe.new", 8, "(absent)"))):
        now = of({**config, "recipe": {**config["recipe"], "new": value}})
        assert replace(now, defaults={"recipe.new": 7}).difference(of(config)) == difference


def test_declared_defaults_have_full_names():
    config = cli.find_command("pretrain").compose(CommandLine(["objective=mae", "recipe.lr=1"]))
    defaults = Configuration.of_run(config).defaults
    recipe = defaults["recipe.repeats"], defaults["recipe.optimizer"]
    assert (*recipe, defaults["encoder.attention"], defaults["data.augment.erasing"]) == (1, "muon", "full", 0.0)
    assert defaults["data.augment.erased_area"] == config.written["data"]["augment"]["erased_area"]


def test_the_identity_of_a_command_is_independent_of_the_order():
    first, again, other = (CommandLine(options).identity for options in (["a=1", "b=2"], ["b=2", "a=1"], ["a=1"]))
    assert first == again != other


def test_an_unwritable_configuration_is_reported_in_one_line(tmp_path, config):
    (tmp_path / "outputs" / "run" / f".config.yaml.{os.getpid()}.part").mkdir(parents=True)  # what is written first
    folder = RunFolder(str(tmp_path / "outputs"), "run")
    with pytest.raises(RunError, match=f"^{tmp_path}/outputs/run/config.yaml: .*$"):
        folder.open(of(config), overwrite=False)


def test_a_run_that_fails_before_its_start_is_removed(tmp_path, config):
    """Unless it existed before, or contains other files; `outputs` stays if another run uses it."""
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


def test_a_folder_that_was_removed_while_it_was_locked_is_not_used(tmp_path, config, monkeypatch):
    """The lock then belongs to no folder."""
    flock = fcntl.flock
    run = tmp_path / "run"

    def removed(file, operation):
        flock(file, operation)
        shutil.rmtree(run)
        run.mkdir()
        (run / "lock").touch()

    monkeypatch.setattr("fcntl.flock", removed)
    with pytest.raises(RunError, match=r"^name=run: "), RunFolder(str(tmp_path), "run") as folder:
        folder.open(of(config), overwrite=False)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("text", ["lr: 0.1\n", "", "[1, 2", "model: {_target_: mine.Net}\n"])
def test_a_folder_of_another_program_is_not_changed(tmp_path, config, text, overwrite):
    mine = tmp_path / "outputs" / "mine"
    mine.mkdir(parents=True)
    for name in ("thesis.tex", "config.yaml", "metrics.jsonl"):
        (mine / name).write_text(text)
    with pytest.raises(RunError, match=r"^name=mine: "):
        RunFolder(str(mine.parent), "mine").open(of(config), overwrite=overwrite)
    assert [path.read_text() for path in mine.iterdir()] == 3 * [text]


def test_a_run_is_recognised_by_its_configuration_or_its_checkpoints(tmp_path, config):
    new = of(config)
    for lost in ("step_*", "config.yaml"):
        run = tmp_path / lost.strip("_*") / RUN
        shutil.copytree(STORED / "outputs" / RUN, run, ignore=shutil.ignore_patterns(lost))
        with RunFolder(str(run.parent), RUN) as folder:
            folder.open(new, overwrite=True)
        assert sorted(os.listdir(run)) == ["config.yaml", "lock"]
        with RunFolder(str(run.parent), RUN) as folder:
            folder.open(new, overwrite=False)


def contents(run):
    return {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.fixture
def stored_run(tmp_path):
    run = tmp_path / RUN
    shutil.copytree(STORED / "outputs" / RUN, run)
    (run / "lock").touch()
    return run


def test_a_run_on_other_images_is_named_by_their_folder(stored_run, config):
    def on(root: str, steps: int) -> Configuration:
        changes = {"data": {**config["data"], "root": root}, "recipe": {**config["recipe"], "steps": steps}}
        return of({**config, **changes})

    (stored_run / "config.yaml").write_bytes(on("photos", 6).serialized())
    with RunFolder(str(stored_run.parent), RUN) as folder:
        folder.open(on("moved", 6), overwrite=False)
    with pytest.raises(RunError, match=r"^data=drawings: .*photos"), RunFolder(str(stored_run.parent), RUN) as folder:
        folder.open(on("drawings", 7), overwrite=False)


@pytest.mark.parametrize("moved", range(6))
def test_a_run_that_was_killed_while_another_replaced_it_is_whole_again(stored_run, config, monkeypatch, moved):
    """The process is killed before the given number of moves of files, of which those of the metrics are the last."""
    before, done, rename, listed = contents(stored_run), [], Path.rename, Path.iterdir

    def killed(path, target):
        if len(done) == moved:
            raise KeyboardInterrupt
        done.append(path)
        return rename(path, target)

    with monkeypatch.context() as patch:
        order = lambda entry: (entry.name == "metrics.jsonl", entry.name)  # noqa: E731
        patch.setattr(Path, "iterdir", lambda path: iter(sorted(listed(path), key=order)))
        patch.setattr(Path, "rename", killed)
        opened = RunFolder(str(stored_run.parent), RUN)
        with contextlib.suppress(KeyboardInterrupt):
            opened.open(of(config), overwrite=True)
    opened._lock.close()
    with RunFolder(str(stored_run.parent), RUN) as folder, contextlib.suppress(RunError):
        folder.open(of(config), overwrite=False)
    assert contents(stored_run) == before


def test_a_run_is_overwritten_only_when_the_new_one_starts(tmp_path, stored_run, config):
    before = contents(stored_run)

    def fail(started):
        with RunFolder(str(tmp_path), RUN) as folder:
            folder.open(of(config), overwrite=True)
            assert folder.started() is None
            if started:
                discard_former(stored_run)
            raise RunError("no images")

    with pytest.raises(RunError, match="no images"):
        fail(started=False)
    assert contents(stored_run) == before
    with pytest.raises(RunError, match="no images"):
        fail(started=True)
    assert set(map(str, contents(stored_run))) == {"config.yaml", "lock"}


def test_the_configuration_is_durable_before_the_run_starts(tmp_path, config, monkeypatch):
    synchronised = []
    monkeypatch.setattr("os.fsync", lambda number: synchronised.append(os.readlink(f"/proc/self/fd/{number}")))
    RunFolder(str(tmp_path / "outputs"), "run").open(of(config), overwrite=False)
    run = f"{tmp_path}/outputs/run"
    assert synchronised == [f"{run}/.config.yaml.{os.getpid()}.part", run, f"{tmp_path}/outputs"]


def test_a_run_with_a_lost_or_damaged_configuration_keeps_its_checkpoints(tool, folder):
    file = folder / "outputs" / RUN / "config.yaml"
    file.write_bytes(b"")
    options = (*TINY, "encoder.positions=sine_cosine_2d")
    line = one_line(tool("pretrain", *options, "recipe.ema=0.9", status=1))
    assert "config.yaml: " in line
    file.unlink()
    sgd = ("recipe.ema=0.9", "recipe.optimizer=sgd", "recipe.lr=2e-3")
    assert "recipe.optimizer=sgd" in tool("pretrain", *options, *sgd, status=1).stderr
    file.unlink()
    assert "is finished (6 steps)" in tool("pretrain", *options, "recipe.ema=0.9").stdout
    files = ["config.yaml", "lock", "metrics.jsonl", "step_00000004", "step_00000006"]
    assert sorted(os.listdir(file.parent)) == files
