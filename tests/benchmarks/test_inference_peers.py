"""The comparison of forward passes: every contender computes; how fast it is is never a test."""

import json

import pytest
import torch

from benchmarks import inference
from ssvit.models.vit_options import ViT

TINY = ("data=shapes", "data.image_size=16", "encoder.patch_size=4", "encoder.width=32", "encoder.depth=2")


@torch.inference_mode()
def test_peers_with_the_same_weights_compute_the_same_features():
    for package in ("timm", "transformers", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    torch.manual_seed(0)
    encoder = ViT(image_size=16, patch_size=4, width=32, depth=2, heads=2).build().eval()
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    functions = inference.contenders(encoder, torch.device("cpu"))
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    outputs = {name: torch.as_tensor(function(images)[0]) for name, function in functions.items() if "onnx" in name}
    ours = functions["ssvit, 32"](images)
    outputs |= {name: functions[name](images) for name in ("timm, 32", "timm, 32, plain attention")}
    assert set(outputs) == {"timm, 32", "timm, 32, plain attention", "onnxruntime, 32", "onnxruntime, int8"}
    for name, output in outputs.items():
        rounding = 0.1 if "int8" in name else 1e-4
        torch.testing.assert_close(output, ours, rtol=rounding, atol=rounding, msg=lambda text, name=name: name + text)
    assert functions["transformers, 32"](images).last_hidden_state.shape == (3, 17, 32)
    assert functions["ssvit, bf16"](images).shape == functions["timm, bf16"](images).shape == (3, 32)


def test_a_table_and_a_file_have_a_row_for_each_contender_and_size(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ssvit.kernels.latency._SECONDS", 0.0)
    monkeypatch.setattr(inference, "contenders", lambda encoder, device: {"a": torch.sum, "b": torch.sum})
    options = ["encoder.heads=2", "rounds=1", "threads=[1]", "batch_sizes=[1,2]", "image_sizes=[16,32]"]
    inference.command.main([*TINY, *options, "output=rates.json"])
    rows = json.loads((tmp_path / "rates.json").read_text())
    expected = [(name, [size, size], count) for size in (16, 32) for count in (1, 2) for name in "ab"]
    assert [(row["path"], row["image_size"], row["batch_size"]) for row in rows] == expected
    assert [row["ratio"] for row in rows if row["path"] == "a"] == [1.0] * 4
    assert all(0 < row["median"] <= row["slow"] for row in rows)
    assert capsys.readouterr().out.count("16x16") == 4
