"""Options that are written in Python as objects."""

import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from command import LIMIT

from ssvit.cli import find_command
from ssvit.config.command_line import CommandLine
from ssvit.errors import OptionError, UserError
from ssvit.options import (
    HNSW,
    MAE,
    CenterCrop,
    Dino,
    Distill,
    IBot,
    InceptionCrop,
    Knn,
    LabelFree,
    LoadTeacher,
    MaskedPatch,
    Masking,
    MeanColor,
    MultiCrop,
    Pretrain,
    Recipe,
    Ridge,
    Shapes,
    Stem,
    TensorBoard,
    TorchvisionSet,
    ViT,
)

# Options as objects, and the same as arguments in a shell.
SAME = {
    "nested": (
        Pretrain(
            objective=MAE(masked=0.6), encoder=ViT(width=192, depth=6, heads=3), recipe=Recipe(steps=2000, lr=1e-3)
        ),
        "objective=mae objective.masked=0.6 encoder=vit encoder.width=192 encoder.depth=6 encoder.heads=3 "
        "recipe.steps=2000 recipe.lr=1e-3",
    ),
    "several": (
        Pretrain(probes={"ridge": Ridge(), "knn": Knn(k=(3, 5))}, evaluators={}, name=Path("a")),
        "probes=[ridge,knn] probes.knn.k=[3,5] evaluator=[] name=a",
    ),
    "none": (Pretrain(probes={}, logger={}, continuation=None), "probes=[] logger=[]"),
    "logger and evaluator": (
        Pretrain(logger={"tensorboard": TensorBoard()}, evaluators={"label_free": LabelFree(images=100)}),
        "logger=[tensorboard] evaluator=[label_free] evaluators.label_free.images=100",
    ),
    "view": (Pretrain(data=Shapes(view=CenterCrop(fit="pad"))), "data=shapes data.view.fit=pad"),
    "teacher": (
        Pretrain(objective=Distill(teacher=LoadTeacher(path=tiny.TEACHER, image_size=32))),
        f"objective=distill teacher={tiny.TEACHER} objective.teacher.image_size=32",
    ),
    "a set that its name chooses": (
        Pretrain(data=TorchvisionSet(name="cifar100", root=Path("."))),
        "data=cifar100 data.root=.",
    ),
    "several views": (
        Pretrain(objective=Dino(), data=Shapes(augment=MultiCrop(local_size=(16, 16)))),
        "objective=dino data=shapes augment@data.augment=multi_crop data.augment.local_size=[16,16]",
    ),
    "within": (
        Pretrain(
            objective=MaskedPatch(masking=Masking(corrupted=0.4)),
            target=MeanColor(bits=2),
            encoder=ViT(width=64, depth=2, heads=2, patch_size=32, stem=Stem(layers=[2, 2], width=64)),
            data=Shapes(images=64, image_size=64, augment=InceptionCrop(scale=[0.5, 1.0])),
        ),
        "objective=masked_patch objective.masking.corrupted=0.4 target=mean_color target.bits=2 encoder=vit "
        "encoder.width=64 encoder.depth=2 encoder.heads=2 encoder.patch_size=32 "
        "encoder.stem={layers:[2,2],width:64} data=shapes data.images=64 data.image_size=64 "
        "augment@data.augment=inception_crop data.augment.scale=[0.5,1.0]",
    ),
    "choices of the objective": (Pretrain(objective=IBot()), "objective=ibot"),
}


def options_of(arguments=(), tree=None):
    command = find_command("pretrain")
    return command.compose(command.line(arguments, tree=tree)).options


def test_a_part_within_a_part_is_that_of_the_object():
    index = HNSW(links=8)
    assert options_of(tree=Pretrain(probes={"knn": Knn(index=index)})).probes["knn"].index == index


@pytest.mark.parametrize("case", SAME)
def test_objects_are_the_options_of_a_shell(case):
    tree, shell = SAME[case]
    assert options_of(tree=tree) == options_of(shell.split())


def test_one_of_several_parts_has_the_name_of_its_choice():
    with pytest.raises(OptionError) as raised:
        CommandLine(tree=Pretrain(probes={"ridge": Knn()}))
    assert raised.value.name == "probes.ridge"


def test_an_option_that_another_part_determines_may_be_left_out_and_is_checked_once_it_is_known():
    assert ViT(width=32, depth=1, heads=2, patch_size=5).image_size is None
    with pytest.raises(OptionError):
        ViT(width=32, depth=1, heads=2, patch_size=5, image_size=32)
    with pytest.raises(UserError):
        options_of(tree=Pretrain(encoder=ViT(width=32, depth=1, heads=2, patch_size=5)))


@pytest.mark.slow
def test_a_type_checker_finds_wrong_options(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from ssvit.options import MAE, Pretrain, Recipe, ViT\n"
        "Pretrain(objective=MAE(masked=0.6), recipe=Recipe(steps=2))\n"
        "MAE(masked='0.6')\n"
        "Recipe(step=2)\n"
        "Pretrain(objective=ViT(width=1, depth=1, heads=1))\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file=", "--cache-dir", str(tmp_path / "cache"), "mine.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT).stdout
    assert [line.split(":")[1] for line in found.splitlines() if ": error:" in line] == ["3", "4", "5"], found
