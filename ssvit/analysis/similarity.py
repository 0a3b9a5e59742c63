"""The similarity of the layers' representations of images: linear centred kernel alignment (Kornblith et al. 2019).

A layer's representation of an image is all its tokens side by side (Raghu et al. 2021), so layers and encoders of any
width can be compared. An estimate without bias is summed over small batches (Nguyen et al. 2021), so that neither many
images nor wide layers need memory, nor few images make all layers look alike.

Letters: b images, t tokens, d width, l layers.
"""

import torch
from matplotlib.figure import Figure
from torch import Tensor

from ssvit.figures.style import COLORS, DPI, INK, fitted, tidy

FEWEST = 4  # images in a batch: of fewer there is no estimate without bias


def gram(tokens: Tensor) -> Tensor:
    """Products of the images' representations, (b, t, d) -> (b, b) float64, with zeros on the diagonal."""
    flat = tokens.flatten(1).double()
    flat = flat - flat.mean(0)  # changes nothing but how much is rounded off
    return (flat @ flat.T).fill_diagonal_(0)


def hsic(grams: Tensor) -> Tensor:
    """The unbiased Hilbert-Schmidt independence criterion of each with each: (l, b, b), zero diagonals, -> (l, l).

    Song et al. 2012. ValueError for fewer than 4 images.
    """
    b = grams.shape[-1]
    if b < FEWEST:
        raise ValueError(f"{b} images: {FEWEST} or more are needed")
    rows = grams.sum(-1)
    sums = rows.sum(-1)
    products = torch.einsum("iab,jab->ij", grams, grams)
    return (products + torch.outer(sums, sums) / ((b - 1) * (b - 2)) - 2 / (b - 2) * rows @ rows.T) / (b * (b - 3))


def cka(sums: Tensor) -> Tensor:
    """How alike the layers are, from `hsic` summed over batches: (l, l), 1 on the diagonal, nan if undefined."""
    norms = sums.diagonal().clamp(min=0).sqrt()
    scale = torch.outer(norms, norms)
    return (sums / scale).where(scale > 0, torch.nan)


def plot(alignment: Tensor, layers: int, other: str = "") -> Figure:
    """The layers of one encoder against each other and against those of `other`, from `cka` of both in turn; with
    another encoder of as many layers, also the same layers of the two.
    """
    within, across = alignment[:layers, :layers], alignment[:layers, layers:]
    panels = [(within, "layer"), *([(across, f"layer of {fitted(other, 10, 500)}")] if other else [])]
    paired = bool(other) and across.shape[0] == across.shape[1]
    # As wide as they have layers, as far as that can be plotted.
    widths = [min(max(values.shape[1] / layers, 0.4), 2.5) for values, _ in panels] + [1.0] * paired
    figure = Figure(figsize=(0.9 + 3.9 * sum(widths), 3.9), dpi=DPI, layout="constrained")
    axes = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    for axis, (values, name) in zip(axes, panels, strict=False):
        picture = axis.imshow(values.numpy(), vmin=0, vmax=1, cmap="viridis", origin="lower")
        for ticks, side in ((axis.set_yticks, values.shape[0]), (axis.set_xticks, values.shape[1])):
            shown = range(0, side, -(-side // 12))
            ticks(shown, [layer + 1 for layer in shown])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
        axis.set(xlabel=name, ylabel="layer")
    bar = figure.colorbar(picture, ax=axes[: len(panels)], shrink=0.85)
    bar.outline.set_visible(False)
    bar.set_label("linear CKA")
    if paired:
        axis, numbers = axes[-1], range(1, layers + 1)
        axis.plot(numbers, across.diagonal().numpy(), color=COLORS["model"], linewidth=2, marker="o")
        tidy(axis, "layer", "linear CKA with the same layer", legend=False)
        axis.set(ylim=(0, 1.02), xticks=numbers[:: -(-layers // 12)])
    figure.suptitle("similarity of representations", x=0.01, ha="left", fontsize=10, color=INK)
    return figure
