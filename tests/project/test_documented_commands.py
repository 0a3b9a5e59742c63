"""Every command on the pages is valid: its options exist, and required options are set."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import exported
import numpy
import pytest
import torch
from command import LIMIT
from images import put_tar
from PIL import Image
from safetensors.numpy import load_file

from ssvit.cli import COMMANDS, find_command
from ssvit.cli.normalization import MEASURED
from ssvit.errors import UserError
from ssvit.exchange import hub

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
# On a page, and in the comment of a configuration.
WRITTEN = re.compile(r"^(?:    |# )(?:\w+=\S+ )*(?:ssvit |(?:python|torchrun .*) tools/)(.+)$", re.MULTILINE)
STORED = Path(__file__).parents[1] / "fixtures" / "outputs"
FLAGS = {"--help", "--help-all", "--dry-run", "--show-config"}
# Values for placeholders of the pages that name no file of the folder below.
MEANT = {"checkpoint=PATH": "checkpoint=RUN", "checkpoint=FILE": "checkpoint=scratch"}


def written(pages: list[Path]) -> list[str]:
    """Return the arguments of `ssvit` or `python tools/` in each command of the pages."""
    return [line for page in pages for line in WRITTEN.findall(page.read_text().replace("\\\n", " "))]


def words(lines: list[str]) -> list[list[str]]:
    """The arguments that bash passes to a command, for each of these lines."""
    script = "".join(f"printf '%s\\0' {line}\nprintf '\\n'\n" for line in lines)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=LIMIT)
    assert done.stderr == ""
    return [line.split("\0")[:-1] for line in done.stdout.splitlines()]


def documented() -> dict[str, list[str]]:
    """The name of the command, or of its file in tools/, and its options, by the command as the pages have it.

    Those with parts of the reader's own (--plugin) and of sweeps (-m) have tests of their own.
    """
    found = {}
    for line in words(written(PAGES)):
        arguments = [word for word in line if word not in FLAGS]
        arguments[0] = arguments[0].removesuffix(".py")
        if not {"--plugin", "-m"} & set(arguments):
            found[shlex.join(arguments)] = arguments
    return found


DOCUMENTED = documented()


def test_bash_passes_every_command_as_it_is_written():
    lines = written([*PAGES, *CONFIGS])
    assert len(lines) > len(DOCUMENTED)
    for line, passed in zip(lines, words(lines), strict=True):
        assert passed == shlex.split(line, comments=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all files that the pages name."""
    place = tmp_path_factory.mktemp("reader")
    run = STORED / "masked_patch_shapes"
    shutil.copytree(STORED, place / "outputs")
    inspected = ("outputs/vit", "outputs/hybrid", "outputs/resnet", "outputs/mixer")
    for name in ("RUN", "OTHER_RUN", "outputs/RUN", "outputs/masked_patch_folder", "outputs/mae/best", *inspected):
        shutil.copytree(run, place / name)
    (place / "docs").symlink_to(ROOT / "docs")  # options of experiments of the pages
    for label in ("cat", "dog"):
        (place / "PATH" / label).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (60 * number, 0, 0)).save(place / "PATH" / label / f"{number}.png")
    foreign, _ = exported.written(exported.encoder(width=192, heads=3, depth=1), place, "timm")
    weights = load_file(foreign / "model.safetensors")
    numpy.savez(place / "vit_b16.npz", **weights)
    for name in ("dinov2_vits14_reg4_pretrain.pth", "dinov2_vits14.pth", "mae.pth"):
        torch.save({name: torch.from_numpy(value) for name, value in weights.items()}, place / name)
    for name in ("FOLDER", "STORE", "SHARDS", "normal", "patches", "MASKS"):
        (place / name).mkdir()
    table = "path,label\n" + "".join(f"{file},{file.parent.name}\n" for file in (place / "PATH").rglob("*.png"))
    (place / "outputs" / "try_NAME").mkdir()
    for file in ("labels.csv", "outputs/try_NAME/kept.csv"):
        (place / file).write_text(table)
    put_tar(
        place / "SHARDS" / "train-0.tar",
        {f"{file.stem}.png": file.read_bytes() for file in (place / "PATH" / "cat").iterdir()},
    )
    (place / "bands.yaml").write_text(f"{MEASURED}\nmean: [0.4, 0.5, 0.6]\nstd: [0.2, 0.2, 0.2]\n")
    return place


@pytest.mark.parametrize("command", DOCUMENTED)
def test_a_command_of_the_pages_is_taken(command, folder, monkeypatch):
    name, *arguments = DOCUMENTED[command]
    assert name in COMMANDS
    monkeypatch.chdir(folder)
    monkeypatch.setattr(hub, "fetch", lambda _: folder / "vit_b16.npz")
    composed = []
    tool = find_command(name)
    given = [MEANT.get(argument, argument) for argument in arguments]
    try:
        composed.append(tool.compose(tool.line(given)))
    except UserError as failure:  # of files that the pages name, only some exist here
        if not re.match(r"(data\.(root|table|train)|teacher|target\.layer)=", str(failure)):
            raise
        composed.append(tool.compose(tool.line(given), incomplete=True))
    assert composed


def test_the_pages_have_commands_of_each_kind():
    named = {words[0] for words in DOCUMENTED.values()}
    assert named >= {"pretrain", "finetune", "evaluate", "few-shot", "linear-probe", "knn", "retrieve", "compare"}
