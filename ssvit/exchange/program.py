"""Export an encoder, a classifier or a segmentation model as one graph of ONNX or as a program of torch.export.

Images are float in [0, 1]; normalisation is part of the program. A program takes any number of images and, with
any_size, any size that is a multiple of the patch size: the encoder then resamples its positions.

Letters: b images, c channels, t tokens, d width, k classes.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.attention import SDPBackend, sdpa_kernel

from ssvit.engine import private
from ssvit.errors import UserError
from ssvit.exchange import graph
from ssvit.exchange.options import TORCH, Export
from ssvit.models.vit import ViT
from ssvit.objectives.classify import Classify
from ssvit.objectives.segment import Segment

METADATA = "metadata.json"  # extra file of a program of torch.export
TOLERANCE = 1e-4  # maximum difference of the file's outputs and the model's, for outputs of the last norm (about 1)
_MAX_PATCHES = 1024  # maximum number of patches along a side, a bound that the tracer requires


class Program(nn.Module):
    """Wrap a model for export, with a tuple of tensors as output.

    Args:
        model: The encoder, classifier or segmentation model.
        options: Options of the export; `any_size` and `resize` are used.
    """

    def __init__(self, model: ViT | Classify | Segment, options: Export) -> None:
        super().__init__()
        self.model, self.options = model, options
        if options.any_size:
            self.encoder.resize = options.resize
        self.outputs = ("tokens", "features") if isinstance(model, ViT) else ("logits",)

    @property
    def encoder(self) -> ViT:
        """Return the encoder of the model."""
        encoder = self.model if isinstance(self.model, ViT) else self.model.encoder
        assert isinstance(encoder, ViT)  # `Export.check_model` has checked this
        return encoder

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs for images (b, c, h, w).

        These are logits, (b, k) or for segmentation (b, k, h, w), or an encoder's tokens (b, t, d) and features (b, d).
        """
        if isinstance(self.model, ViT):
            tokens = self.model(images)
            return tokens, self.model.pool(tokens)
        return (self.model.logits(images),)

    def example(self, count: int, height: int, width: int) -> Tensor:
        """Return example images with fixed random pixels.

        Args:
            count: Number of images.
            height: Height in pixels.
            width: Width in pixels.

        Returns:
            Images, (count, c, height, width).
        """
        generator = torch.Generator().manual_seed(count)
        return torch.rand(count, self.encoder.channels, height, width, generator=generator)


@torch.no_grad()
def write(program: Program, metadata: Mapping[str, object], path: Path) -> None:
    """Write a program in its format, including the weights, without paths of this machine.

    Args:
        program: The program.
        metadata: Metadata: in ONNX, metadata_props in JSON unless they are text; in torch.export, `METADATA` in JSON.
        path: The file.

    Raises:
        UserError: The program cannot be traced.
    """
    (height, width), (p, q) = program.encoder.image_size, program.encoder.patch_size
    shape: dict[int, Dim] = {0: Dim("batch")}
    if program.options.any_size:
        shape |= {2: p * Dim("rows", max=_MAX_PATCHES), 3: q * Dim("columns", max=_MAX_PATCHES)}
        # The sizes differ from each other and from the encoder's, so that the tracer does not identify them.
        height, width = height + p, width + 2 * q
    images = program.example(2, height, width)
    with sdpa_kernel(SDPBackend.MATH):  # the only implementation of attention with the same strides in ONNX
        try:
            traced = torch.export.export(program.eval(), (images,), dynamic_shapes=(shape,))
        except private.tracing_errors() as error:
            raise UserError(f"the encoder cannot be traced: {str(error).splitlines()[0]}") from None
        if program.options.format == TORCH:
            for traced_node in traced.graph.nodes:
                traced_node.meta.pop("stack_trace", None)  # contains paths
            traced.example_inputs = None
            torch.export.save(traced, path, extra_files={METADATA: json.dumps(metadata)})
            return
        written = torch.onnx.export(
            traced, input_names=[graph.INPUT], output_names=program.outputs, dynamo=True, verbose=False
        )
    assert written is not None
    model = written.model
    for node in (model.graph, *model.graph, *model.functions.values()):
        node.metadata_props.clear()
        node.doc_string = None
    for name, value in metadata.items():
        model.metadata_props[name] = value if isinstance(value, str) else json.dumps(value)
    written.save(path)


def quantize(path: Path) -> None:
    """Store the weights of linear layers in 8 bits, per output; attention, norms and everything else stay float32.

    Weights use 7 of the 8 bits: on CPUs with AVX2 but without VNNI, onnxruntime adds pairs of products of an unsigned
    activation and a signed weight in 16 bits, which saturate above 32,767, and 2 * 255 * 64 does not exceed that.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(path)
    del model.graph.value_info[:]  # the exporter transposes weights without changing their recorded shapes
    rounded = path.with_name(f"{path.stem}.int8{path.suffix}")
    constant = {"MatMulConstBOnly": True}  # products of two activations, as in attention, are not rounded
    linear, signed = ["MatMul", "Gemm"], QuantType.QInt8
    former = logging.root.manager.disable
    logging.disable(max(former, logging.WARNING))  # advice on graphs that are not optimised
    try:
        quantize_dynamic(model, rounded, linear, True, reduce_range=True, weight_type=signed, extra_options=constant)
    finally:
        logging.disable(former)
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)
    rounded.replace(path)


def _opened(program: Program, path: Path) -> Callable[[Tensor], Sequence[Tensor]]:
    """Return a written program as a function of images."""
    if program.options.format == TORCH:
        return torch.export.load(path).module()
    session = graph.session(path)
    return lambda images: [torch.from_numpy(x) for x in session.run(None, {graph.INPUT: images.numpy()})]


@torch.no_grad()
def cosine(program: Program, path: Path) -> float:
    """Return the lowest cosine of the last outputs (b, d) of a written program and the program for random images."""
    images = program.example(8, *program.encoder.image_size)
    return F.cosine_similarity(program(images)[-1], _opened(program, path)(images)[-1]).min().item()


@torch.no_grad()
def difference(program: Program, path: Path) -> float | None:
    """Return the maximum difference of the outputs of a written program and the program; None without onnxruntime."""
    try:
        opened = _opened(program, path)
    except ModuleNotFoundError:
        return None
    (height, width), (p, q) = program.encoder.image_size, program.encoder.patch_size
    sizes = [(height, width)]
    if program.options.any_size:
        sizes += [(height + p, width), (2 * height, width + q)]
    worst = 0.0
    for count, size in ((1, sizes[0]), *((3, size) for size in sizes)):
        images = program.example(count, *size)
        for ours, theirs in zip(program(images), opened(images), strict=True):
            worst = max(worst, (ours - theirs).abs().max().item())
    return worst
