"""An encoder, or a classifier, as one program for ONNX and torch.export.

Images are float in [0, 1], or uint8; normalisation is inside. A program takes any number of images, and if it is to,
of any size that the patches divide: the encoder then resamples its positions.

Letters: b images, c channels, t tokens, d width, k classes.
"""

import io
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel

from ssvit import private
from ssvit.atomic_io import write
from ssvit.exchange.export_options import FLOAT, Export
from ssvit.models.vit import ViT
from ssvit.objectives.classify import Classify
from ssvit.options import UserError

INPUT = "images"
TOLERANCE = 1e-4  # between onnxruntime and torch, of outputs of the last norm, about 1
_LARGEST = 1024  # patches along a side, for the tracer, which wants a bound


class Program(nn.Module):
    """(b, c, h, w) -> a classifier's logits (b, k); or an encoder's tokens (b, t, d) and their pooled features (b, d).

    options: `any_size` and `resize` of positions, and `input`, count here.
    """

    def __init__(self, model: ViT | Classify, options: Export) -> None:
        super().__init__()
        self.model, self.options = model, options
        if options.any_size:
            self.encoder.resize = options.resize
        self.outputs = ("tokens", "features") if isinstance(model, ViT) else ("logits",)

    @property
    def encoder(self) -> ViT:
        encoder = self.model if isinstance(self.model, ViT) else self.model.encoder
        assert isinstance(encoder, ViT)  # as the options have checked
        return encoder

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        if isinstance(self.model, ViT):
            tokens = self.model(images)
            return tokens, self.model.pool(tokens)
        return (self.model.logits(images),)

    def example(self, count: int, height: int, width: int) -> Tensor:
        """Images as it takes them, (count, c, height, width), of random pixels that are always the same."""
        images = torch.rand(count, self.encoder.channels, height, width, generator=torch.Generator().manual_seed(count))
        return images if self.options.input == FLOAT else (255 * images).round().to(torch.uint8)


@torch.no_grad()
def trace(program: Program) -> ExportedProgram:
    """The program as one graph, without paths of this machine. UserError if it cannot be traced."""
    (height, width), (p, q) = program.encoder.image_size, program.encoder.patch_size
    shape: dict[int, Dim] = {0: Dim("batch")}
    if program.options.any_size:
        shape |= {2: p * Dim("rows", max=_LARGEST), 3: q * Dim("columns", max=_LARGEST)}
        # Sizes that differ from each other and from the encoder's own keep the tracer from taking them for the same.
        height, width = height + p, width + 2 * q
    images = program.example(2, height, width)
    try:
        # By its formula, attention gives the same strides on every machine, and when ONNX takes it apart.
        with sdpa_kernel(SDPBackend.MATH):
            exported = torch.export.export(program.eval(), (images,), dynamic_shapes=(shape,))
    except private.tracing_errors() as error:
        raise UserError(f"the encoder cannot be traced: {str(error).splitlines()[0]}") from None
    for node in exported.graph.nodes:
        for source in ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node"):
            node.meta.pop(source, None)
    return exported


def write_torch(program: Program, metadata: Mapping[str, object], path: Path) -> None:
    """As torch.export.load reads it, and the metadata by extra_files={"metadata.json": ""}."""
    data = io.BytesIO()  # torch's own writer tells no reason when a disk is full
    torch.export.save(trace(program), data, extra_files={"metadata.json": json.dumps(metadata, ensure_ascii=False)})
    write(path, data.getbuffer())


def write_onnx(program: Program, metadata: Mapping[str, object], path: Path) -> None:
    """As ONNX, the weights inside; the metadata as metadata_props, in JSON except for text."""
    exported, outputs = trace(program), program.outputs
    with sdpa_kernel(SDPBackend.MATH):
        written = torch.onnx.export(exported, input_names=[INPUT], output_names=outputs, dynamo=True, verbose=False)
    assert written is not None
    model = written.model
    for node in (model.graph, *model.graph, *model.functions.values()):
        node.metadata_props.clear()
        node.doc_string = None
    for name, value in metadata.items():
        model.metadata_props[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    written.save(path)


@torch.no_grad()
def difference(program: Program, path: Path) -> float | None:
    """The largest difference between the outputs of onnxruntime and the program; None if it is not installed."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return None
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (height, width), (p, q) = program.encoder.image_size, program.encoder.patch_size
    sizes = [(height, width)]
    if program.options.any_size:
        sizes += [(height + p, width), (2 * height, width + q)]
    worst = 0.0
    for count, size in ((1, sizes[0]), *((3, size) for size in sizes)):
        images = program.example(count, *size)
        outputs = session.run(None, {INPUT: images.numpy()})
        for ours, theirs in zip(program(images), outputs, strict=True):
            worst = max(worst, (ours - torch.from_numpy(theirs)).abs().max().item())
    return worst
