"""Define the base class of evaluators that use the same held-out images at each evaluation, and their common measures.

Shapes use b images of a batch, n images, c channels, h, w pixels, d width.
"""

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ssvit.data.batch import EvalTransform
from ssvit.data.loader import evaluation_batches
from ssvit.data.sources.base import Source
from ssvit.errors import UserError
from ssvit.evaluation.evaluators.base import PlottingEvaluator
from ssvit.evaluation.evaluators.options import HeldOut as HeldOutOptions
from ssvit.figures.display import PLAIN, Display

_SHOWN = 12  # images in a mosaic
LEAST_DEVIATION = 0.1  # collapse threshold of features, at which the mean cosine of two images is 0.99


class HeldOut(PlottingEvaluator):
    """Evaluate on some held-out images of a source, at least `fewest`."""

    fewest = 1

    def __init__(
        self, options: HeldOutOptions, *, source: Source, transform: EvalTransform, display: Display = PLAIN
    ) -> None:
        self.source, self.transform, self.display, self.options = source, transform, display, options
        self.images = min(options.images, len(source))

    @cached_property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return batches of images (b, c, h, w) uint8 and slots (b,), which are read once.

        Raises:
            UserError: If fewer than `fewest` images are readable.
        """
        read = evaluation_batches(
            self.source, self.transform, batch_size=self.options.batch_size, limit=self.options.images
        )
        batches = [(batch.images, batch.slots) for batch in read]
        if (count := sum(len(slots) for _, slots in batches)) < self.fewest:
            raise UserError(f"{count} held-out images can be read; the evaluation requires at least {self.fewest}")
        return batches

    def trial(self, objective: Any, images: int) -> int:
        """Evaluate a part of the first batch."""
        few = copy.copy(self)
        few.batches = [(pixels[:images], slots[:images]) for pixels, slots in self.batches[:1]]
        few(objective)
        return len(few.batches[0][1])

    @property
    def shown(self) -> tuple[Tensor, Tensor]:
        """Return images and slots for a mosaic, spread evenly over the batches because files are sorted by class."""
        images, slots = (torch.cat(parts) for parts in zip(*self.batches, strict=True))
        chosen = torch.linspace(0, len(images) - 1, min(_SHOWN, len(images))).long()
        return images[chosen], slots[chosen]

    def sampled(self, objective: Any, images: Tensor, slots: Tensor) -> tuple[Tensor, Any]:
        """Return images and the random choices of the objective for them, on the device of the model.

        Args:
            objective: The objective.
            images: Images, (b, c, h, w).
            slots: Slots of the images, (b,).
        """
        device = objective.encoder.mean.device
        noise = objective.sample(slots, seed=self.options.seed)
        return images.to(device), type(noise)(*(choice.to(device) for choice in noise))


def spread_of(features: Tensor) -> dict[str, float]:
    """Return the standard deviation and the mean cosine similarity of features of unit length, (n, d)."""
    n, center = len(features), features.double().mean(0)
    deviation = (features.double() - center).square().mean(0).sum().sqrt()
    # The standard deviation of a feature times the square root of d is 1 for isotropic features.
    cosine = (n * center.square().sum() - 1) / (n - 1)
    return {"feature_std": deviation.item(), "feature_cosine": cosine.item()}


def describe_spread(metrics: Mapping[str, float], items: str = "images") -> str:
    """Return a line with the values of `spread_of`."""
    return (
        f"standard deviation of the features {metrics['feature_std']:.2f} (isotropic features: 1), "
        f"mean cosine similarity of two {items} {metrics['feature_cosine']:.2f}"
    )


def collapsed_features(metrics: Mapping[str, float]) -> list[str]:
    """Return a sentence if the features have collapsed to one direction, or an empty list."""
    if metrics["feature_std"] >= LEAST_DEVIATION:
        return []
    return [f"all features have nearly the same direction (standard deviation below {LEAST_DEVIATION})"]
