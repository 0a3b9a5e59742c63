"""The layers of a Transformer in bfloat16 on a CPU, forward and backward, by C that the machine's compiler builds.

torch and oneDNN compute the same, and take longer: between the products of a layer they write what the next one reads
again, round weights and gradients in passes of their own, and multiply the shapes of attention at half of the
processor's speed. Building takes a second, when the first kernel is asked for; nothing is kept, so that nothing can be
out of date or be for another processor. Where there is no compiler, where the processor lacks the instructions, where a
tensor is of another type, shape or device, and in compiled or exported graphs, `fit` and `multiply` are false and the
callers use torch's. docs/performance.md has the figures.

Letters: b images, q tokens that ask, t tokens that answer, h heads, k width of a head, d = h * k, r rows, i inputs,
o outputs. Tensors are bfloat16 unless said otherwise.
"""

import contextlib
import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Sums may be reordered, which vectors need; infinities and what is not a number keep their meaning.
_OPTIONS = "-O3 -march=native -fopenmp -fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros -fPIC"
SOURCES = tuple(sorted(Path(__file__).parent.glob("*.c")))
_LANES = 16  # products.h: widths are multiples of it
_DEEP, _GROUP = 1024, 48  # linear.c: what its scratch memory is counted by
_wanted = True
_BLOCKS = 32  # shares of the rows that a layer norm's gradients are summed over apart, so that threads can share them


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, or None where they cannot be built."""
    compiler = [*shlex.split(os.environ.get("CC", "cc")), *_OPTIONS.split()]

    def build(built: Path, *options: str | Path) -> Path:
        subprocess.run([*compiler, *options, "-o", built], check=True, capture_output=True)
        return built

    try:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
            objects = pool.map(lambda source: build(Path(folder) / f"{source.stem}.o", "-c", source), SOURCES)
            return ctypes.CDLL(str(build(Path(folder) / "kernels.so", "-shared", *objects, "-lm")))
    except (OSError, subprocess.CalledProcessError):
        return None


def fit(tensor: Tensor) -> bool:
    """Whether layer norm can take a tensor."""
    return tensor.is_contiguous() and _here(tensor) and tensor.dtype == torch.bfloat16


def multiply(tensor: Tensor, *widths: int) -> bool:
    """Whether products can take a tensor once it is of their type, and these widths of heads, inputs or outputs."""
    return all(width % _LANES == 0 for width in widths) and _here(tensor) and hasattr(library(), "linear")


@contextlib.contextmanager
def left_alone() -> Iterator[None]:
    """Within it torch computes everything, whose work can be counted."""
    global _wanted
    before, _wanted = _wanted, False
    try:
        yield
    finally:
        _wanted = before


def _here(tensor: Tensor) -> bool:
    if not _wanted or tensor.device.type != "cpu" or tensor.numel() == 0:
        return False
    return not torch.compiler.is_compiling() and library() is not None


def _call(kernel: str, *arguments: Any) -> None:
    def plain(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            # C would read whatever lies there.
            assert argument.is_contiguous() or argument.stride() == (
                argument.shape[1] * argument.stride(1),
                argument.stride(1),
                1,
            )
            return ctypes.c_void_p(argument.data_ptr())
        if argument is None or isinstance(argument, float):
            return ctypes.c_void_p() if argument is None else ctypes.c_float(argument)
        return ctypes.c_int64(argument)

    getattr(library(), kernel)(*map(plain, arguments), ctypes.c_int(torch.get_num_threads()))


def _pairs(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int32)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (r, i), weight (o, i) and bias (o,) float32 -> (r, o)."""
    out = x.new_empty(len(x), len(weight))
    _call("linear", x, weight, bias, out, None, 0, *x.shape, len(weight), _pairs(weight.numel() // 2))
    return out


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, *, slopes: bool) -> tuple[Tensor, Tensor | None]:
    """`linear` and the GELU of it, (r, o); and if asked for GELU's slopes there, (r, o)."""
    out = x.new_empty(len(x), len(weight))
    kept = torch.empty_like(out) if slopes else None
    _call("linear", x, weight, bias, out, kept, 1, *x.shape, len(weight), _pairs(weight.numel() // 2))
    return out, kept


def linear_inputs(gradient: Tensor, weight: Tensor, slopes: Tensor | None = None) -> Tensor:
    """The gradient of x (r, i) from that of `linear`, (r, o), times slopes (r, i)."""
    (r, o), i = gradient.shape, weight.shape[1]
    out = gradient.new_empty(r, i)
    _call("linear_inputs", gradient, weight, slopes, out, r, i, o, _pairs(weight.numel() // 2))
    return out


def linear_weights(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of weight (o, i) and bias (o,), float32, from that of `linear`, (r, o), and x (r, i)."""
    (r, o), i = gradient.shape, x.shape[1]
    to_weight, to_bias = gradient.new_empty(o, i, dtype=torch.float32), gradient.new_empty(o, dtype=torch.float32)
    scratch = _pairs(_DEEP // 2 * (i + -(-o // _GROUP) * _GROUP))
    _call("linear_weights", gradient, x, to_weight, to_bias, r, i, o, scratch)
    return to_weight, to_bias


def _heads(query: Tensor, key: Tensor, heads: int) -> tuple[tuple[int, ...], Tensor]:
    """(b, h, q, t, k) and scratch memory."""
    (b, q, d), t = query.shape, key.shape[1]
    count = library().attention_scratch
    count.restype = ctypes.c_int64
    each = count(*map(ctypes.c_int64, (q, t, d // heads)))
    return (b, heads, q, t, d // heads), _pairs(torch.get_num_threads() * each)


def attention(query: Tensor, key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """query (b, q, d), key and value (b, t, d), parts of wider rows or not, -> (b, q, d), and of each head's and
    token's logits the largest and the share that it has of the weights, (b, h, q, 2) float32.
    """
    sizes, scratch = _heads(query, key, heads)
    out, norms = query.new_empty(query.shape), query.new_empty(*sizes[:3], 2, dtype=torch.float32)
    scale = sizes[-1] ** -0.5
    _call("attention", query, query.stride(1), key, value, key.stride(1), out, norms, *sizes, scale, scratch)
    return out, norms


def attention_backward(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, norms: Tensor, to: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Fill `to` with the gradients of query, key and value, of their strides, from that of `attention` (b, q, d)."""
    sizes, scratch = _heads(query, key, norms.shape[1])
    strides = query.stride(1), key.stride(1)
    assert tuple(part.stride(1) for part in to) == (*strides, strides[1])
    assert value.stride(1) == strides[1]
    inputs = query, strides[0], key, value, strides[1], gradient, norms
    _call("attention_backward", *inputs, *to, *sizes, sizes[-1] ** -0.5, scratch)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (r, d), weight and bias (d,) float32 -> (r, d), and each row's mean and 1 / deviation, (r,) float32."""
    out, mean, scale = torch.empty_like(x), weight.new_empty(len(x)), weight.new_empty(len(x))
    _call("norm_forward", x, weight, bias, out, mean, scale, *x.shape, epsilon)
    return out, mean, scale


def layer_norm_backward(
    x: Tensor, gradient: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x (r, d), and of weight and bias (d,) float32."""
    out, sums = torch.empty_like(x), weight.new_empty(_BLOCKS, 2, x.shape[1])
    _call("norm_backward", x, gradient, weight, mean, scale, out, sums, *x.shape, _BLOCKS)
    return out, *sums.sum(0).unbind()
