"""Pictures of contrastive learning: whether views find each other, and which images lie near each other.

Letters: n images, c channels, h, w pixels, k of them in a row.
"""

from matplotlib.figure import Figure
from torch import Tensor

from ssvit.figures.collapse import plot_spread
from ssvit.figures.display import Display
from ssvit.figures.pictures import rows
from ssvit.figures.reconstruction import plot_losses
from ssvit.figures.style import COLORS, INK, History, Line, over_steps, panels, tidy


def learning(history: History) -> Figure:
    """Loss, share of views that find their other, distances and the spread of features over the steps."""
    figure, (losses, found, distances, features) = panels(4, 10, 7.2, down=2)
    model, other = (Line(color=COLORS[name], linewidth=2, marker=".") for name in ("model", "replaced"))
    chance = Line(color=INK, linewidth=1, linestyle="-.")
    plot_losses(losses, history, {"loss_by_chance": "chance, held-out"}, "loss (nats)")
    over_steps(found, history, "top1", "held-out", 100, **model)
    over_steps(found, history, "top1_by_chance", "by chance", 100, **chance)
    over_steps(distances, history, "alignment", "of an image's views", **model)
    over_steps(distances, history, "distance", "of different images", **other)
    tidy(found, "step", "nearest is the image's other view (%)")
    tidy(distances, "step", "squared distance of projections")
    plot_spread(features, history)
    return figure


def neighbours(images: Tensor, nearest: Tensor, cosines: Tensor, display: Display) -> Figure:
    """Rows of an image and those nearest to it: images (n, c, h, w) uint8, nearest (rows, k) and their cosines.

    The first of `nearest` is the image itself.
    """
    labelled = [
        (f"cosine {row[1]:.2f}\nto {row[-1]:.2f}", display(images[ids]))
        for ids, row in zip(nearest, cosines, strict=True)
    ]
    title = f"held-out images, each beside those of {len(images)} whose features are nearest"
    return rows(labelled, title, across=nearest.shape[1])
