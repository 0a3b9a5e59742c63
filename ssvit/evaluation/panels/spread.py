"""How far the features of images differ from one another, for evaluations that look for a collapse.

Letters: n images, d numbers of a feature.
"""

from collections.abc import Mapping

from torch import Tensor

_LEAST_DEVIATION = 0.1  # of the features: less is a collapse, where the mean cosine of two images is above 0.99


def spread_of(features: Tensor) -> dict[str, float]:
    """Return how far features of length 1, (n, d), differ from image to image."""
    n, center = len(features), features.double().mean(0)
    deviation = (features.double() - center).square().mean(0).sum().sqrt()
    # Of each number of a feature, times the square root of d: 1 where features go in all directions alike.
    cosine = (n * center.square().sum() - 1) / (n - 1)
    return {"feature_std": deviation.item(), "feature_cosine": cosine.item()}


def describe_spread(metrics: Mapping[str, float], what: str = "images") -> str:
    """Return the numbers of `spread_of` in words."""
    return (
        f"features: standard deviation {metrics['feature_std']:.2f} (1: in all directions alike), mean cosine of two "
        f"{what} {metrics['feature_cosine']:.2f}"
    )


def one_way(metrics: Mapping[str, float]) -> list[str]:
    """Return the sign that features have collapsed, if they have."""
    if metrics["feature_std"] >= _LEAST_DEVIATION:
        return []
    return [f"all features point one way (standard deviation below {_LEAST_DEVIATION})"]
