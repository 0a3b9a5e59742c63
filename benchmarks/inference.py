"""Compare forward passes with those of other projects: python -m benchmarks.inference encoder=ti image_sizes=[224] …

Its options are those of `ssvit benchmark part=inference`. timm, onnxruntime and ssvit have the same weights, and
transformers has the same sizes. timm and transformers also run with attention as matrix products and softmax, and
compiled. All are given images of 8 bits, which they normalise.
"""

import copy
import sys
import tempfile
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.peers import timm_of, transformers_of, with_plain_attention
from ssvit.cli import benchmark
from ssvit.config.composed import Config
from ssvit.exchange import graph, program
from ssvit.exchange.export import converted
from ssvit.exchange.options import Export
from ssvit.kernels.latency import Function, paths
from ssvit.models.vit import ViT


def contenders(encoder: ViT, device: torch.device) -> dict[str, Function]:
    """Return the functions to measure by name: the installed peers, then the paths of ssvit.

    Args:
        encoder: The encoder.
        device: The device.
    """
    functions: dict[str, Function] = {}
    if find_spec("timm"):
        pooling = "avg" if encoder.pooling == "patch_mean" else "token"
        peer = timm_of(encoder.options, global_pool=pooling, fc_norm=False)
        peer.load_state_dict(converted(encoder, None))
        functions |= of_module("timm", Normalized(peer, encoder).to(device))
    if find_spec("transformers"):
        from transformers import ViTConfig, ViTModel

        other = ViTModel(ViTConfig(**transformers_of(encoder.options)), add_pooling_layer=False)
        functions |= of_module("transformers", Normalized(other, encoder).to(device))
    if find_spec("onnxruntime") and find_spec("onnxscript") and device.type == "cpu":
        functions |= {f"onnxruntime, {name}": of_file(encoder, name) for name in ("32", "int8")}
    return functions | {f"ssvit, {name}": function for name, function in paths(encoder, device).items()}


class Normalized(nn.Module):
    """Normalise images of 8 bits and apply a model to them.

    Args:
        model: The model.
        encoder: The encoder, whose normalisation is used.
    """

    def __init__(self, model: nn.Module, encoder: ViT) -> None:
        super().__init__()
        self.model, self.mean, self.std = model, nn.Buffer(encoder.mean.clone()), nn.Buffer(encoder.std.clone())

    def forward(self, images: torch.Tensor) -> Any:
        """Return the model's outputs for images (b, c, h, w)."""
        scaled = images.to(self.mean.dtype) / 255
        return self.model((scaled - self.mean[:, None, None]) / self.std[:, None, None])


def of_module(name: str, module: nn.Module) -> dict[str, Function]:
    """Return a peer in float32 and in bfloat16: unchanged, with plain attention, and compiled."""
    functions: dict[str, Function] = {}
    for precision, dtype in (("32", torch.float32), ("bf16", torch.bfloat16)):
        fused = copy.deepcopy(module).to(dtype).eval()
        plain = with_plain_attention(copy.deepcopy(fused))
        variants: dict[str, Any] = {"": fused, ", plain attention": plain, ", compiled": torch.compile(fused)}
        functions |= {f"{name}, {precision}{variant}": model for variant, model in variants.items()}
    return functions


def of_file(encoder: ViT, precision: str) -> Function:
    """Return the program that ssvit exports, in onnxruntime; "int8": with weights in 8 bits."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        program.write(program.Program(copy.deepcopy(encoder), Export(format="onnx")), {}, path)
        if precision == "int8":
            program.quantize(path)
        content = path.read_bytes()

    @cache
    def session(threads: int) -> Any:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def features(images: torch.Tensor) -> object:
        return session(torch.get_num_threads()).run(["features"], {graph.INPUT: (images.float() / 255).numpy()})

    return features


def run(config: Config) -> None:
    """Measure the contenders at each image size, print a table, and write the rates if `output` is set."""
    benchmark.inference(config, contenders)


class Inference(benchmark.Benchmark):
    """Options of the comparison."""

    part: Literal["inference"] = "inference"


command = replace(benchmark.command, run=run, options=Inference)

if __name__ == "__main__":
    command.main(sys.argv[1:])
