"""Random numbers as a pure function of (seed, kind, slot, view): no state to save, the same on every device.

A slot numbers an image in the order of training: slot = step * batch_size + position in the global batch. Everything
random about the image is a hash of its slot, so it is the same for any number of workers or processes and after any
restart. The views of one image are numbered from 0.

Letters: b slots, k numbers a slot.
"""

import hashlib

import torch
from torch import Tensor

# splitmix64 (Steele, Lea, Flood 2014), its constants written as the signed 64-bit integers that torch has.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: the mask takes out the sign bits that torch shifts in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX[0]
    x = (x ^ _shift(x, 27)) * _MIX[1]
    return x ^ _shift(x, 31)


@torch.compiler.assume_constant_result  # or the hash would break a compiled graph
def key(seed: int, kind: str, view: int = 0) -> int:
    """A 63-bit integer of the seed, its use and the view, so that no two of these share numbers."""
    text = f"{seed}/{kind}" + (f"\0{view}" if view else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def uniform(seed: int, kind: str, slots: Tensor, count: int, view: int = 0) -> Tensor:
    """Numbers uniform in [0, 1): slots (b,) int64 -> (b, count) float64, on the device of `slots`."""
    # ~k is -(k + 1). Of k + 1 itself torch's compiler makes a product too large for 64 bits, where it must wrap.
    place = ~torch.arange(count, device=slots.device) * -_GOLDEN
    start = _mix(key(seed, kind, view) + slots * _GOLDEN)
    return _shift(_mix(start[:, None] + place), 11).double() * 2.0**-53


def permutation(seed: int, kind: str, size: int) -> Tensor:
    """A random order of range(size): (size,) int64."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(key(seed, kind)))


_ROUNDS = 8  # of the network: every part is mixed four times


def bijection(seed: int, kind: str, places: Tensor, size: int) -> Tensor:
    """The elements at some places of a random order of range(size): (b,) int64 -> (b,) int64, without a table of all.

    A Feistel network permutes the numbers below the least power of two that is not below `size`. A result outside the
    range goes through it again until it is inside (cycle walking; Black and Rogaway 2002).
    """
    bits = max(2, (size - 1).bit_length())
    low = bits // 2
    masks = (1 << bits - low) - 1, (1 << low) - 1
    keys = [key(seed, kind, turn) for turn in range(_ROUNDS)]

    def permuted(numbers: Tensor) -> Tensor:
        high_part, low_part = numbers >> low, numbers & masks[1]
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            high_part = high_part ^ (_mix(first + low_part * _GOLDEN) & masks[0])
            low_part = low_part ^ (_mix(second + high_part * _GOLDEN) & masks[1])
        return high_part << low | low_part

    found = permuted(places)
    while (outside := found >= size).any():
        found[outside] = permuted(found[outside])
    return found
