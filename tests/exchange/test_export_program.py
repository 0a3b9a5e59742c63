"""Programs: what ONNX and torch.export say is what the model says, for any number of images and of any size."""

import json
import os
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from exported import CLASSES, LIMIT, SHAPE, classifier, encoder, images, written

from ssvit.exchange.export_options import Export
from ssvit.models import vit_options
from ssvit.models.vit import ViT
from ssvit.options import OptionError


def leaks(path: Path) -> list[str]:
    """Words of this machine in a file, or in a member of an archive."""
    parts = {path.name: path.read_bytes()}
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
    words = (str(Path(torch.__file__).parent.parent), str(Path(__file__).parents[2]), os.path.expanduser("~/"))
    return [f"{word} in {name}" for name, part in parts.items() for word in words if word.encode() in part]


@pytest.mark.parametrize("how", [None, pytest.param("paper", marks=pytest.mark.slow)])
@torch.no_grad()
def test_onnx_says_the_same_on_any_number_of_images(how, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    ours = encoder(depth=1, positions="sine_cosine_2d" if how else "learned_1d")
    folder, said = written(ours, tmp_path, "onnx", any_size=how)
    assert "largest difference from torch" in said[1]
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["tokens", "features"]
    for size in [(32, 48), *([(40, 32), (96, 64)] if how else [])]:
        right = ViT(vit_options.ViT(**{**ours.arguments, "image_size": list(size)})).eval()
        right.take(ours)
        for count in (1, 5):
            x = images(size, count)
            tokens, features = map(torch.from_numpy, session.run(None, {"images": x.numpy()}))
            assert (tokens - right(x)).abs().max() < 1e-4
            assert (features - right.represent(x)).abs().max() < 1e-4
    assert not leaks(folder / "model.onnx")
    assert not leaks(folder / "README.md")


@pytest.mark.parametrize(
    ("how", "changes"),
    [
        (None, {"positions": "relative"}),
        pytest.param("paper", {}, marks=pytest.mark.slow),
        pytest.param("timm", {"positions": "learned_2d"}, marks=pytest.mark.slow),
        pytest.param("paper", {"positions": "sine_cosine_2d", "positions_at": "every_layer"}, marks=pytest.mark.slow),
        pytest.param("paper", {"stem": {"layers": [1, 1], "width": 32}}, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_a_program_is_the_model(how, changes, tmp_path):
    ours = encoder(**changes)
    folder, _ = written(ours, tmp_path, "torch_export", any_size=how)
    model = torch.export.load(folder / "model.pt2").module()
    for size in [(32, 48), *([(48, 40), (80, 16)] if how else [])]:
        right = ViT(vit_options.ViT(**{**ours.arguments, "image_size": list(size)})).eval()
        right.take(ours, how=how or "paper")
        x = images(size, 3)
        assert (model(x)[0] - right(x)).abs().max() < LIMIT
    assert not leaks(folder / "model.pt2")


@pytest.mark.parametrize("input", ["float", "uint8"])
@torch.no_grad()
def test_an_onnx_file_alone_tells_its_classes_and_what_images_it_takes(input, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    ours = classifier(depth=1)
    folder, said = written(ours, tmp_path, "onnx", input=input, facts={"step": 3, "view": {"resize": 64}})
    assert "largest difference from torch" in said[1]
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["classes"]) == list(CLASSES)
    assert json.loads(facts["image_size"]) == [32, 48]
    assert numpy.allclose(json.loads(facts["mean"]), SHAPE["mean"])
    assert json.loads(facts["std"]) == [SHAPE["std"]] * 3
    assert "inside the program" in facts["normalisation"]
    assert "64 pixels on the shorter side" in facts["preprocessing"]
    expected = {"float": ("tensor(float)", "float32 in [0, 1]"), "uint8": ("tensor(uint8)", "uint8, 0 to 255")}[input]
    assert session.get_inputs()[0].type == expected[0]
    for text in (facts["images"], (folder / "README.md").read_text()):
        assert expected[1] in text
    pixels = (255 * images(count=3)).to(torch.uint8)
    x = pixels if input == "uint8" else pixels / 255
    (logits,) = session.run(None, {"images": x.numpy()})
    assert (torch.from_numpy(logits) - ours(pixels)).abs().max() < 1e-4
    assert not leaks(folder / "model.onnx")


@pytest.mark.parametrize("input", ["float", "uint8"])
@torch.no_grad()
def test_a_torch_program_tells_the_same(input, tmp_path):
    ours = classifier()
    folder, _ = written(ours, tmp_path, "torch_export", input=input)
    extra = {"metadata.json": ""}
    model = torch.export.load(folder / "model.pt2", extra_files=extra).module()
    facts = json.loads(extra["metadata.json"])
    assert facts["classes"] == list(CLASSES)
    assert ("uint8" in facts["images"]) == (input == "uint8")
    pixels = (255 * images(count=3)).to(torch.uint8)
    (logits,) = model(pixels if input == "uint8" else pixels / 255)
    assert (logits - ours(pixels)).abs().max() < LIMIT


def test_only_programs_have_a_kind_of_input():
    for format, input, said in (("timm", "uint8", "is for format=onnx"), ("onnx", "int8", "one of float, uint8")):
        with pytest.raises(OptionError, match=f"input={input}: .*{said}"):
            Export(format=format, input=input)


@pytest.mark.parametrize("changes", [{"positions": "relative"}, {"distillation_token": True}])
@torch.no_grad()
def test_a_program_of_a_classifier_gives_logits(changes, tmp_path):
    ours = classifier(**changes)
    folder, _ = written(ours, tmp_path, "torch_export")
    (logits,) = torch.export.load(folder / "model.pt2").module()(images(count=3))
    assert (logits - ours.logits(images(count=3))).abs().max() < LIMIT
