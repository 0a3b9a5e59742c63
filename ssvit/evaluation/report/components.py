"""The principal components of the features of patches, as colours: what an encoder tells apart without any label.

As in DINOv2 (Oquab et al. 2024, section 7.5), of all images together, so that a colour means the same in each.

Letters: m images, y, x rows and columns of patches, d width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_COLORS = 3
_CLIPPED = 0.01  # of the patches at either end of a component, which would leave the others pale


def components(values: Tensor) -> Tensor:
    """The first three components of patches, each stretched to [0, 1]: (m, y, x, d) -> (m, y, x, 3).

    What patches at a place have in common in all images is left out first, since masked models keep much of a patch's
    position. Each component points to where its largest weight is positive. One that does not vary is 0.5.
    """
    values = values.double()
    rows = (values - values.mean(0)).flatten(0, 2)
    _, vectors = torch.linalg.eigh(rows.T @ rows)
    vectors = vectors.flip(1)[:, :_COLORS]
    vectors = vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    found = F.pad(rows @ vectors, (0, _COLORS - vectors.shape[1]))
    order = found.sort(0).values
    low, high = order[int(_CLIPPED * (len(order) - 1))], order[-1 - int(_CLIPPED * (len(order) - 1))]
    varies = high - low > 1e-9 * rows.abs().max()
    colors = torch.where(varies, (found - low) / torch.where(varies, high - low, 1), 0.5)
    return colors.clamp(0, 1).float().unflatten(0, values.shape[:3])
