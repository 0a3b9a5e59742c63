"""Which images at which step: a slot numbers an image in the order of training, and everything follows from the slot.

Step s of a run holds slots s * batch_size ... (s + 1) * batch_size - 1. Slot t shows image t % size of the order
of epoch t // size, so every image comes once an epoch, batches may straddle epochs, and nothing has to be saved to
go on from any step.

Letters: b slots.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ssvit.data.sources.base_options import BIJECTION, ORDERS, PERMUTATION, check_shares
from ssvit.options import OptionError, one_of, whole
from ssvit.randomness import bijection, permutation


def _kind(epoch: int) -> str:
    return f"order of epoch {epoch}"


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, size: int) -> Tensor:
    return permutation(seed, _kind(epoch), size)


def indices(slots: Tensor, *, size: int, seed: int, order: str = PERMUTATION) -> Tensor:
    """The image that each slot shows: slots (b,) int64 -> (b,) int64 in [0, size), a function of (seed, slot) alone.

    order: how an epoch's order is made. permutation: as a table of all images. bijection: computed for each slot.
    """
    epochs, places = slots.div(size, rounding_mode="floor"), slots.remainder(size)
    shown = torch.empty_like(slots)
    for epoch in epochs.unique().tolist():
        of_epoch = epochs == epoch
        if order == BIJECTION:
            shown[of_epoch] = bijection(seed, _kind(epoch), places[of_epoch], size)
        else:
            shown[of_epoch] = _order(seed, epoch, size)[places[of_epoch]]
    return shown


def slots(step: int, micro: int, *, batch_size: int, accumulate: int = 1, rank: int = 0, world: int = 1) -> Tensor:
    """The slots of one micro-batch: (batch_size / (world * accumulate),) int64.

    Process `rank` of `world` takes its contiguous part of the global batch, and micro-batch `micro` of `accumulate`
    its contiguous part of that.
    """
    count = batch_size // (world * accumulate)
    start = step * batch_size + (rank * accumulate + micro) * count
    return torch.arange(start, start + count)


def check(*, batch_size: int, accumulate: int, world: int, size: int, order: str = PERMUTATION) -> None:
    """OptionError if the global batch cannot be split evenly or holds more images than there are, or for `order`."""
    one_of("order", order, ORDERS)
    whole("batch_size", batch_size)
    whole("accumulate", accumulate)
    check_shares(batch_size=batch_size, accumulate=accumulate, processes=world)
    if batch_size > size:
        raise OptionError("batch_size", batch_size, f"must be no more than the {size} images to train on")
