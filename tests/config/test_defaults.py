"""YAML and variants hold what a default cannot: a value that could be left out without effect is not in them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from ssvit.choices import options_of
from ssvit.cli import COMMANDS, find_command
from ssvit.config.command_line import CONFIGS, CommandLine
from ssvit.config.declaration import Options, completed
from ssvit.models.vit_options import ViT
from ssvit.training.options import Pretrain
from ssvit.variants import VARIANTS

RECORDS = ("experiment", "comparison")  # which state values whether or not they are defaults
GROUPS = [path for path in sorted(CONFIGS.glob("*/**/*.yaml")) if path.relative_to(CONFIGS).parts[0] not in RECORDS]
TOOLS = {name: path for name in COMMANDS if (path := CONFIGS / f"{name.replace('-', '_')}.yaml").is_file()}


def content(file: Path) -> DictConfig:
    """The values of a file under the name of its group, or at the top if its package is _global_."""
    values = OmegaConf.load(file)
    assert isinstance(values, DictConfig)
    values.pop("defaults", None)
    group = file.relative_to(CONFIGS).parts[0]
    at_the_top = file.parent == CONFIGS or "# @package _global_" in file.read_text()
    return values if at_the_top else OmegaConf.create({group: values})


def plain(tree: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(tree)
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of the values within groups; an empty group is one too."""
    if not isinstance(node, dict) or (path and not node):
        yield path
        return
    for name, value in node.items():
        yield from leaves(value, (*path, name))


def without(node: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    name, *rest = path
    others = {key: value for key, value in node.items() if key != name}
    return {**others, name: without(node[name], tuple(rest))} if rest else others


def restated(file: Path, options: type[Options]) -> list[str]:
    """The options of a file that have the same value if the file leaves them out."""
    *bases, own = CommandLine([]).with_bases(str(file.relative_to(CONFIGS).with_suffix("")))
    below = OmegaConf.merge(*map(content, bases)) if bases else OmegaConf.create({})
    values, found = plain(content(own)), []
    for path in leaves(values):
        rest = OmegaConf.merge(below, OmegaConf.create(without(values, path)))
        assert isinstance(rest, DictConfig)
        node: Any = completed(plain(rest), {"": options, "encoder": ViT})
        value: Any = values
        for name in path:
            node, value = node.get(name, KeyError) if isinstance(node, dict) else KeyError, value[name]
        if node == value and isinstance(node, bool) == isinstance(value, bool):
            found.append(".".join(path))
    return found


@pytest.mark.parametrize("file", GROUPS, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_no_value_of_a_group_file_restates_a_default(file):
    assert restated(file, Pretrain) == []


VARIANTS_BY_NAME = {f"{group}/{name}": each for group, rows in VARIANTS.items() for name, each in rows.items()}


@pytest.mark.parametrize("name", VARIANTS_BY_NAME)
def test_no_option_of_a_variant_restates_a_default(name):
    variant = VARIANTS_BY_NAME[name]
    part = {"_part_": f"{name.partition('/')[0]}/{variant.part}"}
    for option, value in variant.options.items():
        if option == "patch_size":  # the table of sizes states all of them
            continue
        others = {key: item for key, item in variant.options.items() if key != option}
        assert completed({**part, **others}, {})[option] != value, option


@pytest.mark.parametrize("name", TOOLS)
def test_no_value_of_a_commands_file_restates_a_default(name):
    for file in CommandLine([]).with_bases(TOOLS[name].stem):
        assert restated(file, find_command(name).options) == []


@pytest.mark.parametrize("file", sorted((CONFIGS / "experiment").glob("*.yaml")), ids=lambda file: file.stem)
def test_an_experiment_states_its_recipe_and_the_options_of_its_method(file):
    files = CommandLine([]).with_bases(f"experiment/{file.stem}")
    stated = plain(OmegaConf.merge(*map(content, files)))  # type: ignore[arg-type]
    assert stated["recipe"].keys() >= {
        "optimizer", "steps", "batch_size", "lr", "warmup", "decay", "weight_decay", "clip", "ema"
    }  # fmt: skip
    tool = find_command(
        "finetune" if "compare" in stated or "table4" in stated or "finetune" in file.stem else "pretrain"
    )
    data = ["data=shapes"] if file.stem in ("table4_vtab", "finetune_shapes") else []
    written = tool.described([f"experiment={file.stem}", *data]).written
    method = options_of(written["objective"]["_part_"])
    assert method is not None
    chosen = {name for name, field in method.model_fields.items() if not field.is_required() and field.default}
    assert stated["objective"].keys() >= chosen


def test_options_within_others_keep_the_defaults_of_these(monkeypatch):
    whole = completed({"objective": {"_part_": "objective/dino", "teacher_momentum": {"start": 0.5}}}, {})
    assert whole["objective"]["teacher_momentum"] == {"start": 0.5, "end": 1.0, "shape": "cosine", "over": 1.0}
