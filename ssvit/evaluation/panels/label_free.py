"""How good are the features, without labels? Measures of their spectrum on held-out images, at every layer.

RankMe (Garrido et al. 2023, arXiv 2210.02885): how many directions the features take, the effective rank.
LiDAR (Thilak et al. 2024, arXiv 2312.04000): how many directions tell images apart from their own crops.
alpha-ReQ (Agrawal et al. 2022, NeurIPS): how fast the eigenvalues of the covariance fall, as a power of their place.
Spread: the standard deviation of features of length 1, and the mean cosine of two images.

RankMe does not subtract the mean of the features, which dominates where images are reconstructed: so it stands here
with the mean and without. None of them is sure to follow accuracy: docs/evaluation.md has what was measured.

Letters: n images, v crops of each, d width, c channels, h, w pixels.
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

_EPSILON = 1e-7  # RankMe's and LiDAR's, added to each share
_DELTA = 1e-4  # LiDAR's, added to the variances within images
_FIRST, _LAST = 5, 100  # eigenvalues, counted from 1, to which alpha-ReQ's line is fitted
_ALIKE = 0.02  # standard deviation of features of length 1: less is a collapse
_LEFT = 0.25  # of the highest rank without the mean so far: less is a collapse
_PROBES = re.compile(r"probe/[a-z_]+\d*")  # of the accuracies at the chosen layer, by what the run calls them
_FINE = (
    f"no collapse: RankMe without the mean is not below {100 * _LEFT:.0f} % of its highest value so far, nor the "
    f"standard deviation of the features below {_ALIKE}"
)
TITLES = {"rankme": "RankMe", "rankme_centered": "RankMe without the mean", "lidar": "LiDAR", "alpha": "alpha-ReQ"}
_FEWEST = 5  # evaluations by which a measure is compared with a probe


class LabelFree(HeldOut):
    """The evaluation of any objective's backbone, pooled as it pools, after each layer and the last norm."""

    options: label_free_options.LabelFree

    def __init__(self, options: label_free_options.LabelFree, *, source: Source, transform: EvalTransform) -> None:
        super().__init__(options, source=source, transform=transform)
        self.set_interval(options.every)
        self.images *= 1 + options.views

    def __call__(self, objective: Objective, history: History | None = None) -> Evaluation:
        """Each measure at the last layer, and at layer 3 as "rankme_layer3".

        None of a single image. A warning as soon as the features collapse, or else one line, that they have not.
        Figure: `label_free`, the measures over the steps and the layers; the file label_free.md has them in words.
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
    """All measures of features (n, d), and of crops of the same images (v, n, d), float64.

    Without LiDAR if v < 2, and without alpha-ReQ of fewer than 15 images. NaN of features that are not finite.
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
    """The exponential of the entropy of the shares (Roy and Vetterli 2007) of the singular values of features (n, d).

    From 1 to min(n, d).
    """
    shares = singular / singular.sum().clamp(min=torch.finfo(singular.dtype).tiny) + _EPSILON
    return torch.exp(-(shares * shares.log()).sum()).item()


def lidar(crops: Tensor) -> float:
    """The same of the covariance between images, whitened by that within images: (v, n, d), v > 1 crops.

    At most min(n - 1, d); directions that say nothing of the image count by 1 / v.
    """
    means = crops.mean(0)
    between, within = means - means.mean(0), (crops - means).flatten(0, 1)
    inside = within.T @ within / (len(means) * (len(crops) - 1))
    inside.diagonal().add_(_DELTA)
    # Eigenvalues of inside^-1/2 between inside^-1/2 are squares of the singular values of between inside^-1/2.
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(inside), between.T, upper=False)
    return rankme(torch.linalg.svdvals(white).square())


def alpha(singular: Tensor) -> float | None:
    """The exponent a of the covariance's eigenvalues as place^-a, by least squares of the logarithms.

    singular: the singular values of features (n, d) less their mean, whose squares the eigenvalues follow.

    Fitted from the fifth place to the hundredth, or to the middle of fewer; a place weighs 1 / place, so that each part
    of the logarithm counts alike (as Stringer et al. 2019). None if these are fewer than three.
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
    """The signs that the features have collapsed, one way or into few directions."""
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
    """The measures beside those of step 0, and how each went with the probes of the run, in words."""
    from scipy.stats import kendalltau  # which would add to the start of every run

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
    """Return the ranks over the steps and now over the layers (dashed: at step 0), alpha-ReQ and the spread."""
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
