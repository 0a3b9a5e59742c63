"""Graphs of ONNX and programs of torch.export compute the model's outputs, for any number and size of images."""

import json
import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from command import LIMIT
from exported import CLASSES, SHAPE, classifier, encoder, images, written

from ssvit.models.vit_options import ViT


def leaks(path: Path) -> list[str]:
    """Return the paths of this machine that a file contains."""
    words = (str(Path(torch.__file__).parent.parent), str(Path(__file__).parents[2]), os.path.expanduser("~/"))
    return [word for word in words if word.encode() in path.read_bytes()]


def opened(folder):
    """Return an exported graph as a function of images, and its metadata."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    stored = session.get_modelmeta().custom_metadata_map
    metadata = {name: json.loads(text) if text[0] in "[{tf" else text for name, text in stored.items()}
    return lambda x: tuple(map(torch.from_numpy, session.run(None, {"images": x.numpy()}))), metadata


@pytest.mark.parametrize(
    ("resize", "changes"),
    [
        (None, {"positions": "relative", "depth": 1}),
        pytest.param(None, {"attention": "window", "window": 3}, marks=pytest.mark.slow),
        pytest.param("paper", {}, marks=pytest.mark.slow),
        pytest.param("timm", {"positions": "learned_2d"}, marks=pytest.mark.slow),
        pytest.param("paper", {"positions": "sine_cosine_2d", "positions_at": "every_layer"}, marks=pytest.mark.slow),
        pytest.param("paper", {"stem": {"layers": [1, 1], "width": 32}}, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_a_graph_computes_the_outputs_of_the_encoder(resize, changes, tmp_path):
    exported = encoder(**changes)
    folder, _ = written(exported, tmp_path, "onnx", any_size=resize)
    program, _ = opened(folder)
    for size in [(32, 48), *([(48, 40), (80, 16)] if resize else [])]:
        resized = ViT(**{**exported.arguments, "image_size": list(size)}).build().eval()
        resized.load_weights_from(exported, how=resize or "paper")
        for count in (1, 3):
            x = images(size, count)
            tokens, features = program(x)
            assert (tokens - resized(x)).abs().max() < 1e-4
            assert (features - resized.represent(x)).abs().max() < 1e-4
    assert not any(leaks(file) for file in folder.iterdir())


@torch.no_grad()
def test_a_graph_of_a_classifier_contains_its_metadata(tmp_path):
    model = classifier(depth=1, distillation_token=True, gelu="tanh")
    folder, remarks = written(model, tmp_path, "onnx", manifest={"step": 3, "view": {"resize": 64}})
    program, metadata = opened(folder)
    assert "difference" in "".join(remarks)
    assert metadata["classes"] == list(CLASSES)
    assert metadata["image_size"] == [32, 48]
    assert numpy.allclose(metadata["mean"], SHAPE["mean"])
    assert metadata["std"] == [SHAPE["std"]] * 3
    assert "64 pixels on the shorter side" in metadata["preprocessing"]
    (logits,) = program(images(count=3))
    assert (logits - model.logits(images(count=3))).abs().max() < 1e-5  # logits of the exact GELU differ by 1.6e-4


@torch.no_grad()
def test_a_quantised_graph_has_linear_layers_in_8_bits_and_the_rest_in_float32(tmp_path):
    onnx, model = pytest.importorskip("onnx"), classifier(depth=2)
    logging.disable(logging.ERROR)
    folder, remarks = written(model, tmp_path, "onnx", quantize="int8")
    assert logging.root.manager.disable == logging.ERROR
    logging.disable(logging.NOTSET)
    assert "8 bits" in remarks[-1]
    assert {file.name for file in folder.iterdir()} == {"README.md", "model.onnx"}
    program, metadata = opened(folder)
    assert metadata["classes"] == list(CLASSES)
    logits, features = torch.as_tensor(program(images(count=3))[0]), model.logits(images(count=3))
    assert torch.nn.functional.cosine_similarity(logits, features).min() > 0.99
    assert not torch.equal(logits, features)
    graph = onnx.load(folder / "model.onnx").graph
    known = {weight.name: weight for weight in graph.initializer}
    products = [node for node in graph.node if node.op_type == "MatMulInteger"]
    weights = [known[node.input[1]] for node in products]
    # The projection of the patches, four products of a layer, and the head; for the class token alone, the last layer
    # divides the packed projection into queries and the rest within the graph, where its parts stay in float32.
    assert sorted(weight.dims[1] for weight in weights) == sorted([48, 3 * 48, *[48, 80, 48] * 2, len(CLASSES)])
    assert {weight.data_type for weight in weights} == {onnx.TensorProto.INT8}
    # Without VNNI, two products are added in 16 bits: no pair of them may saturate, whatever the CPU of this test.
    largest = max(numpy.abs(onnx.numpy_helper.to_array(weight).astype(int)).max() for weight in weights)
    assert largest > 32
    assert 2 * 255 * largest <= 2**15 - 1
    scales = {tuple(weight.dims) for name, weight in known.items() if name.endswith("_scale")}
    assert scales == {(3 * 48,), (48,), (80,), (len(CLASSES),)}
    assert sum(node.op_type in ("MatMul", "Gemm") for node in graph.node) == 2 * 2 + 2  # attention, and these parts


WITHOUT_SSVIT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] != "ssvit", "ssvit was imported"

sys.meta_path.insert(0, Blocked())
import torch

for folder in sys.argv[1:]:
    extra_files = {"metadata.json": ""}
    program = torch.export.load(f"{folder}/model.pt2", extra_files=extra_files).module()
    with torch.no_grad():
        torch.save([program(x) for x in torch.load(f"{folder}/inputs.pt")], f"{folder}/outputs.pt")
    print(extra_files["metadata.json"].replace("\\n", " "))
assert "ssvit" not in sys.modules
"""
INPUTS = [images(size, count) for size, count in (((32, 48), 1), ((32, 48), 3), ((48, 40), 2), ((80, 16), 5))]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The model, the folder and the metadata of each program, which a process without ssvit has run.

    The program of the encoder has one image size, and that of the classifier, which contains an encoder, any size.
    """
    place, programs = tmp_path_factory.mktemp("programs"), {}
    for make, positions, resize, inputs in (
        (encoder, "relative", None, INPUTS[:2]), (classifier, "learned_2d", "timm", INPUTS),
    ):  # fmt: skip
        model = make(positions=positions, depth=1)
        manifest = {"step": 3, "view": {"resize": 64}}
        folder, remarks = written(model, place / make.__name__, "torch", any_size=resize, manifest=manifest)
        assert {file.name for file in folder.iterdir()} == {"README.md", "model.pt2"}
        assert "difference between torch and torch.export" in "".join(remarks)
        torch.save(inputs, folder / "inputs.pt")
        programs[make] = model, folder
    folders = [str(folder) for _, folder in programs.values()]
    command = [sys.executable, "-I", "-c", WITHOUT_SSVIT, *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=place)
    assert done.returncode == 0, done.stderr
    stored = map(json.loads, done.stdout.splitlines())
    return {make: (*program, metadata) for (make, program), metadata in zip(programs.items(), stored, strict=True)}


@pytest.mark.parametrize("make", [encoder, classifier])
@torch.no_grad()
def test_a_program_of_torch_runs_in_a_process_without_ssvit(make, programs, tmp_path):
    model, folder, metadata = programs[make]
    assert "64 pixels on the shorter side" in metadata["preprocessing"]
    assert metadata["any_size"] is (make is classifier)
    trained = model if make is encoder else model.encoder
    for x, outputs in zip(*map(torch.load, (folder / "inputs.pt", folder / "outputs.pt")), strict=True):
        resized = ViT(**{**trained.arguments, "image_size": list(x.shape[2:])}).build().eval()
        resized.load_weights_from(trained, how="timm")
        if make is encoder:
            expected = resized(x), resized.represent(x)
        else:
            model.encoder = resized
            expected = (model.logits(x),)
            assert metadata["classes"] == list(CLASSES)
        for ours, theirs in zip(expected, outputs, strict=True):
            assert (ours - theirs).abs().max() < 1e-5
    with zipfile.ZipFile(folder / "model.pt2") as archive:
        archive.extractall(tmp_path / "archive")
    assert not any(leaks(file) for file in (tmp_path / "archive").rglob("*") if file.is_file())


@torch.no_grad()
def test_a_program_of_torch_has_one_size_by_default(programs):
    _, folder, _ = programs[encoder]
    program = torch.export.load(folder / "model.pt2").module()
    assert len(program(images(count=5))) == 2
    with pytest.raises(RuntimeError, match="to be equal to 32, but got 48"):
        program(images((48, 48)))
