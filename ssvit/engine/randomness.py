"""Compute random numbers as a pure function of (seed, kind, slot, view), without state and identical on every device.

A slot numbers an image in the order of training: slot = step * batch_size + position in the global batch. All random
choices for an image are hashes of its slot, and therefore independent of the number of workers and processes and of
restarts. The views of one image are numbered from 0.

Letters: b slots, k numbers per slot.
"""

import hashlib

import torch
from torch import Tensor

from ssvit.engine import private

# splitmix64 (Steele, Lea, Flood 2014), with constants as signed 64-bit integers, since torch lacks unsigned arithmetic.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Return the logical right shift: the mask removes the sign bits of torch's arithmetic shift."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX[0]
    x = (x ^ _shift(x, 27)) * _MIX[1]
    return x ^ _shift(x, 31)


@private.constant_in_graphs  # the hash would otherwise break a compiled graph
def key(seed: int, purpose: str, view: int = 0) -> int:
    """Return a 63-bit hash of seed, purpose and view, so that their random numbers are independent.

    Args:
        seed: Seed of the run.
        purpose: Use of the random numbers.
        view: Number of the view.
    """
    text = f"{seed}/{purpose}" + (f"\0{view}" if view else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def uniform(seed: int, purpose: str, slots: Tensor, count: int, view: int = 0) -> Tensor:
    """Return random numbers uniform in [0, 1).

    Args:
        seed: Seed of the run.
        purpose: Use of the random numbers.
        slots: (b,) int64.
        count: Numbers per slot, k.
        view: Number of the view.

    Returns:
        (b, k) float64, on the device of `slots`.
    """
    # ~k is -(k + 1). For k + 1, torch's compiler would compute a product beyond 64 bits, which must wrap around.
    offsets = ~torch.arange(count, device=slots.device) * -_GOLDEN
    start = _mix(key(seed, purpose, view) + slots * _GOLDEN)
    return _shift(_mix(start[:, None] + offsets), 11).double() * 2.0**-53


def permutation(seed: int, purpose: str, size: int) -> Tensor:
    """Return a random permutation of range(size).

    Args:
        seed: Seed of the run.
        purpose: Use of the permutation.
        size: Number of elements.

    Returns:
        (size,) int64.
    """
    return torch.randperm(size, generator=torch.Generator().manual_seed(key(seed, purpose)))


_ROUNDS = 8  # rounds of the Feistel network: each half is mixed four times


def bijection(seed: int, purpose: str, positions: Tensor, size: int) -> Tensor:
    """Return elements of a random permutation of range(size) without computing all of it.

    A Feistel network permutes the integers below the smallest power of two that is at least `size`. Results outside the
    range are permuted again until they are inside (cycle walking; Black and Rogaway 2002).

    Args:
        seed: Seed of the run.
        purpose: Use of the permutation.
        positions: Positions in the permutation, (b,) int64.
        size: Number of elements.

    Returns:
        (b,) int64.
    """
    bits = max(2, (size - 1).bit_length())
    low = bits // 2
    masks = (1 << bits - low) - 1, (1 << low) - 1
    keys = [key(seed, purpose, turn) for turn in range(_ROUNDS)]

    def permuted(numbers: Tensor) -> Tensor:
        high_part, low_part = numbers >> low, numbers & masks[1]
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            high_part = high_part ^ (_mix(first + low_part * _GOLDEN) & masks[0])
            low_part = low_part ^ (_mix(second + high_part * _GOLDEN) & masks[1])
        return high_part << low | low_part

    elements = permuted(positions)
    while (outside := elements >= size).any():
        elements[outside] = permuted(elements[outside])
    return elements
