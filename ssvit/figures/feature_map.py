"""A map of images on which images with similar features lie together; each class has a colour and its name.

Letters: n images, d width, k classes.
"""

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
import torch
from matplotlib.colors import hsv_to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.nn import functional as F

from ssvit.figures.style import DPI, INK, canvas, fitted, width_of
from ssvit.randomness import permutation

IMAGES = 2000  # on a map at most
_COMPONENTS = 50  # of the features that t-SNE sees: what they leave out is mostly noise, and costs time
_PERPLEXITY = 30
_WIDE, _FLAT, _EDGE, _TOP = 1050, 500, 40, 60  # dots: a map's width and least height, around its points, for its title
_ROOM, _LINE = 240, 3  # dots that a name may take, and its height for each of its points
_FEW = 20  # classes whose names are written large
_NEAR = 0.75  # of the images of a class: the others may lie among those of another one
_GOLDEN = (5**0.5 - 1) / 2


def feature_map(features: Tensor, labels: Tensor, classes: Sequence[str]) -> Figure:
    """The map of `IMAGES` random images or of all: features (n, d), labels (n,) int64, on the CPU.

    The same features give the same map. A name stands where there is room for it, or not at all.
    """
    chosen = permutation(0, "feature map", len(labels))[:IMAGES]
    labels = labels[chosen]
    places, height = _in_dots(project(features[chosen]))
    figure, axis = canvas(_WIDE, height + _TOP)
    axis.invert_yaxis()
    colors = _colors(len(classes))
    area = np.clip(12_000 / max(len(places), 1), 10, 40)
    across, up = places.T.numpy()
    axis.scatter(across, up, c=colors[labels.numpy()], s=area, alpha=0.7, linewidths=0)

    present = len(labels.unique())
    size = 9 if present <= _FEW else 6
    names = _names(places, labels, classes, size, radius=area**0.5 / 2 * DPI / 72)
    halo = [withStroke(linewidth=3, foreground="white")]
    for label, (name, x, y) in names.items():
        axis.text(x, y, name, color=0.6 * colors[label], path_effects=halo, fontsize=size, fontweight="bold",
                  ha="center", va="center")  # fmt: skip
    count = f"{len(places):,}" + (f" of {len(features):,}" if len(places) < len(features) else "")
    some = f"; {len(names):,} of {present:,} classes have room for their names" if len(names) < present else ""
    title = f"{count} images, by t-SNE of their cosines{some}"
    axis.text(_EDGE / 2, height + _TOP / 2, title, va="center", fontsize=9, color=INK)
    return figure


def project(features: Tensor) -> Tensor:
    """(n, d) -> (n, 2): t-SNE (van der Maaten, Hinton 2008) of the cosines, from the principal components on."""
    # Unit vectors are as far apart as their cosine is small, and a rotation leaves it so.
    units = F.normalize(features.double(), dim=1)
    left, scale, _ = torch.linalg.svd(units - units.mean(0), full_matrices=False)
    components = F.pad(left * scale, (0, 2))[:, :_COMPONENTS]
    if len(features) < 2:
        return components[:, :2].float()
    # As scikit-learn's own start, but for features of any width.
    start = 1e-4 * components[:, :2] / components[:, 0].std().clamp(min=1e-12)
    model = TSNE(perplexity=min(_PERPLEXITY, (len(features) - 1) / 3), init=start.float().numpy())
    # The gradient is summed over threads in the order in which they end; one thread has always the same.
    with threadpool_limits(1):
        return torch.from_numpy(model.fit_transform(components.float().numpy()))


def _in_dots(places: Tensor) -> tuple[Tensor, float]:
    """Scale places (n, 2) to the map's width, or put them in its middle if they are all one; and the map's height."""
    if not len(places):
        return places, _FLAT
    low, high = places.min(0).values, places.max(0).values
    scale = (_WIDE - 2 * _EDGE) / (high - low).max().clamp(min=1e-12)
    height = max(_FLAT, ((high - low)[1] * scale).item() + 2 * _EDGE)
    return torch.tensor([_WIDE, height]) / 2 + scale * (places - (low + high) / 2), height


def _names(
    places: Tensor, labels: Tensor, classes: Sequence[str], size: float, radius: float
) -> dict[int, tuple[str, float, float]]:
    """For each class its name and where it is written, in dots.

    That is beside the image with the least median distance to those of its class, or the next such image where the
    name hides no point (of this radius); in a crowd it is on such an image. Classes with many images close together
    come first.
    """
    across, up = places.T.numpy()
    rise = 0.7 * size * DPI / 72 + radius  # between the middles of a name and of a point above or below it
    candidates = []
    for label in labels.unique().tolist():
        members = places[labels == label]
        spread = torch.cdist(members, members).median(1).values
        candidates.append((spread.min().item() / len(members) ** 0.5, label, members[spread.argsort(stable=True)]))
    written: dict[int, tuple[str, float, float]] = {}
    taken = np.empty((0, 3))
    for _, label, members in sorted(candidates, key=lambda one: one[:2]):
        name = fitted(classes[label], size, _ROOM)
        half = 0.58 * width_of(name, size) + 6  # bold letters are wider
        around = torch.tensor([(0, -rise), (0, rise), (-half - radius, 0), (half + radius, 0)])
        near = members[: math.ceil(_NEAR * len(members))]
        beside = [(x, y, True) for x, y in (near[:, None] + around).view(-1, 2).tolist()]
        for x, y, is_beside in (*beside, *((x, y, False) for x, y in members.tolist())):
            x = min(max(x, half), _WIDE - half)
            # A dot less, since the image beside it is just as far, but for rounding.
            if is_beside and np.any((abs(x - across) < half + radius - 1) & (abs(y - up) < rise - 1)):
                continue
            if np.all((abs(x - taken[:, 0]) > half + taken[:, 2]) | (abs(y - taken[:, 1]) > _LINE * size)):
                written[label] = (name, x, y)
                taken = np.vstack((taken, (x, y, half)))
                break
    return written


def _colors(k: int) -> np.ndarray:
    """(k, 3): matplotlib's own for few classes; for many, hues by the golden ratio, so that neighbours differ."""
    for name in ("tab10", "tab20"):
        if k <= matplotlib.colormaps[name].N:
            return np.array([matplotlib.colormaps[name](number)[:3] for number in range(k)])
    number = np.arange(k)
    return hsv_to_rgb(np.stack((number * _GOLDEN % 1, 0.55 + number % 2 * 0.4, 0.6 + number % 3 * 0.15), axis=1))
