"""Random numbers as a pure function of (seed, kind, slot, view): no state to save, the same on every device.

A slot numbers an image in the order of training: slot = step * batch_size + place in the global batch. All that is
random about the image is hashed from its slot, so it is the same for any number of workers or processes and after any
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


def key(seed: int, kind: str, view: int = 0) -> int:
    """A 63-bit integer of the seed, its use and the view, so that no two of these share numbers."""
    text = f"{seed}/{kind}" + (f"\0{view}" if view else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def uniform(seed: int, kind: str, slots: Tensor, count: int, view: int = 0) -> Tensor:
    """Numbers uniform in [0, 1): slots (b,) int64 -> (b, count) float64, on the device of `slots`."""
    place = torch.arange(1, count + 1, device=slots.device) * _GOLDEN
    start = _mix(key(seed, kind, view) + slots * _GOLDEN)
    return _shift(_mix(start[:, None] + place), 11).double() * 2.0**-53


def permutation(seed: int, kind: str, size: int) -> Tensor:
    """A random order of range(size): (size,) int64."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(key(seed, kind)))
