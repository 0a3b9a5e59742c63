"""Options that are written in Python as objects."""

import subprocess
import sys
from pathlib import Path

import pytest

from ssvit.cli import find_command
from ssvit.config.typed import flatten
from ssvit.errors import OptionError, UserError
from ssvit.options import (
    MAE,
    IBot,
    InceptionCrop,
    Knn,
    MaskedPatch,
    Masking,
    MeanColor,
    Pretrain,
    Recipe,
    Ridge,
    Shapes,
    Stem,
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
        "probes=[ridge,knn] probes.knn.k=[3,5] name=a",
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


def options_of(arguments=(), options=None):
    command = find_command("pretrain")
    return command.compose(command.line(arguments, options)).options


@pytest.mark.parametrize("case", SAME)
def test_objects_are_the_options_of_a_shell(case):
    tree, shell = SAME[case]
    assert options_of(options=dict(flatten(tree))) == options_of(shell.split())


def test_one_of_several_parts_has_the_name_of_its_choice():
    with pytest.raises(OptionError) as raised:
        dict(flatten(Pretrain(probes={"ridge": Knn()})))
    assert raised.value.name == "probes.ridge"


def test_an_option_that_another_part_determines_may_be_left_out_and_is_checked_once_it_is_known():
    assert ViT(width=32, depth=1, heads=2, patch_size=5).image_size is None
    with pytest.raises(OptionError):
        ViT(width=32, depth=1, heads=2, patch_size=5, image_size=32)
    with pytest.raises(UserError):
        options_of(options=dict(flatten(Pretrain(encoder=ViT(width=32, depth=1, heads=2, patch_size=5)))))


def test_the_options_are_imported_without_torch():
    code = "import sys, ssvit.options; assert not {'torch', 'hydra', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


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
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert [line.split(":")[1] for line in found.splitlines() if ": error:" in line] == ["3", "4", "5"], found
