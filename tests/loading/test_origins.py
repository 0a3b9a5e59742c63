"""The weights that a run uses are named in its configuration and in the card of its export, with their licences."""

import shutil

import pytest
import yaml
from command import tiny_options
from exported import encoder, written

from ssvit.exchange.hub import repository

README = "---\nlicense: {licence}\nlicense_name: {name}\n---\n# Weights\n"


def test_the_card_names_start_and_teacher_with_their_licences(tool, tmp_path):
    for name, licence in {"start": ("mit", "null"), "teacher": ("other", "for-research")}.items():
        folder, _ = written(encoder(image_size=16, patch_size=4), tmp_path / name, "timm")
        (folder / "README.md").write_text(README.format(licence=licence[0], name=licence[1]))
        (folder / "model.safetensors").rename(folder / f"{name}.safetensors")
    options = tiny_options("encoder", "target")
    student = ("checkpoint=start/timm", "objective=distill", "teacher=teacher/timm", "probes=[]", "name=student")
    tool("pretrain", *options, *student)
    tool("finetune", *options, "checkpoint=outputs/student", "check_frozen=false", "name=classifier")
    origins = yaml.safe_load((tmp_path / "outputs" / "classifier" / "config.yaml").read_text())["origins"]
    expected = [
        {"use": "start", "name": "student"},
        {"use": "start", "name": "start", "license": "mit"},
        {"use": "teacher", "name": "teacher", "license": "for-research"},
    ]
    assert origins == expected
    shutil.rmtree(tmp_path / "start")  # the runs remember the names
    tool("export", "checkpoint=outputs/classifier", "format=safetensors", "output=export")
    card = (tmp_path / "export" / "README.md").read_text()
    for row in (
        "| weights | classifier |",
        "| start | start (licence: mit) |",
        "| teacher | teacher (licence: for-research) |",
    ):
        assert row in card
    assert str(tmp_path) not in card
    assert "base_model" not in card


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("hf://me/tiny", "me/tiny"), ("hf://me/tiny@main/a/b.npz", "me/tiny"), ("timm:vit_x.y", "timm/vit_x.y"),
        ("a/b", None),
    ],
)  # fmt: skip
def test_the_name_of_a_repository_on_the_hub(address, expected):
    assert repository(address) == expected
