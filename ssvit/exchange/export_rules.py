"""What can be exported, asked before torch is loaded."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from ssvit.exchange import huggingface, timm
from ssvit.options import OptionError, UserError, flag, one_of

ONNX, PROGRAM, OURS, TIMM, HUGGINGFACE = FORMATS = ("onnx", "torch_export", "safetensors", "timm", "huggingface")
GRAPHS = (ONNX, PROGRAM)
# What images a program takes, and how its file and its card say it.
FLOAT, UINT8 = "float", "uint8"
INPUTS: Mapping[str, str] = {FLOAT: "float32 in [0, 1]", UINT8: "uint8, 0 to 255"}
_LACKS: Mapping[str, Callable[..., str | None]] = {TIMM: timm.lacks, HUGGINGFACE: huggingface.lacks}


def check(
    *, format: Any, any_size: Any, input: Any, overwrite: Any, encoder: Mapping[str, Any],
    classifier: Mapping[str, Any] | None,
) -> None:  # fmt: skip
    """OptionError unless this encoder (its arguments) and this head can be written in a format.

    UserError if a package that writes it is not installed.
    """
    one_of("format", format, FORMATS)
    flag("overwrite", overwrite)
    flag("any_size", any_size)
    one_of("input", input, INPUTS)
    if input != FLOAT and format not in GRAPHS:
        raise OptionError("input", input, f"is for format={' or '.join(GRAPHS)}; other models take normalised floats")
    if any_size and format not in GRAPHS:
        raise OptionError("any_size", any_size, f"is for format={' or '.join(GRAPHS)}")
    if any_size and encoder["positions"] == "relative":
        raise OptionError("any_size", any_size, "is not for relative positions; give image_size, one for each export")
    if format == ONNX and (missing := [name for name in ("onnx", "onnxscript") if not importlib.util.find_spec(name)]):
        raise UserError(f"format={ONNX} needs {' and '.join(missing)}: pip install ssvit[export]")
    if format in _LACKS:
        reason = _LACKS[format](encoder, classifier)
        if encoder["positions"] == "relative":
            reason = "relative positions"
        elif encoder["positions_at"] != "stem":
            reason = f"positions_at={encoder['positions_at']}"
        if reason:
            raise OptionError("format", format, f"has no model with {reason}; onnx and torch_export take any encoder")
