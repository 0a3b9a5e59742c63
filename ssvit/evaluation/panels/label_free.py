"""Measure features without labels, by their spectrum on held-out images at each layer.

RankMe (Garrido et al. 2023, arXiv 2210.02885): effective rank of the features.
LiDAR (Thilak et al. 2024, arXiv 2312.04000): effective rank of the variance between images, relative to that between
crops of an image.
alpha-ReQ (Agrawal et al. 2022, NeurIPS): exponent of the power-law decay of the eigenvalues of the covariance.
Spread: standard deviation of features of unit length, and mean cosine similarity of two images.

RankMe does not subtract the mean feature, which dominates for reconstruction objectives; it is therefore reported with
and without the mean. No measure reliably predicts accuracy: see docs/evaluation.md for measurements.

Shapes use n images, v crops of each, d width, c channels, h, w pixels.
"""

import math
import re
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.augment.crop import InceptionCrop
from ssvit.data.batch import EvalTransform
from ssvit.data.sources.base import Source
from ssvit.evaluation import features_options
from ssvit.evaluation.features import Frozen
from ssvit.evaluation.panels import label_free_options
from ssvit.evaluation.panels.base import Evaluation, with_metrics
from ssvit.evaluation.panels.held_out import HeldOut
from ssvit.evaluation.panels.spread import describe_spread, spread_of
from ssvit.figures.plot import DASHED, History, Line, Panel, Plot, curve, spread
from ssvit.objectives.base import Objective

_EPSILON = 1e-7  # added to each normalised singular value in RankMe and LiDAR
_DELTA = 1e-4  # added to the within-image variances in LiDAR
_FIRST, _LAST = 5, 100  # ranks, counted from 1, of the eigenvalues to which the line of alpha-ReQ is fitted
_ALIKE = 0.02  # standard deviation of features of unit length, below which they count as collapsed
_LEFT = 0.25  # fraction of the highest centred RankMe so far, below which features count as collapsed
_PROBES = re.compile(r"probe/[a-z_]+\d*")  # names of the accuracies at the chosen layer in the metrics of a run
_FINE = (
    f"no collapse: RankMe without the mean is not below {100 * _LEFT:.0f} % of its highest value so far, nor the "
    f"standard deviation of the features below {_ALIKE}"
)
TITLES = {"rankme": "RankMe", "rankme_centered": "RankMe without the mean", "lidar": "LiDAR", "alpha": "alpha-ReQ"}
_FEWEST = 5  # minimum number of evaluations for the rank correlation of a measure with a probe


class LabelFree(HeldOut):
    """Evaluate the backbone of any objective after each layer and the final norm, with the pooling of the encoder."""

    options: label_free_options.LabelFree

    def __init__(self, options: label_free_options.LabelFree, *, source: Source, transform: EvalTransform) -> None:
        super().__init__(options, source=source, transform=transform)
        self.set_interval(options.every)
        self.images *= 1 + options.views

    def __call__(self, objective: Objective, history: History | None = None) -> Evaluation:
        """Return each measure at the last layer, and at each layer with names such as "rankme_layer3".

        A single image gives no metrics. The result has a warning if the features collapse, or else a line stating that
        they do not. Figure: `label_free`, the measures over steps and layers. Table: label_free.md, the measures in
        sentences.
        """
        if sum(len(slots) for _, slots in self.batches) < 2:
            return Evaluation(metrics={}, lines=["not measured, which needs two held-out images or more"])
        encoder = objective.backbone()
        readings = features_options.Features(layer="all").readings(encoder.arguments)
        frozen, device = Frozen(encoder, readings, identity=""), next(encoder.parameters()).device
        crops: InceptionCrop | None = None
        found: dict[str, list[Tensor]] = {reading.name: [] for reading in readings}
        for images, slots in self.batches:
            size = (images.shape[2], images.shape[3])
            crops = crops or InceptionCrop(size=size, scale=self.options.scale, ratio=(3 / 4, 4 / 3))
            views = [images, *(crops(images, slots, self.options.seed, view) for view in range(self.options.views))]
            for name, values in frozen(torch.cat(views).to(device)).items():
                found[name].append(values.cpu().unflatten(0, (len(views), -1)))
        metrics: dict[str, float] = {}
        for reading in readings:
            features = torch.cat(found[reading.name], 1).double()
            own = measure(features[0], features[1:])
            metrics |= {f"{name}_layer{reading.layer}": value for name, value in own.items()} | own
        if history is None:
            return Evaluation(metrics=metrics)
        warnings = warn(metrics, history)
        return Evaluation(
            metrics=metrics,
            lines=[] if warnings else [_FINE],
            warnings=warnings,
            tables={"label_free.md": "".join(f"- {line}\n" for line in describe(metrics, history))},
            figures={"label_free": plot(with_metrics(history, metrics), len(readings))},
        )


def measure(features: Tensor, crops: Tensor) -> dict[str, float]:
    """Return all measures of features.

    Args:
        features: Features, (n, d) float64.
        crops: Features of crops of the same images, (v, n, d) float64.

    Returns:
        Measures by name: without LiDAR if v < 2, without alpha-ReQ for fewer than 15 images; NaN if features are not
        finite.
    """
    if not (features.isfinite().all() and crops.isfinite().all()):
        features, crops = (torch.zeros_like(one) for one in (features, crops))
        return dict.fromkeys(measure(features, crops), math.nan)
    centered = torch.linalg.svdvals(features - features.mean(0))
    found = {"rankme": rankme(torch.linalg.svdvals(features)), "rankme_centered": rankme(centered)}
    found |= spread_of(F.normalize(features, dim=1))
    if (power := alpha(centered)) is not None:
        found["alpha"] = power
    return found | ({"lidar": lidar(crops)} if len(crops) > 1 else {})


def rankme(singular: Tensor) -> float:
    """Return the effective rank: the exponential of the entropy of the normalised singular values of features (n, d).

    The value is in [1, min(n, d)] (Roy and Vetterli 2007).
    """
    shares = singular / singular.sum().clamp(min=torch.finfo(singular.dtype).tiny) + _EPSILON
    return torch.exp(-(shares * shares.log()).sum()).item()


def lidar(crops: Tensor) -> float:
    """Return the effective rank of the between-image covariance, whitened by the within-image covariance.

    The value is at most min(n - 1, d). Directions without information on the image contribute 1 / v.

    Args:
        crops: Features of v > 1 crops of n images, (v, n, d).
    """
    means = crops.mean(0)
    between, within = means - means.mean(0), (crops - means).flatten(0, 1)
    inside = within.T @ within / (len(means) * (len(crops) - 1))
    inside.diagonal().add_(_DELTA)
    # The eigenvalues of inside^-1/2 between inside^-1/2 are the squared singular values of between inside^-1/2.
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(inside), between.T, upper=False)
    return rankme(torch.linalg.svdvals(white).square())


def alpha(singular: Tensor) -> float | None:
    """Return the exponent a of a power law rank^-a, fitted to the eigenvalues of the covariance.

    The fit is a weighted least-squares line of the logarithms, over ranks 5 to 100 or to the middle of fewer
    eigenvalues. Ranks are weighted by 1 / rank, which gives each part of the logarithmic axis the same weight (Stringer
    et al. 2019).

    Args:
        singular: Singular values of the centred features (n, d); the eigenvalues are proportional to their squares.

    Returns:
        The exponent; None for fewer than three ranks.
    """
    values = singular.square()
    last = min(_LAST, int((values > values[0] * 1e-12).sum()) // 2)
    if last - _FIRST < 2:
        return None
    places = torch.arange(_FIRST, last + 1, dtype=torch.float64)
    weights, x, y = 1 / places, places.log(), values[_FIRST - 1 : last].log()
    dx, dy = (one - (weights * one).sum() / weights.sum() for one in (x, y))
    return -((weights * dx * dy).sum() / (weights * dx * dx).sum()).item()


def warn(metrics: Mapping[str, float], history: History) -> list[str]:
    """Return a warning if the features have collapsed to one direction or to few directions, or an empty list."""
    signs = []
    if math.isnan(metrics["feature_std"]):
        return ["the features are not finite"]
    if metrics["feature_std"] < _ALIKE:
        signs.append(f"their standard deviation is {metrics['feature_std']:.3f}, below {_ALIKE}")
    rank = metrics["rankme_centered"]
    earlier = [(value, row["step"]) for row in history if (value := row.get("rankme_centered")) is not None]
    highest, step = max(earlier, key=lambda found: found[0], default=(0.0, 0))
    if rank < _LEFT * highest:
        right = f"below {100 * _LEFT:.0f} % of its highest value, {highest:.1f} at step {step}"
        signs.append(f"their RankMe without the mean is {rank:.1f}, {right}")
    return [f"the features COLLAPSE: {'; '.join(signs)}"] if signs else []


def describe(metrics: Mapping[str, float], history: History) -> list[str]:
    """Return lines that compare the measures with step 0 and correlate them with the probes of the run."""
    from scipy.stats import kendalltau  # imported here to keep the start of a run short

    start = history[0] if history[0]["step"] == 0 else {}
    told = []
    for name, title in TITLES.items():
        if name in metrics:
            first = start.get(name)
            told.append(f"{title} {metrics[name]:.2f}" + ("" if first is None else f" ({first:.2f} at step 0)"))
    lines = [f"at the last layer: {', '.join(told)}", describe_spread(metrics)]
    for probe in sorted({name for row in history for name in row if _PROBES.fullmatch(name)}):
        rows = [row for row in with_metrics(history, metrics) if row.get(f"{probe}_last") is not None]
        found = []
        for name, title in TITLES.items():
            pairs = [(value, float(row[f"{probe}_last"] or 0)) for row in rows if (value := row.get(name)) is not None]
            if len(pairs) >= _FEWEST:
                found.append(f"{title} {kendalltau(*zip(*pairs, strict=True)).statistic:.2f}")
        if found:
            words = f"rank correlation with {probe.removeprefix('probe/')} over {len(rows)} evaluations (Kendall's tau"
            lines.append(f"{words}, 1: the same order): {', '.join(found)}")
    return lines


def plot(history: History, layers: int) -> Plot:
    """Plot the ranks, alpha-ReQ and the spread over the steps, and the ranks over the layers (dashed: step 0)."""
    colors = {"rankme": "model", "rankme_centered": "unchanged", "lidar": "replaced"}
    numbers = range(1, layers + 1)
    first = history[0] if history[0]["step"] == 0 and len(history) > 1 else {}
    by_layer = []
    for name, color in colors.items():
        for row, width, dash in ((history[-1], 2, "-"), (first, 1, DASHED)):
            values = [value for layer in numbers if (value := row.get(f"{name}_layer{layer}")) is not None]
            if len(values) == layers:
                by_layer.append(Line(numbers, values, TITLES[name] * (width > 1), color, dash, width=width))
    ranks = [curve(history, name, TITLES[name], color) for name, color in colors.items()]
    panels = (
        Panel("directions of the features, last layer", ranks),
        Panel("directions of the features", by_layer, xlabel="layer (dashed: at step 0)", xticks=numbers),
        Panel("exponent of the eigenvalues (alpha-ReQ)", [curve(history, "alpha", "of 15 images or more")]),
        spread(history),
    )
    return Plot(panels, (10, 7.2), down=2)
