"""Measure the spread of features over images, for evaluations that detect a collapse.

Shapes use n images, d width.
"""

from collections.abc import Mapping

from torch import Tensor

_LEAST_DEVIATION = 0.1  # collapse threshold, at which the mean cosine of two images is 0.99


def spread_of(features: Tensor) -> dict[str, float]:
    """Return the standard deviation and the mean cosine similarity of features of unit length, (n, d)."""
    n, center = len(features), features.double().mean(0)
    deviation = (features.double() - center).square().mean(0).sum().sqrt()
    # The standard deviation of a feature times the square root of d is 1 for isotropic features.
    cosine = (n * center.square().sum() - 1) / (n - 1)
    return {"feature_std": deviation.item(), "feature_cosine": cosine.item()}


def describe_spread(metrics: Mapping[str, float], what: str = "images") -> str:
    """Return a line with the values of `spread_of`."""
    return (
        f"features: standard deviation {metrics['feature_std']:.2f} (1: in all directions alike), mean cosine of two "
        f"{what} {metrics['feature_cosine']:.2f}"
    )


def one_way(metrics: Mapping[str, float]) -> list[str]:
    """Return a sentence if the features have collapsed to one direction, or an empty list."""
    if metrics["feature_std"] >= _LEAST_DEVIATION:
        return []
    return [f"all features point one way (standard deviation below {_LEAST_DEVIATION})"]
