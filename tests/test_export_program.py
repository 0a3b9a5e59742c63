"""Programs: what ONNX and torch.export say is what the model says, for any number of images and of any size."""

import os
import zipfile
from pathlib import Path

import pytest
import torch
from exported import LIMIT, classifier, encoder, images, written

from ssvit.encoder.vit import ViT


def leaks(path: Path) -> list[str]:
    """Words of this machine in a file, or in a member of an archive."""
    parts = {path.name: path.read_bytes()}
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
    words = (str(Path(torch.__file__).parent.parent), str(Path(__file__).parent.parent), os.path.expanduser("~/"))
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
        right = ViT(**{**ours.arguments, "image_size": list(size)}).eval()
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
        right = ViT(**{**ours.arguments, "image_size": list(size)}).eval()
        right.take(ours, how=how or "paper")
        x = images(size, 3)
        assert (model(x)[0] - right(x)).abs().max() < LIMIT
    assert not leaks(folder / "model.pt2")


@torch.no_grad()
def test_a_program_of_a_classifier_gives_logits(tmp_path):
    ours = classifier(distillation_token=True)
    folder, _ = written(ours, tmp_path, "torch_export")
    (logits,) = torch.export.load(folder / "model.pt2").module()(images(count=3))
    assert (logits - ours.logits(images(count=3))).abs().max() < LIMIT
