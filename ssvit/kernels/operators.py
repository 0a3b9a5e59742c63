"""Compute the layers of a Transformer in bfloat16 on a CPU, forward and backward, by C compiled on the machine.

torch and oneDNN take longer: they write and read the tensors between the products of a layer, round weights and
gradients in separate passes, and multiply the shapes of attention at half of the processor's speed. The kernels are
compiled at the first call, in about a second, and not stored. Without a compiler or the required instructions, for
tensors of other types, shapes or devices, and in compiled or exported graphs, `supports_layer_norm` and
`supports_matmul` return False and the callers use torch. docs/performance.md has the figures.

Letters: b images, q queries, t keys and values, h heads, k width of a head, d = h * k, r rows, i inputs, o outputs.
Tensors are bfloat16 unless stated otherwise.
"""

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Vectorisation requires reordered sums; infinities and NaNs keep their semantics.
_REORDERED = "-fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros"
_OPTIONS = f"-O3 -funroll-loops -march=native -fopenmp -fPIC {_REORDERED}"
SOURCES = tuple(sorted((Path(__file__).parent / "csrc").glob("*.c")))
_LANES = 16  # products.h: widths must be multiples of this
_DEEP, _GROUP = 1102, 48  # linear.c: sizes that determine its scratch memory
_BLOCKS = 32  # blocks of rows whose gradients of a layer norm are summed separately, for threads

Argument = Tensor | float | None  # argument of a kernel


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if they cannot be compiled."""
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


def supports_layer_norm(tensor: Tensor) -> bool:
    """Return whether the layer norm kernel supports a tensor."""
    return tensor.is_contiguous() and tensor.dtype == torch.bfloat16 and _here(tensor) and library() is not None


def supports_matmul(tensor: Tensor, *widths: int) -> bool:
    """Return whether products support a tensor, converted to bfloat16, and widths of heads, inputs or outputs."""
    return not any(width % _LANES for width in widths) and _here(tensor) and hasattr(library(), "linear")


def _here(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and tensor.numel() > 0


def _call(kernel: str, *arguments: Argument | Sequence[Argument]) -> None:
    """Call a kernel with its arguments, converted for C, and the number of threads."""

    def convert(value: Argument | Sequence[Argument]) -> Any:
        if value is None:
            return ctypes.c_void_p()
        if isinstance(value, Tensor):
            # With any other strides, C would read out of bounds.
            assert value.is_contiguous() or value.stride() == (value.shape[1] * value.stride(1), value.stride(1), 1)
            return ctypes.c_void_p(value.data_ptr())
        if isinstance(value, float):
            return ctypes.c_float(value)
        if isinstance(value, int):
            return ctypes.c_int64(value)
        values = [convert(each) for each in value]
        return (type(values[0]) * len(values))(*values)

    getattr(library(), kernel)(*map(convert, arguments), ctypes.c_int(torch.get_num_threads()))


def _pairs(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int32)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply a linear layer.

    Args:
        x: Inputs, (r, i).
        weight: Weight, (o, i) float32.
        bias: Bias, (o,) float32.

    Returns:
        Outputs, (r, o).
    """
    assert x.shape[1] == weight.shape[1]
    out = x.new_empty(len(x), len(weight))
    _call("linear", x, weight, bias, None, out, None, 0, *x.shape, len(weight), _pairs(weight.numel() // 2))
    return out


def linear_inputs(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the inputs of `linear`, (r, i), from that of its outputs, (r, o)."""
    (r, o), i = gradient.shape, weight.shape[1]
    assert o == len(weight)
    out = gradient.new_empty(r, i)
    _call("linear_inputs", gradient, weight, None, out, r, i, o, _pairs(weight.numel() // 2))
    return out


def _weights_scratch(inputs: int) -> int:
    """Return the size of the scratch memory of `linear_weights`, in pairs of bfloat16."""
    return _DEEP // 2 * (inputs + torch.get_num_threads() * _GROUP)


def linear_weights(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight (o, i) and bias (o,), float32, from that of the outputs (r, o) and x (r, i)."""
    assert len(gradient) == len(x)
    o, i = gradient.shape[1], x.shape[1]
    to_weight, to_bias = (torch.empty(*shape, dtype=torch.float32) for shape in ((o, i), (o,)))
    _call("linear_weights", gradient, x, to_weight, to_bias, len(x), i, o, _pairs(_weights_scratch(i)))
    return to_weight, to_bias


def _parts(query: Tensor | None, packed: Tensor) -> tuple[Tensor, ...]:
    """Return views of queries (b, q, d), keys and values (b, t, d)."""
    return packed.chunk(3, -1) if query is None else (query, *packed.chunk(2, -1))


def _attention_scratch(q: int, t: int, width: int) -> int:
    """Return the size of the scratch memory of attention, in pairs of bfloat16."""
    kernels = library()
    assert kernels is not None
    count = kernels.attention_scratch
    count.restype = ctypes.c_int64
    return torch.get_num_threads() * count(*map(ctypes.c_int64, (q, t, width)))


def _heads(query: Tensor, key: Tensor, heads: int) -> tuple[float | Tensor, ...]:
    """Return b, h, q, t, k, the scale of logits, and scratch memory."""
    (b, q, d), t = query.shape, key.shape[1]
    k = d // heads
    return b, heads, q, t, k, k**-0.5, _pairs(_attention_scratch(q, t, k))


def attention(query: Tensor | None, packed: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Compute attention.

    Args:
        query: Queries, (b, q, d); None: `packed` contains them.
        packed: Queries, keys and values, (b, t, 3 * d), or with `query` keys and values, (b, t, 2 * d).
        heads: Number of heads.

    Returns:
        Outputs, (b, q, d), and the maximum logit of each query with its weight, (b, h, q, 2) float32.
    """
    query, key, value = _parts(query, packed)
    b, q, d = query.shape
    out, norms = packed.new_empty(b, q, d), packed.new_empty(b, heads, q, 2, dtype=torch.float32)
    inputs = query, query.stride(1), key, value, key.stride(1)
    _call("attention", *inputs, out, norms, *_heads(query, key, heads))
    return out, norms


def attention_backward(
    query: Tensor | None, packed: Tensor, gradient: Tensor, norms: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of the inputs of `attention`.

    Args:
        query: Queries, (b, q, d), or None.
        packed: The packed projections.
        gradient: Gradient of the outputs, (b, q, d).
        norms: Second result of `attention`.

    Returns:
        Gradients of query, or None, and packed.
    """
    to_query, to_packed = None if query is None else torch.empty_like(query), torch.empty_like(packed)
    to = _parts(to_query, to_packed)
    query, key, value = _parts(query, packed)
    inputs = query, query.stride(1), key, value, key.stride(1)
    _call("attention_backward", *inputs, gradient, norms, *to, *_heads(query, key, norms.shape[1]))
    return to_query, to_packed


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Apply layer norm.

    Args:
        x: Inputs, (r, d).
        weight: Scale, (d,) float32.
        bias: Bias, (d,) float32.
        epsilon: Value added to the variance.

    Returns:
        Outputs, (r, d), and the mean and 1 / deviation of each row, (r, 2) float32.
    """
    out, moments = torch.empty_like(x), weight.new_empty(len(x), 2)
    _call("norm_forward", x, weight, bias, out, moments, *x.shape, epsilon)
    return out, moments


def layer_norm_backward(x: Tensor, gradient: Tensor, weight: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the inputs of `layer_norm`.

    Args:
        x: Inputs, (r, d).
        gradient: Gradient of the outputs, (r, d).
        weight: Scale, (d,) float32.
        moments: Second result of `layer_norm`.

    Returns:
        Gradients of x (r, d), weight (d,) float32 and bias (d,) float32.
    """
    assert x.shape == gradient.shape
    results = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    sums = _pairs(_BLOCKS * 2 * len(weight))
    _call("norm_backward", x, gradient, weight, moments, None, *results, sums, *x.shape, _BLOCKS)
    return results


def _by_branch(tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Group tensors by branch, six per branch: its weights, or the tensors that its gradients need."""
    return [tensors[start : start + 6] for start in range(0, len(tensors), 6)]


def _sizes(x: Tensor, weights: Sequence[Tensor], heads: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return for each branch the outputs of its first linear layer, the inputs of its second, and its heads."""
    d, sizes = x.shape[-1], []
    for h, (gain, _, weight, _, weight2, _) in zip(heads, _by_branch(weights), strict=True):
        first, second = len(weight), weight2.shape[1]
        assert weight.shape[1] == len(weight2) == len(gain) == d
        assert (first, second) == (3 * d, d) if h else first == second
        sizes.append((first, second, h))
    return sizes


def _branch_scratch(weights: Sequence[Tensor], heads: Sequence[int], t: int, d: int) -> list[int]:
    return [weight.numel() // 2 for weight in weights] + [_attention_scratch(t, t, d // h) for h in set(heads) if h]


# Tensors that `branches` returns for each branch; the fourth is None if it is not needed.
Kept = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]


def _kept(x: Tensor, first: int, second: int, heads: int, learns: bool) -> Kept:
    b, t, _ = x.shape
    norms, moments = (x.new_empty(b, *shape, 2, dtype=torch.float32) for shape in ((heads, t), (t,)))
    between = x.new_empty(b, t, first) if heads or learns else None
    return torch.empty_like(x), torch.empty_like(x), moments, between, x.new_empty(b, t, second), norms


def branches(
    x: Tensor, weights: Sequence[Tensor], heads: Sequence[int], epsilon: float, adds: bool, learns: bool
) -> list[Tensor]:
    """Apply branches of a Transformer: `layer_norm`, `linear`, `attention` or GELU, and `linear`.

    Args:
        x: Tokens, (b, t, d).
        weights: For each branch, weight and bias of the layer norm, of the first and of the second linear layer.
        heads: For each branch, the number of attention heads; 0: GELU.
        epsilon: Value added to the variance in layer norms.
        adds: Whether the input of each branch is added to its output.
        learns: Whether the tensors that the gradients need are returned.

    Returns:
        The last output (b, t, d); or with `learns`, six tensors for each branch: its output, the normalised x (b, t,
        d), its moments (b, t, 2) float32, queries, keys and values (b, t, 3 * d) or the slopes of GELU (b, t, o), the
        input of the second linear layer (b, t, i), and the second result of `attention`.
    """
    assert adds or len(heads) == 1
    (b, t, d), sizes = x.shape, _sizes(x, weights, heads)
    if learns:
        kept = [_kept(x, *size, True) for size in sizes]
    else:
        # Branches of equal sizes share memory: each value is read before it is overwritten.
        shared = {size: _kept(x, *size, False) for size in sizes}
        kept = [shared[size] for size in sizes]
    scratch = _branch_scratch(weights, heads, t, d)
    arguments = [*weights], [*chain(*kept)], [*chain(*sizes)], len(heads), b, t, d, int(adds), epsilon
    _call("branches", x, *arguments, _pairs(max(scratch)))
    return [part for part in chain(*kept) if part is not None] if learns else [kept[-1][0]]


def branches_backward(
    gradient: Tensor, x: Tensor, weights: Sequence[Tensor], kept: Sequence[Tensor], adds: bool
) -> list[Tensor]:
    """Return the gradients of the inputs of `branches`.

    Args:
        gradient: Gradient of the last output, (b, t, d).
        x: Tokens, (b, t, d).
        weights: Weights of the branches.
        kept: Results of `branches` with `learns`.
        adds: Whether the input of each branch is added to its output.

    Returns:
        Gradients of x (b, t, d) and of the weights, float32.
    """
    assert gradient.shape == x.shape
    to_x, *to_weights = map(torch.empty_like, (x, *weights))
    heads = [norms.shape[1] for *_, norms in _by_branch(kept)]
    (b, t, d), sizes = x.shape, _sizes(x, weights, heads)
    widest = max(chain(*sizes))
    scratch = [*_branch_scratch(weights, heads, t, d), _weights_scratch(widest), _BLOCKS * 2 * d]
    wide, narrow = x.new_empty(b, t, widest), x.new_empty(2, b, t, d)
    arguments = [*weights], [*kept], to_weights, [*chain(*sizes)], len(heads), b, t, d, int(adds), _BLOCKS, to_x
    _call("branches_backward", gradient, x, *arguments, wide, narrow, _pairs(max(scratch)))
    return [to_x, *to_weights]
