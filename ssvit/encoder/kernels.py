"""What stands between the matrix products of a layer, in bfloat16 on a CPU, by C that the machine's compiler builds.

torch's own kernels compute the same and take up to three times as long. Building takes half a second, when the first
kernel is asked for; nothing is kept, so that nothing can be out of date or be for another processor. Where there is
no compiler, where a tensor is of another type or on another device, and in compiled or exported graphs, `fit` is false
and the callers use torch's. docs/performance.md has the figures.

Letters: b images, t tokens, h heads, k width of a head, r rows, d width.
"""

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Sums may be reordered, which vectors need; infinities and what is not a number keep their meaning.
_OPTIONS = "-O3 -march=native -fopenmp -fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros -shared"
SOURCE = Path(__file__).with_suffix(".c")
_BLOCKS = 32  # shares of the rows that are summed apart, so that threads can share them


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where they cannot be built."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    try:
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder) / "kernels.so"
            command = [*compiler, *_OPTIONS.split(), "-fPIC", SOURCE, "-o", built, "-lm"]
            subprocess.run(command, check=True, capture_output=True)
            return ctypes.CDLL(str(built))
    except (OSError, subprocess.CalledProcessError):
        return None


def fit(tensor: Tensor) -> bool:
    """Whether the kernels can take a tensor."""
    if tensor.device.type != "cpu" or tensor.dtype != torch.bfloat16 or tensor.numel() == 0:
        return False
    return tensor.is_contiguous() and not torch.compiler.is_compiling() and library() is not None


def _call(kernel: str, *arguments: Any) -> None:
    def plain(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            assert argument.is_contiguous()  # C would read whatever lies there
            return ctypes.c_void_p(argument.data_ptr())
        return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int64(argument)

    getattr(library(), kernel)(*map(plain, arguments), ctypes.c_int(torch.get_num_threads()))


def gather_heads(packed: Tensor, heads: int, parts: int) -> Tensor:
    """(b, t, parts * d) -> (parts, b * h, t, k)."""
    b, t, width = packed.shape
    k = width // parts // heads
    apart = packed.new_empty(parts, b * heads, t, k)
    _call("gather_heads", packed.contiguous(), apart, b, t, parts, heads, k)
    return apart


def scatter_heads(apart: Tensor, heads: int) -> Tensor:
    """(parts, b * h, t, k) -> (b, t, parts * d)."""
    parts, rows, t, k = apart.shape
    packed = apart.new_empty(rows // heads, t, parts * heads * k)
    _call("scatter_heads", apart, packed, rows // heads, t, parts, heads, k)
    return packed


def softmax_(logits: Tensor, scale: float) -> None:
    """The softmax over the last dimension of scale * logits, in place."""
    columns = logits.shape[-1]
    _call("softmax", logits, logits.numel() // columns, columns, scale)


def softmax_backward_(weights: Tensor, gradient: Tensor, scale: float) -> None:
    """The gradient of `softmax_`'s logits from that of its weights, in place."""
    columns = weights.shape[-1]
    _call("softmax_backward", weights, gradient, weights.numel() // columns, columns, scale)


def gelu_backward(x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x (r, d) from that of gelu(x), (r, d), and its sum over the rows, (d,) float32."""
    out, sums = torch.empty_like(x), x.new_empty(_BLOCKS, x.shape[1], dtype=torch.float32)
    _call("gelu_backward", x, gradient.contiguous(), out, sums, *x.shape, _BLOCKS)
    return out, sums.sum(0)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (r, d), weight and bias (d,) float32 -> (r, d), and each row's mean and 1 / deviation, (r,) float32."""
    out, mean, scale = torch.empty_like(x), weight.new_empty(len(x)), weight.new_empty(len(x))
    _call("norm_forward", x, weight, bias, out, mean, scale, *x.shape, epsilon)
    return out, mean, scale


def layer_norm_backward(
    x: Tensor, gradient: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x (r, d) bfloat16, and of weight and bias (d,) float32."""
    out, sums = torch.empty_like(x), weight.new_empty(_BLOCKS, 2, x.shape[1])
    _call("norm_backward", x, gradient.contiguous(), weight, mean, scale, out, sums, *x.shape, _BLOCKS)
    return out, *sums.sum(0).unbind()
