"""Define the options of reading another project's weights and of an export."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from ssvit.config.declaration import Count, Options, Size, among
from ssvit.errors import OptionError, UserError
from ssvit.exchange import timm
from ssvit.models.encoder_options import Encoder, Normalized
from ssvit.models.timm_options import Timm
from ssvit.models.vit_options import Resize, ViT

# Suffixes of weight files; all but the first two are torch's. The last one is that of .pth.tar.
SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin", ".ckpt", ".tar")
TIMM_HUB = "timm:"  # prefix of the names of timm's models with their tags
HUB = ("hf://", TIMM_HUB)  # prefixes of addresses on the Hugging Face Hub


class ForeignEncoder(Encoder):
    """Set values that another project's weights may not contain; null: from the files next to them, or the default."""

    heads: Count | None = None
    """Number of attention heads, for a file of another project's weights; null: the usual number for its width."""
    mean: float | Sequence[float] | None = None
    """Mean of the image channels in [0, 1], for such a file; null: from the files next to it, or the usual value."""
    std: float | Sequence[float] | None = None
    """Standard deviation of the channels in [0, 1], for such a file; null: as for mean."""
    trained_size: Size | None = None
    """Pixels, or [height, width], of the training images of such an encoder; null: derived from its positions."""
    checkpoint_key: str | None = None
    """Key of one of several encoders in such a file, such as student; null: the teacher, MoCo v3's base_encoder, or
    averaged weights."""


FOREIGN_OPTIONS = tuple(ForeignEncoder.model_fields)


ONNX, OURS, TIMM, TORCH = FORMATS = ("onnx", "safetensors", "timm", "torch")
PROGRAMS = (ONNX, TORCH)  # formats that contain the computation, not only the weights
# The files of an export, which identify a folder as one.
CARD, CONFIG, WEIGHTS, GRAPH, PROGRAM = "README.md", "config.json", "model.safetensors", "model.onnx", "model.pt2"
_FILES = {CARD, CONFIG, WEIGHTS, GRAPH, f"{GRAPH}.data", PROGRAM}  # .data: above 2 GB


class Export(Options):
    """Set the format of an export."""

    format: Annotated[str, *among(FORMATS)]
    """Format: onnx, safetensors (ssvit's format), timm, which transformers opens too, or torch (torch.export)."""
    image_size: Size | None = None
    """Pixels of the images, or [height, width], to which positions are resampled; null: the checkpoint's."""
    resize: Resize = "paper"
    """How positions are resampled: as in the authors' code (paper) or as in timm."""
    any_size: bool = False
    """Whether format=onnx or torch takes images of any multiple of the patch size."""
    quantize: Literal["int8"] | None = None
    """int8: format=onnx stores the weights of linear layers in 8 bits, one scale for each output, and rounds their
    inputs to 8 bits, one scale for each pass; the rest stays in float32. None: everything in float32."""
    overwrite: bool = False
    """Whether to replace an existing export."""

    def check_consistency(self) -> None:
        """Check that the format supports any_size and quantize, and that its packages are installed."""
        if self.any_size and self.format not in PROGRAMS:
            raise OptionError("any_size", True, f"requires format={' or '.join(PROGRAMS)}")
        if self.quantize and self.format != ONNX:
            raise OptionError("quantize", self.quantize, f"requires format={ONNX}")
        packages = ("onnx", "onnxscript", *(["onnxruntime"] if self.quantize else []))
        missing = [name for name in packages if not importlib.util.find_spec(name)]
        if missing and self.format == ONNX:
            raise UserError(f"format={ONNX}: requires {' and '.join(missing)} (pip install {' '.join(missing)})")

    def check_folder(self, folder: Path, *, checkpoint: Path | None = None) -> None:
        """Check that the output folder does not exist, or is a replaceable export without the checkpoint.

        Args:
            folder: The output folder.
            checkpoint: The checkpoint that is exported; None: not checked.

        Raises:
            OptionError: The folder must not be written.
        """
        if not folder.exists():
            return
        if not folder.is_dir():
            raise OptionError("output", folder, "must be a folder, not a file")
        if checkpoint is not None and checkpoint.resolve().is_relative_to(folder.resolve()):
            raise OptionError("output", folder, "must not be the folder of the checkpoint")
        if foreign := {entry.name for entry in folder.iterdir()} - _FILES:
            raise OptionError("output", folder, f"contains {min(foreign)}, which is not part of an export")
        if not self.overwrite:
            raise OptionError("output", folder, "exists; overwrite=true replaces it")

    def check_model(self, encoder: Normalized, classifier: Mapping[str, object] | None) -> None:
        """Check that the format supports an encoder and its head.

        Args:
            encoder: Options of the encoder.
            classifier: Options of the head; None without one.

        Raises:
            OptionError: The format does not support them.
        """
        if self.format == OURS:
            return
        if not (isinstance(encoder, ViT) or (isinstance(encoder, Timm) and self.format == TIMM)):
            raise OptionError("format", self.format, f"requires a ViT, not {encoder.label}")
        if isinstance(encoder, ViT) and self.any_size:
            if encoder.positions == "relative":
                expected = "does not support relative positions; set image_size for each export"
                raise OptionError("any_size", True, expected)
            if encoder.attention != "full":
                raise OptionError("any_size", True, f"does not support attention={encoder.attention}")
        if self.format == TIMM and (reason := timm.unsupported(encoder, classifier)):
            raise OptionError("format", self.format, f"has no model with {reason}; {OURS} supports any encoder")
