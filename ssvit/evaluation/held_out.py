"""Held-out images that an evaluator looks at with the same random choices each time.

Letters: b images, c channels, h, w pixels.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssvit.data.loader import evaluation_batches
from ssvit.evaluation import options
from ssvit.evaluation.base import Evaluator
from ssvit.objectives.base import Objective
from ssvit.options import UserError

_SHOWN = 12  # images in a mosaic


class HeldOut(options.HeldOut, Evaluator):
    """An evaluator of some images of a source, always the same."""

    def __init__(self, *, source: Any, transform: Any, **given: Any) -> None:
        super().__init__(**given)
        self.source, self.transform = source, transform

    @cached_property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """The images as bytes, (b, c, h, w), and their slots (b,), read once."""
        read = evaluation_batches(self.source, self.transform, batch_size=self.batch_size, limit=self.images)
        batches = [(batch.images, batch.slots) for batch in read]
        if not batches:
            raise UserError("none of the held-out images can be read, so there is nothing to evaluate on")
        return batches

    @property
    def shown(self) -> tuple[Tensor, Tensor]:
        """Images and slots of a few of them, spread over all, since files come sorted by class."""
        images, slots = (torch.cat(parts) for parts in zip(*self.batches, strict=True))
        chosen = torch.linspace(0, len(images) - 1, min(_SHOWN, len(images))).long()
        return images[chosen], slots[chosen]

    def sampled(self, objective: Objective, images: Tensor, slots: Tensor) -> tuple[Tensor, Any]:
        """Images and the objective's random choices about them, on the model's device."""
        device = objective.encoder.mean.device
        noise = objective.sample(slots, seed=self.seed)
        return images.to(device), type(noise)(*(choice.to(device) for choice in noise))
