"""Compare representations of layers by linear centred kernel alignment, CKA (Kornblith et al. 2019).

The representation of an image by a layer is the concatenation of all its tokens (Raghu et al. 2021), so that layers and
encoders of any width can be compared. An unbiased estimate is summed over small batches (Nguyen et al. 2021): memory is
independent of the number of images, and small samples do not inflate the similarity.

Shapes use b images, t tokens, d width, l layers.
"""

import torch
from torch import Tensor

from ssvit.figures.matrices import Heatmaps, Matrix

FEWEST = 4  # minimum batch size of the unbiased estimate


def gram(tokens: Tensor) -> Tensor:
    """Return the Gram matrix of representations, (b, t, d) -> (b, b) float64, with zeros on the diagonal."""
    flat = tokens.flatten(1).double()
    flat = flat - flat.mean(0)  # reduces rounding errors without changing the estimate
    return (flat @ flat.T).fill_diagonal_(0)


def hsic(grams: Tensor) -> Tensor:
    """Return the unbiased Hilbert-Schmidt independence criterion of each pair of layers (Song et al. 2012).

    Args:
        grams: Gram matrices with zero diagonals, (l, b, b).

    Returns:
        Estimates, (l, l).

    Raises:
        ValueError: For fewer than 4 images.
    """
    b = grams.shape[-1]
    if b < FEWEST:
        raise ValueError(f"{b} images: {FEWEST} or more are needed")
    rows = grams.sum(-1)
    sums = rows.sum(-1)
    products = torch.einsum("iab,jab->ij", grams, grams)
    return (products + torch.outer(sums, sums) / ((b - 1) * (b - 2)) - 2 / (b - 2) * rows @ rows.T) / (b * (b - 3))


def cka(sums: Tensor) -> Tensor:
    """Return the CKA of layers from `hsic` summed over batches: (l, l), 1 on the diagonal, NaN if undefined."""
    norms = sums.diagonal().clamp(min=0).sqrt()
    scale = torch.outer(norms, norms)
    return (sums / scale).where(scale > 0, torch.nan)


def plot(alignment: Tensor, layers: int, other: str = "") -> Heatmaps:
    """Return heat maps of the similarity within an encoder and, if there is a second one, between both.

    Args:
        alignment: CKA of the layers of one encoder or of two encoders, concatenated, (l, l).
        layers: Number of layers of the first encoder.
        other: Name of the second encoder; "" for none.
    """
    parts = {"layer": alignment[:layers, :layers]}
    if other:
        parts[f"layer of {other}"] = alignment[:layers, layers:]

    def ticks(side: int) -> dict[str, float]:
        return {str(layer + 1): layer for layer in range(0, side, -(-side // 12))}

    matrices = [
        Matrix(values.numpy(), name, "layer", ticks(values.shape[1]), ticks(layers)) for name, values in parts.items()
    ]
    return Heatmaps(matrices, "similarity of representations", "linear CKA", origin="lower")
