"""Compare the layers of encoders by linear centred kernel alignment, CKA (Kornblith et al. 2019).

As in Nguyen et al. 2021 and Raghu et al. 2021, HSIC is estimated without bias in each batch and averaged over batches.
The biased estimate of CKA tends to 1 if the features are wider than the number of images.

Shapes use n images of a batch, d width of flattened features, l layers of all encoders.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ssvit.errors import UserError
from ssvit.figures.matrices import Similarities
from ssvit.models.encoder import Encoder


def centred_gram(features: Tensor) -> Tensor:
    """Return the U-centred Gram matrix of features, (n, ...) -> (n, n) float64 (Szekely and Rizzo 2014).

    The sum of the products of two of these, divided by n (n - 3), is the unbiased estimate of HSIC (Song et al. 2012).
    """
    rows = features.flatten(1).double()
    n = len(rows)
    gram = (rows @ rows.T).fill_diagonal_(0)
    sums = gram.sum(1) / (n - 2)
    return (gram - sums - sums[:, None] + sums.sum() / (n - 1)).fill_diagonal_(0)


@torch.no_grad()
def cka(encoders: Sequence[Encoder], images: Tensor, batch_size: int) -> Tensor:
    """Return the CKA of all layers of encoders, (l, l) float64, in the order of the encoders.

    Args:
        encoders: The encoders in eval mode.
        images: Images, (b, c, h, w).
        batch_size: Maximum number of images of a batch, at least 8.

    Raises:
        UserError: An encoder has no feature maps, or there are fewer than 4 images.
    """
    if len(images) < 4:  # for which the unbiased estimate is not defined
        raise UserError(f"the similarity of layers requires 4 images, and {len(images)} can be read")
    sums = []
    for part in images.tensor_split(-(-len(images) // batch_size)):
        maps = [of_layer for encoder in encoders for of_layer in encoder.maps(part.to(encoder.mean.device))]
        grams = torch.stack([centred_gram(of_layer).flatten().cpu() for of_layer in maps])
        sums.append(grams @ grams.T / (len(part) * (len(part) - 3)))
    hsic = torch.stack(sums).mean(0)
    norms = hsic.diagonal().sqrt()
    return hsic / (norms * norms[:, None])


def plot(values: Tensor, layers: Mapping[str, int]) -> Similarities:
    """Plot the CKA of layers, with gaps between encoders.

    Args:
        values: CKA, (l, l).
        layers: Number of layers by name of the encoder, in the order of the rows.
    """
    ends = np.cumsum([*layers.values()])
    tiles = np.insert(np.insert(values.numpy(), ends[:-1], np.nan, 0), ends[:-1], np.nan, 1)
    starts = ends - [*layers.values()] + np.arange(len(layers))
    ticks = {name: start + (depth - 1) / 2 for start, (name, depth) in zip(starts, layers.items(), strict=True)}
    return Similarities(tiles, ticks, ticks, 0, "similarity of layers, each encoder from its first layer", "linear CKA")
