"""Options are checked before torch is imported, and each is declared in one class and used in YAML files only."""

import json
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import composing
import numpy as np
import pytest
from command import LIMIT, error_of
from PIL import Image

from ssvit.checkpoints import manifest
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.choices import PARTS, add, options_of
from ssvit.cli import find_command
from ssvit.config.command_line import CommandLine
from ssvit.config.composition import set_option
from ssvit.config.declaration import select
from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources.datasets_options import Shards
from ssvit.errors import Failure, OptionError, file_to_write, folder_to_write
from ssvit.loading.options import eval_transform
from ssvit.training.recipe import Recipe
from ssvit.values import value_of

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
CLASSIFIER = ROOT / "tests" / "fixtures" / "outputs" / "finetune_masked_patch_shapes"
WRONG = "wrong"  # what no option can be
# Choices that between them have every part that pre-training can be made of.
CHOICES = {
    "ti": ["encoder=ti", "data.image_size=224"],
    "hybrid": ["encoder=r50_vit_b16", "data.image_size=224"],
    "mae": ["objective=mae"],
    "masked_patch_decoder": ["objective=masked_patch_decoder"],
    "simmim": ["objective=simmim"],
    "latent": ["objective=latent"],
    "ibot": ["objective=ibot"],
    "color_grid": ["target=color_grid"],
    "pixels": ["target=pixels"],
    "hog": ["target=hog"],
    "codebook": ["target=codebook"],
    "codebook_of_features": [
        "target=codebook", f"target.checkpoint={CLASSIFIER}", "target.layer=1", "data.image_size=16",
    ],
    "taught": ["objective=supervised", "distillation=deit", f"teacher={CLASSIFIER}", "data.image_size=16"],
    "inception_crop": ["augment@data.augment=inception_crop"],
    "multi_crop": ["objective=dino", "augment@data.augment=multi_crop_small"],
    "folder": ["data=folder", "data.root=FOLDER", "data.image_size=16", "recipe.batch_size=4"],
    "csv": ["data=csv", "data.table=FOLDER/table.csv", "data.image_size=16", "recipe.batch_size=4"],
    "shift_crop": ["data=cifar10", "data.root=FOLDER"],
    "resize_crop": ["data=cifar10", "data.root=FOLDER", "augment@data.augment=resize_crop"],
    "stl10": ["data=stl10", "data.root=FOLDER"],
}  # fmt: skip
# The average of weights may be kept where the student is probed, and views of another size suit objectives that do not
# sample patches.
VALID = {
    "average_of_latent": ["objective=latent", "recipe.ema=0.99"],
    "average_of_mae": ["objective=mae", "recipe.ema=0.99"],
    "views_of_dino": ["objective=dino", "data.augment.local_views=0", "data.augment.size=48"],
    "views_of_simclr": ["objective=simclr", "data.augment.size=48"],
    "views_of_supervised": ["objective=supervised", "data.augment.size=48"],
}


def composed(overrides, images):
    return composing.composed(*(option.replace("FOLDER", str(images)) for option in overrides))


def nodes(config, name=""):
    """Every part of a configuration: (its name, its options)."""
    if isinstance(config, dict):
        if "_part_" in config:
            yield name, config
        for key, value in config.items():
            yield from nodes(value, f"{name}.{key}" if name else key)


CHECK = """
import json, sys
class Trap:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("torch", "numpy", "torchvision"):
            raise SystemExit(f"{name} was imported")
sys.meta_path.insert(0, Trap())
from ssvit.config.declaration import Tree, select
from ssvit.errors import Failure, OptionError, UserError
from ssvit.training.options import Pretrain
for line in sys.stdin:
    try:
        Tree(select(Pretrain, json.loads(line))).check()
        print("null")
    except UserError as error:
        print(json.dumps([getattr(error, "name", None), str(error)]))
"""


def refusals(configs) -> list[tuple[str, str] | None]:
    """Return the error of each configuration (option and line), None if it is valid, from one process without torch."""
    lines = "\n".join(map(json.dumps, configs))
    command = [sys.executable, "-c", CHECK]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=LIMIT, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def changed(config, option, value) -> dict:
    """A configuration with another value of one option."""
    key, _, rest = option.partition(".")
    return config | {key: changed(config[key], rest, value) if rest else value}


@pytest.fixture(scope="module")
def told(images):
    """Return the errors for a wrong value of every option, {choice: {option: error}}; "" is the valid configuration."""
    plain = {choice: composed(overrides, images) for choice, overrides in (CHOICES | VALID).items()}
    configs = {(choice, ""): config for choice, config in plain.items()}
    for choice in CHOICES:
        options = [
            f"{name}.{key}"
            for name, node in nodes(plain[choice])
            if (known := options_of(node["_part_"]))
            for key in known.model_fields
        ]
        options += [f"{group}.{key}" for group in ("recipe", "subset") for key in plain[choice][group]]
        for option in [*options, "workers", "loader_timeout", "development"]:
            configs[choice, option] = changed(plain[choice], option, WRONG)
    found = {choice: {} for choice in plain}
    for (choice, option), refusal in zip(configs, refusals(configs.values()), strict=True):
        found[choice][option] = refusal
    return found


@pytest.mark.parametrize("choice", CHOICES)
def test_every_option_of_every_part_is_checked_without_torch(told, choice):
    assert told[choice].pop("") is None
    for option, found in told[choice].items():
        assert found is not None, f"{option}={WRONG} is accepted"
        name, line = found
        assert name == option
        assert line.startswith(f"{option}=")
        assert "\n" not in line


@pytest.mark.parametrize("choice", VALID)
def test_valid_combinations_are_accepted(told, choice):
    assert told[choice] == {"": None}


def test_options_lie_next_to_the_part_that_uses_them():
    for module in (ROOT / "ssvit").rglob("*_options.py"):
        part = module.with_name(module.name.replace("_options", ""))
        assert part.is_file(), f"{module} belongs to no {part.name}"
    for full, part in ((f"{group}/{name}", part) for group, parts in PARTS.items() for name, part in parts.items()):
        assert options_of(full).__module__.rpartition(".")[0] == part.code.rsplit(".", 2)[0], full


def test_a_package_has_one_module_of_options_or_one_for_each_part():
    for module in (ROOT / "ssvit").rglob("options.py"):
        assert not list(module.parent.glob("*_options.py")), module.parent


def test_a_part_of_a_users_own_is_found_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("")
    (tmp_path / "own" / "targets_options.py").write_text(
        "from ssvit.config.declaration import Count, Options\nclass Edges(Options):\n    count: Count\n"
    )
    (tmp_path / "own" / "targets.py").write_text(
        "class Edges:\n    def __init__(self, options): self.options = options\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("ssvit.choices.PARTS", {group: {**parts} for group, parts in PARTS.items()})
    add("target", "edges", "own.targets.Edges")
    kind = options_of("target/edges")
    assert kind(count=3).count == 3
    for values, line in (
        ({"count": 0}, "count=0: "),
        ({}, "count: "),
        ({"count": 1, "colour": "red"}, r"colour=red: .*\bcount\b"),
    ):
        with pytest.raises(OptionError, match=f"^{line}"):
            kind(**values)
    assert select(kind, {"count": 3, "colour": "red"}) == kind(count=3)
    assert kind(count=3).build().options == kind(count=3)
    for name in ("target/corners", "own.targets.Edges", "target", "/edges", "target/edges/", "os.mkdir", "", None):
        assert options_of(name) is None
    assert "encoder=b" in str(error_of(add, "encoder", "b", "own.encoders.B"))


def test_a_manifest_tells_options_of_a_transform_that_there_are():
    path, encoder = Path("run/step_1"), {"image_size": [16, 24]}
    assert eval_transform(Checkpoint(path, {"encoder": encoder})) == CenterCrop(size=(16, 24))
    assert eval_transform(Checkpoint(path, {"view": {"size": 8, "fit": "squash"}})) == CenterCrop(size=8, fit="squash")
    with pytest.raises(manifest.CheckpointError, match=r"^run/step_1: view\.depth=3: "):
        eval_transform(Checkpoint(path, {"view": {"size": 8, "depth": 3}}))


@pytest.mark.parametrize("error", [OptionError("recipe.lr", None, "must be a number"), Failure("a mistake", 2)])
def test_an_error_reaches_another_process_as_it_is(error):
    other = pickle.loads(pickle.dumps(error))
    assert (type(other), vars(other), str(other)) == (type(error), vars(error), str(error))


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (file_to_write, "folder"), (file_to_write, "pipe"), (file_to_write, "no/where.json"),
        (file_to_write, "text.txt/a.json"), (partial(file_to_write, begins=["yours", "mine and more"]), "text.txt"),
        (folder_to_write, "text.txt"), (folder_to_write, "text.txt/deep/er"),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch, check, value):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("text.txt").write_text("mine")
    os.mkfifo("pipe")
    with pytest.raises(OptionError, match=f"^output={value}: "):
        check("output", value)
    file_to_write("output", "text.txt", begins=["yours", "mi"])
    folder_to_write("output", "folder/deep/er")
    monkeypatch.setattr("os.access", lambda *_: False)  # the superuser, as whom tests may run, can write anywhere
    for where in (file_to_write, folder_to_write):
        with pytest.raises(OptionError, match=r"^output=new: "):
            where("output", "new")


def test_an_error_names_a_path_that_is_not_utf8():
    assert str(error_of(Shards, root="/missing/\udcff")).startswith("root=/missing/\\udcff: ")


NAMES = (
    "photos (1)", "ünï", "Fotos [2024]", "it's", "a,b", "a=b", "{a}", "a\\", "'q'x'", "trail ", "a\nb", "choice(a,b)",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_path_or_text_is_used_as_typed(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    for number in range(4):
        Image.new("RGB", (24, 20), (number, 0, 0)).save(folder / f"{number}.png")
    values = composing.composed(f"data={folder}", "preset=null", f"outputs={name}", "recipe.batch_size=2")
    assert (values["data"]["root"], values["outputs"]) == (str(folder), name)


@pytest.mark.parametrize("text", ["32", "1e-3", ".5", "2.", "1_000", "-inf", "NaN", "null", "True", "e3", "1.2.3"])
def test_a_text_in_an_error_is_a_text_on_a_command_line(text):
    with pytest.raises(OptionError) as error:
        Recipe(steps=text)
    typed = str(error.value).partition(":")[0].partition("=")[2]
    assert value_of(typed) == text


def test_a_warm_up_of_a_file_is_shortened_to_less_than_the_steps_and_a_typed_one_is_kept():
    recipe = composing.composed("recipe.steps=20", "preset=null")["recipe"]
    assert recipe["warmup"] == 1
    with pytest.raises(Failure, match=r"^recipe\.warmup=20: "):
        composing.composed("recipe.steps=20", "recipe.warmup=20", "preset=null")
    composing.composed("budget=60s", "recipe.warmup=5000")  # the budget determines the number of steps


def test_typed_classes_of_masks_replace_those_of_a_file():
    options = {"data": {"_part_": "data/folder", "mask_classes": {"a": 0, "b": 1}, "mean": 0.5}}
    set_option(options, "data.mask_classes", {"x": 5, "y": 6})
    assert options["data"]["mask_classes"] == {"x": 5, "y": 6}
    set_option(options, "data", {"mean": 0.25})
    assert options["data"]["mask_classes"] == {"x": 5, "y": 6}


def test_values_that_are_not_texts_keep_their_meaning():
    values = composing.composed("recipe.betas=[0.8,0.9]", "recipe.lr=1e-3", "recipe.best=null", "name='a,b'")
    recipe = values["recipe"]
    assert (recipe["betas"], recipe["lr"], recipe["best"], values["name"]) == ([0.8, 0.9], 1e-3, None, "a,b")


@pytest.mark.parametrize("option", ["recipe.lr=1e-3,2e-3", "objective=mae,dino"])
def test_several_values_without_a_sweep_are_an_error_that_names_the_option(option):
    with pytest.raises(Failure) as error:
        composing.composed(option)
    assert error.value.status == 2
    assert str(error.value).startswith(option)


@pytest.mark.parametrize(
    ("arguments", "start"),
    [(["--config-dir", "nowhere"], "--config-dir nowhere: "), (["--config-dir", "data=d"], "--config-dir data=d: "),
     (["--config-dir"], "--config-dir : "), (["--plugin"], "--plugin : ")],
)  # fmt: skip
def test_flags_without_their_folder_or_package_are_one_line(arguments, start):
    with pytest.raises(Failure) as caught:
        CommandLine(arguments)
    assert str(caught.value).startswith(" ".join(start.split()))


@pytest.mark.parametrize(
    "options", [{"data.mean": np.zeros(3)}, {"data": np.zeros((2, 2))}, {"data.mask_classes": {0: "sky", 1: "tree"}}]
)
def test_values_of_other_types_are_one_line(options):
    assert str(error_of(find_command("pretrain").call, [], options)).startswith(next(iter(options)))
