"""ssvit finetune objective=segmentation as a user runs it, what it leaves, ssvit predict, and mistakes in one line."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from command import error_of
from PIL import Image
from runs import rows, states

import ssvit
from ssvit.data.sources.decode import load, load_mask
from ssvit.data.sources.shapes import render
from ssvit.exchange.options import ONNX
from ssvit.figures import label_maps

RUN = "masked_patch_shapes"
SHORT = (
    "objective=segmentation", "recipe.batch_size=8", "recipe.steps=4", "recipe.warmup=1", "recipe.save_every=2",
    "recipe.evaluate_every=2", "recipe.log_every=1", "recipe.precision=32-true", "launch.accelerator=cpu",
    "figures=none", "preset=null",
)  # fmt: skip


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    """Wide rendered scenes as files, with masks of two classes whose border is ignored."""
    folder = tmp_path_factory.mktemp("scenes")
    scenes = render(torch.arange(24), seed=5, size=(20, 30))
    for number, (image, mask) in enumerate(zip(scenes.images, scenes.masks, strict=True)):
        name = f"{'train' if number < 16 else 'test'}/{number}.png"
        values = (mask > 0).to(torch.uint8)
        values[0] = 255
        for part, array in (("images", image.movedim(0, -1)), ("masks", values)):
            path = folder / part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array.numpy()).save(path)
    return folder


def data(scenes: Path) -> tuple[str, ...]:
    return (
        "data=folder", f"data.root={scenes}/images", f"data.masks={scenes}/masks", "data.image_size=16",
        "data.mask_classes=[background,shape]",
    )  # fmt: skip


@pytest.fixture(scope="module")
def outputs_of_runs(pretrained, scenes, tmp_path_factory) -> Path:
    """The outputs of a comparison, and of a run that trained the head; not to be changed."""
    folder = tmp_path_factory.mktemp("segmentation") / "outputs"
    shutil.copytree(pretrained, folder)
    finetune = ssvit.cli.find_command("finetune")
    shared = (f"outputs={folder}", f"checkpoint={folder}/{RUN}", *SHORT)
    finetune.call([*shared, *data(scenes), "name=both", "compare=scratch", "seeds=1", "scratch=equal_steps"])
    finetune.call([*shared, "name=head", "objective.trained=head", "objective.head=maps", "figures=end"])
    return folder


def test_both_sides_are_compared_by_the_same_code(outputs_of_runs):
    found = json.loads((outputs_of_runs / "both" / "comparison.json").read_text())
    for side in ("pretrained", "scratch"):
        scores = rows(outputs_of_runs / "both" / f"{side}_seed0", "test/miou")
        assert [*scores] == [0, 2, 4]
        assert found["accuracy"][side]["mean"] == scores[4]
        assert 0 < scores[4] < 1
    assert found["measured_on"] == "test"


def test_a_head_leaves_the_bits_of_the_encoder_and_a_picture(outputs_of_runs):
    weights = {kind: states(outputs_of_runs / kind)["model"] for kind in (RUN, "head")}
    encoder = {name for name in weights["head"] if name.startswith("encoder.")}
    assert encoder
    assert all(weights["head"][name].equal(weights[RUN][name]) for name in encoder)
    for name in ("masks", "learning"):
        with Image.open(outputs_of_runs / "head" / f"{name}.png") as image:
            assert min(image.size) > 200


def test_label_maps_are_written_and_can_be_masks_again(outputs_of_runs, scenes, call, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(label_maps, "_ROWS", 6)  # overlays of 20 rows have four parts
    run, pictures = outputs_of_runs / "both" / "pretrained_seed0", f"{scenes}/images/test"
    call("predict", f"checkpoint={run}", f"output={tmp_path}/maps", "precision=32", pictures)
    segmenter = ssvit.load_segmenter(run, precision=32)
    assert segmenter.classes == ["background", "shape"]
    assert json.loads((tmp_path / "maps" / "classes.json").read_text()) == {"background": 0, "shape": 1}
    paths = sorted(Path(pictures).glob("*.png"))
    shares = {}
    for path, answer in zip(paths, segmenter.predict([str(path) for path in paths]), strict=True):
        written = tmp_path / "maps" / "masks" / path.name
        assert answer.shape == (20, 30)
        assert load_mask(str(written)).equal(answer)
        with Image.open(written) as mask, Image.open(tmp_path / "maps" / "overlays" / path.name) as overlay:
            colors = np.array(mask.convert("RGB"), int)
            half = (colors + load(str(path)).movedim(0, -1).numpy()) / 2
            assert np.abs(np.array(overlay, int) - half).max() <= 1
        shares[path] = (answer == 1).double().mean().item()
    printed, largest = capsys.readouterr().out, max(shares.values())
    assert all(f"{path}:" in printed for path in paths)
    assert largest > 0
    assert f"shape {100 * largest:.1f} %" in printed
    assert segmenter.predict(torch.zeros(3, 7, 50, dtype=torch.uint8))[0].shape == (7, 50)
    error_of(segmenter.predict, torch.zeros(3, 0, 50, dtype=torch.uint8))
    with monkeypatch.context() as patch:
        patch.setattr(label_maps, "overlay_png", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            call("predict", f"checkpoint={run}", f"output={tmp_path}/interrupted", "precision=32", pictures)
    assert (tmp_path / "interrupted" / "classes.json").exists()  # masks without names of classes are useless
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    assert str(error_of(call, "predict", f"checkpoint={run}", str(broken))).startswith("1 of 1 ")
    assert f"{broken}: " in capsys.readouterr().out


def test_values_of_classes_are_taken_from_a_run(scenes, pretrained, call, tmp_path):
    shutil.copytree(pretrained, tmp_path / "outputs", dirs_exist_ok=True)
    options = [option for option in data(scenes) if not option.startswith("data.mask_classes")]
    named = "data.mask_classes={back.ground: 0, a shape: 1}"
    call("finetune", f"checkpoint={tmp_path}/outputs/{RUN}", *SHORT, *options, named, "name=named")
    call("finetune", f"checkpoint={tmp_path}/outputs/named", *SHORT, "name=again")
    assert ssvit.load_segmenter(tmp_path / "outputs" / "again").classes == ["back.ground", "a shape"]


@pytest.mark.parametrize(
    ("head", "any_size"),
    [("maps", False), *(pytest.param(head, True, marks=pytest.mark.slow) for head in ("maps", "linear"))],
)
def test_an_exported_graph_computes_the_logits_of_images_of_its_sizes(head, any_size, outputs_of_runs, call, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    run = outputs_of_runs / ("head" if head == "maps" else "both/pretrained_seed0")
    call("export", f"checkpoint={run}", f"format={ONNX}", f"any_size={any_size}", f"output={tmp_path}/graph")
    model = ssvit.load_segmenter(run).module
    session = onnxruntime.InferenceSession(tmp_path / "graph" / "model.onnx", providers=["CPUExecutionProvider"])
    for count, height, width in ((1, 16, 16), (2, 24, 40) if any_size else (2, 16, 16)):
        images = torch.rand(count, 3, height, width)
        (logits,) = session.run(None, {"images": images.numpy()})
        assert logits.shape == (count, len(model.classes), height, width)
        np.testing.assert_allclose(logits, model.logits(images).detach().numpy(), atol=1e-4)
    for format in ("safetensors", "timm"):
        assert "format" in str(error_of(call, "export", f"checkpoint={run}", f"format={format}", "output=x"))
    error_of(ssvit.load_segmenter, tmp_path / "graph" / "model.onnx")
    error_of(ssvit.load, tmp_path / "graph" / "model.onnx")


def test_mistakes_are_one_line(outputs_of_runs, scenes, call, tmp_path):
    finetune = ("finetune", f"checkpoint={outputs_of_runs}/{RUN}", *SHORT)
    folder, root, masks, size, classes = data(scenes)
    for options, name in (
        ((folder, root, masks, size), "data.mask_classes"),
        ((folder, root, size, classes), "data.masks"),
        ((*data(scenes), "objective.layers=[3]"), "objective.layers"),
        ((*data(scenes), "data.mask_ignored=[300]"), "data.mask_ignored"),
        ((*data(scenes), "augment@data.augment=two_crops_small"), "data.augment"),
    ):
        assert name in str(error_of(call, *finetune, *options))
    other = tmp_path / "masks"
    shutil.copytree(scenes / "masks", other)
    (other / "train" / "3.png").unlink()
    assert "3.png" in str(error_of(call, *finetune, folder, root, f"data.masks={other}", size, classes))
    run = outputs_of_runs / "head"
    picture = tmp_path / "a" / "0.png"
    picture.parent.mkdir()
    shutil.copy(scenes / "images" / "test" / "16.png", picture)
    predict = ("predict", f"checkpoint={run}")
    assert "labelled" in str(error_of(call, *predict, f"labelled={scenes}/images", str(picture)))
    shutil.copy(picture, picture.with_suffix(".jpg"))
    assert "images" in str(error_of(call, *predict, "output=maps", str(picture.parent)))
    (tmp_path / "file").write_text("text")
    assert "output" in str(error_of(call, *predict, "output=file", str(picture)))
    error_of(ssvit.load_segmenter, outputs_of_runs / RUN)
    error_of(ssvit.load_classifier, run)
