"""Define the options of an export."""

import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import model_validator

from ssvit.config.declaration import Name, OneOf, Options, Size
from ssvit.exchange import dinov3, hub, huggingface, timm
from ssvit.models.encoder_options import Normalized
from ssvit.models.vit_options import Resize, ViT
from ssvit.options import OptionError, UserError

ONNX, PROGRAM, OURS, TIMM, HUGGINGFACE = FORMATS = ("onnx", "torch_export", "safetensors", "timm", "huggingface")
GRAPHS = (ONNX, PROGRAM)
# The files of an export, which identify a folder as one.
CARD, CONFIG, PREPROCESSOR, WEIGHTS = "README.md", "config.json", "preprocessor_config.json", "model.safetensors"
GRAPH_FILES: Mapping[str, str] = {ONNX: "model.onnx", PROGRAM: "model.pt2"}
_FILES = {CARD, CONFIG, PREPROCESSOR, WEIGHTS, *GRAPH_FILES.values(), "model.onnx.data"}  # the last: above 2 GB
# Input types of a program, as described in its file and its card.
FLOAT: Final = "float"
UINT8: Final = "uint8"
INPUTS: Mapping[str, str] = {FLOAT: "float32 in [0, 1]", UINT8: "uint8, 0 to 255"}
_LACKS: Mapping[str, Callable[..., str | None]] = {TIMM: timm.lacks, HUGGINGFACE: huggingface.lacks}


class Export(Options):
    """Set the format of an export."""

    format: Annotated[str, OneOf(FORMATS)]
    """Format: onnx, torch_export, safetensors (ssvit's format), timm, or huggingface."""
    image_size: Size | None = None
    """Pixels of the images, or [height, width], to which positions are resampled; null: the checkpoint's."""
    resize: Resize = "paper"
    """How positions are resampled: as in the authors' code (paper) or as in timm."""
    any_size: bool = False
    """Whether an exported program (onnx, torch_export) takes images of any multiple of the patch size."""
    input: Literal["float", "uint8"] = FLOAT
    """Input of an exported program (onnx, torch_export): float32 in [0, 1] (float), or uint8, 0 to 255."""
    overwrite: bool = False
    """Whether to replace an existing export."""
    license: Name | None = None
    """Licence of the weights in the model card, by its identifier on the Hugging Face Hub, for instance apache-2.0;
    null: none."""
    push: Name | None = None
    """Repository on the Hugging Face Hub to which the folder is uploaded, OWNER/NAME; needs ssvit[hub] and `hf auth
    login`; null: no upload."""
    private: bool = True
    """Whether a repository that push creates is private."""

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if self.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license):
            raise OptionError("license", self.license, "must be an identifier of the Hub, as apache-2.0, or null")
        if self.push is not None:
            hub.check("push", self.push)
        graphs = f"is for format={' or '.join(GRAPHS)}"
        if self.input != FLOAT and self.format not in GRAPHS:
            raise OptionError("input", self.input, f"{graphs}; other models take normalised floats")
        if self.any_size and self.format not in GRAPHS:
            raise OptionError("any_size", True, graphs)
        missing = [name for name in ("onnx", "onnxscript") if not importlib.util.find_spec(name)]
        if missing and self.format == ONNX:
            raise UserError(f"format={ONNX} needs {' and '.join(missing)}: pip install ssvit[export]")
        return self

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
            raise OptionError("output", folder, "must be a folder, and this is a file")
        if checkpoint is not None and checkpoint.resolve().is_relative_to(folder.resolve()):
            raise OptionError("output", folder, "holds the checkpoint; give another folder")
        if others := {entry.name for entry in folder.iterdir()} - _FILES:
            raise OptionError("output", folder, f"is there and is no export: it holds {min(others)}; give another one")
        if not self.overwrite:
            raise OptionError("output", folder, "is there; overwrite=true replaces it")

    def check_model(self, encoder: Normalized, classifier: Mapping[str, object] | None) -> None:
        """Check that the format supports an encoder and its head.

        Args:
            encoder: Options of the encoder.
            classifier: Options of the head; None without one.

        Raises:
            OptionError: The format does not support them.
        """
        if not isinstance(encoder, ViT):
            if self.format != OURS:
                raise OptionError("format", self.format, f"is for a ViT; only {OURS} takes {encoder.label}")
            return
        if self.any_size and encoder.positions == "relative":
            raise OptionError("any_size", True, "is not for relative positions; give image_size, one for each export")
        if self.format in _LACKS:
            reason: str | None
            if encoder.positions == "relative":
                reason = "relative positions"
            elif encoder.positions == "rotary":
                reason = dinov3.lacks(encoder.values(), classifier, of_timm=self.format == TIMM)
            elif encoder.positions_at != "stem":
                reason = f"positions_at={encoder.positions_at}"
            else:
                reason = _LACKS[self.format](encoder.values(), classifier)
            if reason:
                right = f"has no model with {reason}; onnx and torch_export take any encoder"
                raise OptionError("format", self.format, right)
