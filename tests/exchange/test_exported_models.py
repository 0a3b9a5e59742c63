"""`ssvit predict` and `ssvit embed` take an exported ONNX file, and write the outputs of its checkpoint."""

import hashlib
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import tifffile
import torch
from command import error_of, one_line
from exported import CLASSES, classifier, encoder, images, written
from images import picture, put
from PIL import Image

import ssvit
from ssvit.checkpoints import storage
from ssvit.data.augment.options import CenterCrop
from ssvit.exchange import graph

RUN = "outputs/run"
SIZES = [(32, 48), (20, 70), (90, 41), (64, 64)]  # unchanged, cropped on either side, and resized


def save(folder: Path, model, **metadata) -> None:
    """Write the checkpoint of a run, and pictures of several sizes in the folders of two classes."""
    is_encoder = not hasattr(model, "classes")
    state = {("encoder." if is_encoder else "") + name: value for name, value in model.state_dict().items()}
    arguments = {"encoder": model.arguments, "stage": "pretrain"} if is_encoder else model.metadata
    (folder / RUN).mkdir(parents=True)
    storage.save(folder / RUN, 6, {"model": state}, {"stage": "finetune", **arguments, **metadata})
    for number, size in enumerate(SIZES):
        path = put(folder / "photos" / "ab"[number % 2] / f"{number}.png", picture(number, size=size))
        if is_encoder and model.channels == 1:
            Image.open(path).convert("L").save(path)


@pytest.mark.parametrize(
    ("loss", "changes"), [("softmax", {}), ("multi_label", {"distillation_token": True}), ("binary", {"channels": 1})]
)
def test_a_classifier_in_safetensors_is_that_of_the_checkpoint(loss, changes, call, tmp_path):
    model = classifier(**changes, **({"mean": 0.4} if "channels" in changes else {}))
    model.options = model.options.changed(loss=loss)
    limits = {} if model.encoder.channels == 3 else {"range": [[10], [200]]}
    save(tmp_path, model, view={"size": [32, 48], "resize": 56}, **limits)
    call("export", f"checkpoint={RUN}", "format=safetensors", "output=ours")
    files = sorted((tmp_path / "photos").rglob("*.png"))
    if limits:
        for file in files:
            Image.open(file).convert("L").save(file)
    run, ours = (ssvit.load_classifier(tmp_path / path, precision=32) for path in (RUN, "ours/model.safetensors"))
    assert torch.equal(run.prepare(files), ours.prepare(files))
    assert torch.equal(run.module.logits(run.prepare(files)), ours.module.logits(ours.prepare(files)))
    assert (ours.classes, ours.is_multi_label) == (list(CLASSES), loss == "multi_label")
    assert torch.equal(run.probabilities(files), ours.probabilities(files))
    encoders = (ssvit.load(tmp_path / path, precision=32) for path in (RUN, "ours"))
    assert torch.equal(*(opened.features(files) for opened in encoders))
    answers = []
    for path in (RUN, "ours/model.safetensors"):
        call("predict", f"checkpoint={path}", "precision=32", "photos", f"output={len(answers)}.json")
        answers.append(json.loads((tmp_path / f"{len(answers)}.json").read_text()))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("classifier_of_file", [7, {"classes": ["a"]}, {"classes": ["a", "b"]}, {"hidden": 10**12}])
def test_a_description_of_another_classifier_is_an_error(classifier_of_file, tmp_path):
    folder, _ = written(classifier(), tmp_path, "safetensors")
    description = json.loads((folder / "config.json").read_text())
    changed = classifier_of_file
    if isinstance(changed, dict):
        changed = description["classifier"] | changed
    (folder / "config.json").write_text(json.dumps(description | {"classifier": changed}))
    assert str(folder) in str(error_of(ssvit.load_classifier, folder / "model.safetensors"))


@pytest.mark.parametrize(("loss", "quantize"), [("softmax", "int8"), ("multi_label", "null")])
def test_predictions_are_those_of_the_checkpoint(loss, quantize, call, tmp_path, capsys):
    model = classifier(depth=1)
    model.options = model.options.changed(loss=loss)
    save(tmp_path, model, view={"size": [32, 48], "resize": 56})
    call("export", f"checkpoint={RUN}", "format=onnx", "output=graph", f"quantize={quantize}")
    precision, tolerance = ("int8", 0.1) if quantize == "int8" else ("32", 1e-4)
    answers = []
    for options in ([f"checkpoint={RUN}", "precision=32"], ["checkpoint=graph/model.onnx"]):
        call("predict", *options, "photos", "output=a.json")
        answers.append(json.loads((tmp_path / "a.json").read_text()))
    assert f"3 classes; precision: {precision}" in capsys.readouterr().out
    for reference, answer in zip(*answers, strict=True):
        assert answer["image"] == reference["image"]
        rows = [{entry["class"]: entry["probability"] for entry in row["classes"]} for row in (reference, answer)]
        assert sorted(rows[1]) == sorted(CLASSES)
        assert rows[1] == pytest.approx(rows[0], abs=tolerance)
        if quantize == "null":
            assert [row["present"] for row in answer["classes"]] == [row["present"] for row in reference["classes"]]


@pytest.mark.parametrize(
    ("changes", "view", "limits", "quantize"),
    [({}, {"resize": 56}, None, "int8"), ({"channels": 1, "mean": 0.4}, {"fit": "squash"}, [[20.0], [200.0]], "null")],
)
def test_features_are_those_of_the_checkpoint(changes, view, limits, quantize, call, tmp_path):
    save(tmp_path, encoder(depth=1, **changes), view={"size": [32, 48], **view}, range=limits)
    call("export", f"checkpoint={RUN}", "format=onnx", "output=graph", f"quantize={quantize}")
    call("embed", f"checkpoint={RUN}", "precision=32", "photos", "output=run.npz")
    call("embed", "checkpoint=graph", "photos", "output=graph.npz", "batch_size=3")
    expected, embedded = np.load(tmp_path / "run.npz"), np.load(tmp_path / "graph.npz")
    for column in ("names", "classes", "splits"):
        assert embedded[column].tolist() == expected[column].tolist()
    features = [torch.from_numpy(file["features"]) for file in (embedded, expected)]
    difference = (features[0] - features[1]).abs().max()
    if quantize == "int8":
        assert torch.nn.functional.cosine_similarity(*features).min() > 0.99
        assert difference > 1e-4
    else:
        assert difference < 1e-4
    precision = "int8" if quantize == "int8" else "32"
    digest = hashlib.sha256((tmp_path / "graph" / "model.onnx").read_bytes()).hexdigest()
    assert str(embedded["encoder"]).startswith(f"{digest[:16]} {precision} layer1_class_token ")


@pytest.mark.parametrize("view", [{"fit": "squash"}, {"resize": 56}, {"fit": "pad"}])
@pytest.mark.parametrize("size", [[32, 48], [240, 240]])
def test_an_export_in_the_format_of_ssvit_has_the_range_and_the_view_of_the_run(size, view, call, tmp_path):
    limits = [[0.0, 900.0], [3000.0, 4000.0]]
    model = encoder(channels=2, mean=[0.4, 0.6], image_size=size)
    save(tmp_path, model, view={"size": size, **view}, range=limits)
    call("export", f"checkpoint={RUN}", "format=safetensors", "output=ours")
    bands = [np.random.default_rng(n).integers(0, 4500, (2, 60, 90 - n)).astype("uint16") for n in range(3)]
    for number, array in enumerate(bands):
        stored = tmp_path / "bands" / f"{number}.tif"
        stored.parent.mkdir(exist_ok=True)
        tifffile.imwrite(stored, array, photometric="minisblack", planarconfig="separate", metadata=None)
    run, ours = (ssvit.load(tmp_path / path, precision=32) for path in (RUN, "ours/model.safetensors"))
    assert torch.equal(ours.features(tmp_path / "bands"), run.features(tmp_path / "bands"))
    low, high = (np.array(end)[:, None, None] for end in limits)
    scaled = [torch.from_numpy(np.clip((array - low) / (high - low), 0, 1)).float() for array in bands]
    expected = CenterCrop(size=size, **view).build()(scaled)
    assert (ours.prepare(tmp_path / "bands") - expected).abs().max() < 1e-5
    for path, output in ((RUN, "run.npz"), ("ours", "ours.npz")):
        call("embed", f"checkpoint={path}", "precision=32", "bands", f"output={output}")
    expected, embedded = (np.load(tmp_path / name)["features"] for name in ("run.npz", "ours.npz"))
    assert np.array_equal(embedded, expected)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An encoder and the folder of its graph."""
    model = encoder()
    return model, written(model, tmp_path_factory.mktemp("exported"), "onnx")[0]


def test_mistakes_are_one_line_before_torch_is_imported(exported, tool, tmp_path, no_torch):
    file = exported[1] / "model.onnx"
    put(tmp_path / "damaged.onnx", file.read_bytes()[:10_000])
    put(tmp_path / "a.png", picture(0))
    model = onnx.load(file)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "foreign.onnx")
    graph = f"checkpoint={file}"
    for command, options, start in (
        ("embed", [graph, "features.layer=1"], "features.layer=1: "),
        ("embed", [graph, "features.pooling=patch_mean"], "features.pooling=patch_mean: "),
        ("embed", [graph, "features.norm=before"], "features.norm=before: "),
        ("embed", [graph, "precision=bf16"], "precision=bf16: "),
        ("embed", [graph, "encoder.heads=4"], "encoder.heads=4: "),
        ("embed", ["checkpoint=damaged.onnx"], "damaged.onnx: "),
        ("embed", ["checkpoint=foreign.onnx"], "foreign.onnx: "),
        ("predict", [graph], f"{graph}: "),
        ("evaluate", [graph, "data=shapes"], f"{graph}: "),
    ):
        output = ["output=f.npz"] if command == "embed" else []
        picture_file = [] if command == "evaluate" else ["a.png"]
        status = 2 if graph in options else 1
        done = tool(command, *options, *output, *picture_file, status=status, PYTHONPATH=no_torch)
        assert one_line(done).startswith(f"ssvit: {start}")


def test_an_exported_model_is_loaded_in_python(exported, monkeypatch):
    model, folder = exported
    loaded = ssvit.load(folder / "model.onnx")
    x = images(count=3).mul(255).round().to(torch.uint8)
    with torch.no_grad():
        assert (loaded.features(x) - model.represent(x)).abs().max() < 1e-4
    for call, named in (
        (lambda: loaded.features(x, layer=1), "layer=1: "),
        (lambda: loaded.patch_features(x), "pooling=patches: "),
        (lambda: ssvit.load(folder, image_size=64), "image_size=64: "),
        (lambda: ssvit.load(folder, device="meta"), "device=meta: "),
        (lambda: ssvit.load_classifier(folder), "checkpoint="),
    ):
        assert str(error_of(call)).startswith(named)
    monkeypatch.setattr(graph, "find_spec", lambda name: None)
    assert "pip install onnxruntime" in str(error_of(ssvit.load, folder))
