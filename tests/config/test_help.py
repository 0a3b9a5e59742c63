"""--help explains every option by its docstring without importing torch."""

from itertools import zip_longest

import pytest

from ssvit.cli import COMMANDS, find_command
from ssvit.config import help
from ssvit.config.command_line import CommandLine
from ssvit.config.declaration import Options, meanings
from ssvit.objectives.mae_options import MAE

GROUPS = ("objective", "data", "target", "encoder", "augment@data.augment")
FILES = {group: CommandLine([]).names(group.partition("@")[0]) for group in GROUPS}
# Files of all groups whose choice does not depend on the others, one of each group at a time.
TOGETHER = [
    *zip_longest(*([f"{group}={file}" for file in files] for group, files in FILES.items() if group != "objective"))
]
PROBES = CommandLine([]).names("probe")


def options(command: str, *given: str) -> dict[str, help.Option]:
    """Return all options of a command by name; a placeholder replaces a checkpoint that does not exist."""
    tool = find_command(command)
    files, groups = help.describe(tool, tool.described(given))
    return {one.name: one for group in (files, *groups) for one in group.options}


@pytest.mark.parametrize(
    ("command", "given"),
    [
        *((command, ()) for command in COMMANDS),
        *(("pretrain", (f"objective={file}",)) for file in FILES["objective"]),
        *(("pretrain", tuple(filter(None, files))) for files in TOGETHER),
        ("pretrain", (f"probes=[{','.join(PROBES)}]",)),
        ("pretrain", ("objective=supervised", "distillation=deit", "teacher=x")),
        ("pretrain", ("logger=[tensorboard,wandb]",)),
        ("finetune", ("recipe=sgd",)),
        *(("retrieve", (f"index={index}",)) for index in ("flat", "ivf", "hnsw")),
    ],
)
def test_every_option_has_a_meaning(command, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = options(command, *given)
    assert found
    assert [name for name, one in found.items() if not one.meaning] == []
    assert [name for name, one in found.items() if "${" in one.default] == []


def test_meanings_defaults_and_choices_are_those_of_the_dataclass_and_the_file():
    found = options("pretrain", "objective=mae", "recipe.steps=77")
    assert found["objective.masked"].meaning.startswith("Fraction of an image's patches ")
    assert found["objective.masked"].default == str(MAE.model_fields["masked"].default)
    assert found["objective.masked"].expected == "a number, above 0 and at most 1"
    assert found["objective.norm_pixels"].expected == "true or false"
    assert found["objective.decoder.depth"].meaning == "Number of layers."
    assert found["recipe.steps"].default == "77"
    assert found["data.image_size"].meaning == "Pixels of an image's side, or [height, width]."  # of what refers to it
    assert found["workers"].meaning.startswith("Processes that decode image files")
    assert set(found["objective"].expected.removeprefix("one of ").split(", ")) == set(FILES["objective"])
    assert found["encoder.gelu"].expected == "one of exact, tanh"
    assert "objective.masking.corrupted" not in found
    assert not any(part.startswith("_") for name in found for part in name.split("."))


def test_fields_have_the_strings_under_them_and_those_they_inherit():
    class Base(Options):
        one: int = 1
        """The first;
        None for none."""
        two: int = 2

    class Derived(Base):
        one: int = 5
        three: int = 3
        """The third."""

    assert meanings(Derived) == {"one": "The first; null for none.", "three": "The third."}


@pytest.mark.parametrize("width", [48, 80])
def test_help_fits_the_terminal_and_needs_neither_torch_nor_a_run(tool, no_torch, width):
    for name, arguments in (("pretrain", ["--help-all"]), ("finetune", ["--help"]), ("predict", ["-h"])):
        printed = tool(name, *arguments, PYTHONPATH=no_torch, COLUMNS=str(width)).stdout
        assert max(map(len, printed.splitlines()[1:])) <= width


def test_most_needed_options_come_first_and_all_on_demand(tool, no_torch):
    short, everything = (
        tool("pretrain", flag, "objective=dino", PYTHONPATH=no_torch).stdout.splitlines()
        for flag in ("--help", "--help-all")
    )
    entries = [{line for line in lines if line.startswith("  ") and line[2] != " "} for lines in (short, everything)]
    assert {"  recipe.lr=0.001", "  objective=dino", "  data.images=8192"} <= entries[0]
    assert "  encoder.norm_epsilon=1e-06" in entries[1] - entries[0]
    assert entries[0] <= entries[1]
    assert len(entries[0]) < len(entries[1])


def test_files_of_one_s_own_are_explained(tool, no_torch, tmp_path):
    (tmp_path / "mine" / "encoder").mkdir(parents=True)
    (tmp_path / "mine" / "encoder" / "two.yaml").write_text(
        "# Two layers: ssvit pretrain encoder=two\ndefaults:\n  - small\n  - _self_\ndepth: 2\n"
    )
    printed = tool("pretrain", "--config-dir", "mine", "encoder=two", "--help-all", PYTHONPATH=no_torch).stdout
    assert "encoder=two: Two layers\n" in printed
    assert "small, small_hybrid, ti, timm, two, vit]" in " ".join(printed.split())
    assert "  encoder.depth=2\n" in printed
