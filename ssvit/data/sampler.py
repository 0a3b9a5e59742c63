"""Map training steps to images by slots, which are positions in the training order.

Step s of a run holds slots s * batch_size to (s + 1) * batch_size - 1. Slot t shows image t % size of the order of
epoch t // size. So every image comes once in an epoch, batches may straddle epochs, and resuming at any step needs no
sampler state. With repeated augmentation, several slots of a batch have one position in this order (`positions`).

Letters: b slots.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ssvit.data.sources.base_options import BIJECTION, PERMUTATION
from ssvit.engine.randomness import bijection, permutation

_permutation = lru_cache(maxsize=4)(permutation)  # successive batches share an epoch


def indices(slots: Tensor, *, size: int, seed: int, order: str = PERMUTATION) -> Tensor:
    """Return the image index of each slot, a function of (seed, slot) alone.

    Args:
        slots: (b,) int64.
        size: Number of images.
        seed: Seed of the run.
        order: Algorithm of an epoch's order. permutation: a table of all images; bijection: computed for each slot.

    Returns:
        (b,) int64 in [0, size).
    """
    epochs, positions = slots.div(size, rounding_mode="floor"), slots.remainder(size)
    shown = torch.empty_like(slots)
    for epoch in epochs.unique().tolist():
        of_epoch, purpose = epochs == epoch, f"order of epoch {epoch}"
        if order == BIJECTION:
            shown[of_epoch] = bijection(seed, purpose, positions[of_epoch], size)
        else:
            shown[of_epoch] = _permutation(seed, purpose, size)[positions[of_epoch]]
    return shown


def slots(step: int, micro: int, *, batch_size: int, accumulate: int = 1, rank: int = 0, world: int = 1) -> Tensor:
    """Return the slots of one micro-batch on one process.

    Process `rank` takes a contiguous part of the global batch, and micro-batch `micro` a contiguous part of that.

    Args:
        step: Training step, from 0.
        micro: Micro-batch within the step, from 0.
        batch_size: Global batch size.
        accumulate: Micro-batches per step.
        rank: Rank of this process.
        world: Number of processes.

    Returns:
        (batch_size / (world * accumulate),) int64.
    """
    count = batch_size // (world * accumulate)
    start = step * batch_size + (rank * accumulate + micro) * count
    return torch.arange(start, start + count)


def positions(slots: Tensor, *, batch_size: int, repeats: int) -> Tensor:
    """Return the positions of slots in the order of images if each image comes `repeats` times in succession.

    In a batch, the first copies of all images precede the second ones, so that neighbours, which MixUp and CutMix
    combine, are different images. If `repeats` does not divide the batch size, the copies of one image at each end of a
    batch are in two batches, as with DeiT's sampler (deit: samplers.py).

    Args:
        slots: (b,) int64.
        batch_size: Global batch size.
        repeats: Copies of each image.

    Returns:
        (b,) int64, which `indices` maps to images.
    """
    order = torch.arange(batch_size).remainder(repeats).argsort(stable=True)
    places = slots.remainder(batch_size)
    return (slots - places + order[places]).div(repeats, rounding_mode="floor")
