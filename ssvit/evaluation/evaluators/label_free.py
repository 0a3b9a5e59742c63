"""Measure features without labels, by their spectrum on held-out images at each layer.

RankMe (Garrido et al. 2023, arXiv 2210.02885): effective rank of the features.
Spread: standard deviation of features of unit length, and mean cosine similarity of two images.

RankMe does not subtract the mean feature, which dominates for reconstruction objectives; it is therefore reported with
and without the mean. Neither measure reliably predicts accuracy: see docs/evaluation.md for measurements.

Shapes use n images, d width.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.evaluation.evaluators.base import Evaluation
from ssvit.evaluation.evaluators.held_out import HeldOut, spread_of
from ssvit.evaluation.evaluators.options import LabelFree as LabelFreeOptions
from ssvit.evaluation.features import Frozen
from ssvit.evaluation.options import AUTO
from ssvit.evaluation.options import Features as FeaturesOptions
from ssvit.figures.plot import History
from ssvit.objectives.base import Objective

_EPSILON = 1e-7  # added to each normalised singular value
_LEAST_DEVIATION = 0.02  # of features of unit length, below which they count as collapsed
_LEAST_SHARE = 0.25  # of the highest centred RankMe so far, below which features count as collapsed


class LabelFree(HeldOut):
    """Evaluate the backbone of any objective after each layer and the final norm, with the pooling of the encoder.

    Args:
        options: Options of the evaluation.
        automatic: Steps between two evaluations with every=auto; None for recipe.evaluate_every.
        images: Arguments of `HeldOut`.
    """

    def __init__(self, options: LabelFreeOptions, *, automatic: int | None = None, **images: Any) -> None:
        super().__init__(options, **images)
        self.every = automatic if options.every == AUTO else options.every

    def __call__(self, objective: Objective, history: History | None = None) -> Evaluation:
        """Return each measure at the last layer, and at each layer with names such as "rankme_layer3".

        A single image gives no metrics. The result has a warning if the features collapse.
        """
        if sum(len(images) for images, _ in self.batches) < 2:
            return Evaluation(metrics={}, lines=["not measured: requires at least two held-out images"])
        encoder = objective.backbone()
        specs = FeaturesOptions(layer="all").specs(encoder.arguments)
        frozen, device = Frozen(encoder, specs, identity=""), next(encoder.parameters()).device
        parts = [frozen(images.to(device)) for images, _ in self.batches]
        metrics: dict[str, float] = {}
        for spec in specs:
            of_layer = measure(torch.cat([part[spec.name].cpu() for part in parts]).double())
            metrics |= {f"{name}_layer{spec.layer}": value for name, value in of_layer.items()} | of_layer
        if history is None:
            return Evaluation(metrics=metrics)
        return Evaluation(metrics=metrics, warnings=warn(metrics, history))


def measure(features: Tensor) -> dict[str, float]:
    """Return all measures of features (n, d) float64 by name; NaN if features are not finite."""
    if not features.isfinite().all():
        return dict.fromkeys(measure(torch.zeros_like(features)), math.nan)
    ranks = {"rankme": rankme(features), "rankme_centered": rankme(features - features.mean(0))}
    return ranks | spread_of(F.normalize(features, dim=1))


def rankme(features: Tensor) -> float:
    """Return the effective rank: the exponential of the entropy of the normalised singular values of features (n, d).

    The value is in [1, min(n, d)] (Roy and Vetterli 2007).
    """
    singular = torch.linalg.svdvals(features)
    shares = singular / singular.sum().clamp(min=torch.finfo(singular.dtype).tiny) + _EPSILON
    return torch.special.entr(shares).sum().exp().item()


def warn(metrics: Mapping[str, float], history: History) -> list[str]:
    """Return a warning if the features have collapsed to one direction or to few directions, or an empty list."""
    signs = []
    if math.isnan(metrics["feature_std"]):
        return ["the features are not finite"]
    if metrics["feature_std"] < _LEAST_DEVIATION:
        signs.append(f"their standard deviation is {metrics['feature_std']:.3f}, below {_LEAST_DEVIATION}")
    rank = metrics["rankme_centered"]
    earlier = [(value, row["step"]) for row in history if (value := row.get("rankme_centered")) is not None]
    highest, step = max(earlier, key=lambda pair: pair[0], default=(0.0, 0))
    if rank < _LEAST_SHARE * highest:
        limit = f"below {100 * _LEAST_SHARE:.0f} % of its highest value, {highest:.1f} at step {step}"
        signs.append(f"their RankMe without the mean is {rank:.1f}, {limit}")
    return [f"the features COLLAPSE: {'; '.join(signs)}"] if signs else []
