"""Compute the layers of a Transformer in bfloat16 on a CPU, forward and backward, by C compiled on the machine.

torch and oneDNN take longer: they write and read the tensors between the products of a layer, round weights and
gradients in separate passes, and multiply the shapes of attention at half of the processor's speed. The kernels are
compiled at the first call, in about a second, and not stored. Without a compiler or the required instructions, for
tensors of other types, shapes or devices, and in exported graphs, `supports_layer_norm` and `supports_matmul` return
False and the callers use torch. docs/performance.md has the figures.

Letters: b images, q queries, t keys and values, h heads, k width of a head, d = h * k, r rows, i inputs, o outputs.
Tensors are bfloat16 unless stated otherwise.
"""

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

# Vectorisation requires reordered sums; infinities and NaNs keep their semantics.
_REORDERED = "-fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros"
_OPTIONS = f"-O3 -funroll-loops -march=native -fopenmp -fPIC {_REORDERED}"
SOURCES = tuple(sorted((Path(__file__).parent / "csrc").glob("*.c")))
_LANES = 16  # products.h: widths must be multiples of this
_DEEP, _GROUP = 1102, 48  # linear.c: sizes that determine its scratch memory
_BLOCKS = 32  # blocks of rows whose gradients of a layer norm are summed separately, for threads

T = TypeVar("T")
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


@torch.compiler.assume_constant_result
def _has_products() -> bool:
    return hasattr(library(), "linear")


def supports_layer_norm(tensor: Tensor) -> bool:
    """Return whether the layer norm kernel supports a tensor."""
    if torch.compiler.is_compiling() or not tensor.is_contiguous() or tensor.dtype != torch.bfloat16:
        return False
    return _here(tensor) and library() is not None


def supports_matmul(tensor: Tensor, *widths: int) -> bool:
    """Return whether products support a tensor, converted to bfloat16, and widths of heads, inputs or outputs."""
    if torch.compiler.is_exporting() or any(width % _LANES for width in widths):
        return False
    return _here(tensor) and _has_products()


def _here(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() > 0


def _operator(shapes: Callable[..., object]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Register a function as an operator for compiled graphs; `shapes` returns empty results of the same shapes."""

    def wrap(function: Callable[..., T]) -> Callable[..., T]:
        operator = torch.library.custom_op(f"ssvit::{function.__name__}", function, mutates_args=(), device_types="cpu")
        operator.register_fake(shapes)

        @functools.wraps(function)
        def call(*arguments: object) -> T:
            # Dispatching an operator through torch takes as long as a small product.
            return (operator if torch.compiler.is_compiling() else function)(*arguments)

        return call

    return wrap


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


def _outputs(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    assert x.shape[1] == weight.shape[1]
    return x.new_empty(len(x), len(weight))


@_operator(_outputs)
def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply a linear layer.

    Args:
        x: Inputs, (r, i).
        weight: Weight, (o, i) float32.
        bias: Bias, (o,) float32.

    Returns:
        Outputs, (r, o).
    """
    out = _outputs(x, weight)
    _call("linear", x, weight, bias, None, out, None, 0, *x.shape, len(weight), _pairs(weight.numel() // 2))
    return out


def _inputs(gradient: Tensor, weight: Tensor) -> Tensor:
    assert gradient.shape[1] == len(weight)
    return gradient.new_empty(len(gradient), weight.shape[1])


@_operator(_inputs)
def linear_inputs(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the inputs of `linear`, (r, i), from that of its outputs, (r, o)."""
    out = _inputs(gradient, weight)
    r, o = gradient.shape
    _call("linear_inputs", gradient, weight, None, out, r, out.shape[1], o, _pairs(weight.numel() // 2))
    return out


def _weights_scratch(inputs: int) -> int:
    """Return the size of the scratch memory of `linear_weights`, in pairs of bfloat16."""
    return _DEEP // 2 * (inputs + torch.get_num_threads() * _GROUP)


def _weight_and_bias(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    assert len(gradient) == len(x)
    o, i = gradient.shape[1], x.shape[1]
    return gradient.new_empty(o, i, dtype=torch.float32), gradient.new_empty(o, dtype=torch.float32)


@_operator(_weight_and_bias)
def linear_weights(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight (o, i) and bias (o,), float32, from that of the outputs (r, o) and x (r, i)."""
    to_weight, to_bias = _weight_and_bias(gradient, x)
    o, i = to_weight.shape
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


def _attended(query: Tensor | None, packed: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    b, q, d = _parts(query, packed)[0].shape
    return packed.new_empty(b, q, d), packed.new_empty(b, heads, q, 2, dtype=torch.float32)


@_operator(_attended)
def attention(query: Tensor | None, packed: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Compute attention.

    Args:
        query: Queries, (b, q, d); None: `packed` contains them.
        packed: Queries, keys and values, (b, t, 3 * d), or with `query` keys and values, (b, t, 2 * d).
        heads: Number of heads.

    Returns:
        Outputs, (b, q, d), and the maximum logit of each query with its weight, (b, h, q, 2) float32.
    """
    out, norms = _attended(query, packed, heads)
    query, key, value = _parts(query, packed)
    inputs = query, query.stride(1), key, value, key.stride(1)
    _call("attention", *inputs, out, norms, *_heads(query, key, heads))
    return out, norms


def _attended_backward(query: Tensor | None, packed: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return packed.new_empty(0) if query is None else torch.empty_like(query), torch.empty_like(packed)


@_operator(_attended_backward)
def attention_backward(query: Tensor | None, packed: Tensor, gradient: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the inputs of `attention`.

    Args:
        query: Queries, (b, q, d), or None.
        packed: The packed projections.
        gradient: Gradient of the outputs, (b, q, d).
        norms: Second result of `attention`.

    Returns:
        Gradients of query (empty if None) and packed.
    """
    to_query, to_packed = _attended_backward(query, packed)
    to = _parts(None if query is None else to_query, to_packed)
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


def _results(kept: Sequence[Kept]) -> list[Tensor]:
    return [part for parts in kept for part in parts if part is not None]


def _branched(
    x: Tensor, weights: Sequence[Tensor], heads: Sequence[int], epsilon: float, adds: bool, learns: bool
) -> list[Tensor]:
    sizes = _sizes(x, weights, heads)
    return _results([_kept(x, *size, True) for size in sizes]) if learns else [torch.empty_like(x)]


@_operator(_branched)
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
    return _results(kept) if learns else [kept[-1][0]]


def _branched_backward(gradient: Tensor, x: Tensor, weights: Sequence[Tensor], *_: object) -> list[Tensor]:
    return [torch.empty_like(x), *map(torch.empty_like, weights)]


@_operator(_branched_backward)
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
    results = to_x, *to_weights = _branched_backward(gradient, x, weights)
    heads = [norms.shape[1] for *_, norms in _by_branch(kept)]
    (b, t, d), sizes = x.shape, _sizes(x, weights, heads)
    widest = max(chain(*sizes))
    scratch = [*_branch_scratch(weights, heads, t, d), _weights_scratch(widest), _BLOCKS * 2 * d]
    wide, narrow = x.new_empty(b, t, widest), x.new_empty(2, b, t, d)
    arguments = [*weights], [*kept], to_weights, [*chain(*sizes)], len(heads), b, t, d, int(adds), _BLOCKS, to_x
    _call("branches_backward", gradient, x, *arguments, wide, narrow, _pairs(max(scratch)))
    return results
