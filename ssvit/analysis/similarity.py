"""The similarity of the layers' representations of images: linear centred kernel alignment (Kornblith et al. 2019).

A layer's representation of an image is all its tokens side by side (Raghu et al. 2021), so layers and encoders of any
width can be compared. An estimate without bias is summed over small batches (Nguyen et al. 2021), so that neither many
images nor wide layers need memory, nor few images make all layers look alike.

Letters: b images, t tokens, d width, l layers.
"""

import torch
from torch import Tensor

from ssvit.figures.matrices import Heatmaps, Matrix

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


def plot(alignment: Tensor, layers: int, other: str = "") -> Heatmaps:
    """Return the layers of one encoder against each other and against those of `other`, from `cka` of both in turn."""
    parts = {"layer": alignment[:layers, :layers]}
    if other:
        parts[f"layer of {other}"] = alignment[:layers, layers:]

    def ticks(side: int) -> dict[str, float]:
        return {str(layer + 1): layer for layer in range(0, side, -(-side // 12))}

    matrices = [
        Matrix(values.numpy(), name, "layer", ticks(values.shape[1]), ticks(layers)) for name, values in parts.items()
    ]
    return Heatmaps(matrices, "similarity of representations", "linear CKA", origin="lower")
