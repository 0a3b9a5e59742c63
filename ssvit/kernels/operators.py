"""The layers of a Transformer in bfloat16 on a CPU, forward and backward, by C that the machine's compiler builds.

torch and oneDNN take longer: they write and read again the tensors between the products of a layer, round weights and
gradients in separate passes, and multiply the shapes of attention at half of the processor's speed. The kernels are
built when the first one is called, in a second, and not stored. Without a compiler or the processor's instructions, for
tensors of other types, shapes or devices, and in exported graphs, `supports_layer_norm` and `supports_matmul` are false
and the callers use torch's. docs/performance.md has the figures.

Letters: b images, q queries, t keys and values, h heads, k width of a head, d = h * k, r rows, i inputs, o outputs.
Tensors are bfloat16 unless said otherwise.
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

# Vectors need sums to be reordered; infinities and NaN keep their meaning.
_REORDERED = "-fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros"
_OPTIONS = f"-O3 -funroll-loops -march=native -fopenmp -fPIC {_REORDERED}"
SOURCES = tuple(sorted((Path(__file__).parent / "csrc").glob("*.c")))
_LANES = 16  # products.h: widths are multiples of it
_DEEP, _GROUP = 1102, 48  # linear.c: what its scratch memory is counted by
_BLOCKS = 32  # of rows, whose parts of a layer norm's gradients are summed apart, so that threads can share the work

T = TypeVar("T")
Argument = Tensor | float | None  # of a kernel


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


@torch.compiler.assume_constant_result
def _has_products() -> bool:
    return hasattr(library(), "linear")


def supports_layer_norm(tensor: Tensor) -> bool:
    """Whether layer norm can take a tensor."""
    if torch.compiler.is_compiling() or not tensor.is_contiguous() or tensor.dtype != torch.bfloat16:
        return False
    return _here(tensor) and library() is not None


def supports_matmul(tensor: Tensor, *widths: int) -> bool:
    """Whether products can take a tensor once it is bfloat16, and these widths of heads, inputs or outputs."""
    if torch.compiler.is_exporting() or any(width % _LANES for width in widths):
        return False
    return _here(tensor) and _has_products()


def _here(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() > 0


def _operator(shapes: Callable[..., object]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Make a function an operator that compiled graphs can call; `shapes` gives empty results of the right shapes."""

    def wrap(function: Callable[..., T]) -> Callable[..., T]:
        operator = torch.library.custom_op(f"ssvit::{function.__name__}", function, mutates_args=(), device_types="cpu")
        operator.register_fake(shapes)

        @functools.wraps(function)
        def call(*arguments: object) -> T:
            # Calling an operator through torch takes as long as a small product.
            return (operator if torch.compiler.is_compiling() else function)(*arguments)

        return call

    return wrap


def _call(kernel: str, *arguments: Argument | Sequence[Argument]) -> None:
    def convert(value: Argument | Sequence[Argument]) -> Any:
        if value is None:
            return ctypes.c_void_p()
        if isinstance(value, Tensor):
            # C would read beyond the end of any other.
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
    """x (r, i), weight (o, i) and bias (o,) float32 -> (r, o)."""
    out = _outputs(x, weight)
    _call("linear", x, weight, bias, None, out, None, 0, *x.shape, len(weight), _pairs(weight.numel() // 2))
    return out


def _inputs(gradient: Tensor, weight: Tensor) -> Tensor:
    assert gradient.shape[1] == len(weight)
    return gradient.new_empty(len(gradient), weight.shape[1])


@_operator(_inputs)
def linear_inputs(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x (r, i) from that of `linear`, (r, o)."""
    out = _inputs(gradient, weight)
    r, o = gradient.shape
    _call("linear_inputs", gradient, weight, None, out, r, out.shape[1], o, _pairs(weight.numel() // 2))
    return out


def _weights_scratch(inputs: int) -> int:
    """Pairs of scratch memory that `linear_weights` needs."""
    return _DEEP // 2 * (inputs + torch.get_num_threads() * _GROUP)


def _weight_and_bias(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    assert len(gradient) == len(x)
    o, i = gradient.shape[1], x.shape[1]
    return gradient.new_empty(o, i, dtype=torch.float32), gradient.new_empty(o, dtype=torch.float32)


@_operator(_weight_and_bias)
def linear_weights(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of weight (o, i) and bias (o,), float32, from that of `linear`, (r, o), and x (r, i)."""
    to_weight, to_bias = _weight_and_bias(gradient, x)
    o, i = to_weight.shape
    _call("linear_weights", gradient, x, to_weight, to_bias, len(x), i, o, _pairs(_weights_scratch(i)))
    return to_weight, to_bias


def _parts(query: Tensor | None, packed: Tensor) -> tuple[Tensor, ...]:
    """Views of queries (b, q, d), keys and values (b, t, d)."""
    return packed.chunk(3, -1) if query is None else (query, *packed.chunk(2, -1))


def _attention_scratch(q: int, t: int, width: int) -> int:
    """Pairs of scratch memory that attention needs."""
    kernels = library()
    assert kernels is not None
    count = kernels.attention_scratch
    count.restype = ctypes.c_int64
    return torch.get_num_threads() * count(*map(ctypes.c_int64, (q, t, width)))


def _heads(query: Tensor, key: Tensor, heads: int) -> tuple[float | Tensor, ...]:
    """b, h, q, t, k, the scale of logits, and scratch memory."""
    (b, q, d), t = query.shape, key.shape[1]
    k = d // heads
    return b, heads, q, t, k, k**-0.5, _pairs(_attention_scratch(q, t, k))


def _attended(query: Tensor | None, packed: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    b, q, d = _parts(query, packed)[0].shape
    return packed.new_empty(b, q, d), packed.new_empty(b, heads, q, 2, dtype=torch.float32)


@_operator(_attended)
def attention(query: Tensor | None, packed: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """packed: queries, keys and values, (b, t, 3 * d); or with query (b, q, d), keys and values alone, (b, t, 2 * d).

    -> (b, q, d), and of each query's logits the largest and its weight, (b, h, q, 2) float32.
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
    """The gradients of query, empty where it is packed, and of packed from that of `attention`, (b, q, d)."""
    to_query, to_packed = _attended_backward(query, packed)
    to = _parts(None if query is None else to_query, to_packed)
    query, key, value = _parts(query, packed)
    inputs = query, query.stride(1), key, value, key.stride(1)
    _call("attention_backward", *inputs, gradient, norms, *to, *_heads(query, key, norms.shape[1]))
    return to_query, to_packed


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x (r, d), weight and bias (d,) float32 -> (r, d), and each row's mean and 1 / deviation, (r, 2) float32."""
    out, moments = torch.empty_like(x), weight.new_empty(len(x), 2)
    _call("norm_forward", x, weight, bias, out, moments, *x.shape, epsilon)
    return out, moments


def layer_norm_backward(x: Tensor, gradient: Tensor, weight: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x (r, d), and of weight and bias (d,) float32."""
    assert x.shape == gradient.shape
    results = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    sums = _pairs(_BLOCKS * 2 * len(weight))
    _call("norm_backward", x, gradient, weight, moments, None, *results, sums, *x.shape, _BLOCKS)
    return results


def _by_branch(tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """The six tensors of each branch: its weights, or what its gradients need."""
    return [tensors[start : start + 6] for start in range(0, len(tensors), 6)]


def _sizes(x: Tensor, weights: Sequence[Tensor], heads: Sequence[int]) -> list[tuple[int, int, int]]:
    """Of each branch the outputs of its first linear layer, the inputs of its second, and its heads."""
    d, sizes = x.shape[-1], []
    for h, (gain, _, weight, _, weight2, _) in zip(heads, _by_branch(weights), strict=True):
        first, second = len(weight), weight2.shape[1]
        assert weight.shape[1] == len(weight2) == len(gain) == d
        assert (first, second) == (3 * d, d) if h else first == second
        sizes.append((first, second, h))
    return sizes


def _branch_scratch(weights: Sequence[Tensor], heads: Sequence[int], t: int, d: int) -> list[int]:
    return [weight.numel() // 2 for weight in weights] + [_attention_scratch(t, t, d // h) for h in set(heads) if h]


# What `branches` returns of each branch; the fourth is None where it is not needed.
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
    """Branches of a Transformer: `layer_norm`, `linear`, `attention` or, where heads are 0, GELU, and `linear`; and the
    branch's input if it `adds` that: x (b, t, d) -> (b, t, d).

    weights: of each branch the weight and bias of the layer norm, of the first and of the second linear layer. If it
    learns, it returns six tensors of each branch: its output, and for the gradients the normalised x (b, t, d), its
    moments (b, t, 2) float32, queries, keys and values (b, t, 3 * d) or GELU's slopes (b, t, o), the second linear
    layer's input (b, t, i), and the second result of `attention`. Else it returns the last output.
    """
    assert adds or len(heads) == 1
    (b, t, d), sizes = x.shape, _sizes(x, weights, heads)
    if learns:
        kept = [_kept(x, *size, True) for size in sizes]
    else:
        # Branches of one size share memory: each number is read before another is written over it.
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
    """The gradients of x (b, t, d) and of the weights, float32, from that of `branches`, (b, t, d), and its results."""
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
