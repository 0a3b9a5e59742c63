"""Implement DIET (Balestriero 2023, arXiv 2302.10260): the index of each training image is its class.

Letters: b images of a batch, d width, n training images.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.models.encoder import Encoder
from ssvit.objectives import diet_options
from ssvit.objectives.base import EMPTY, Objective, at_least_float32


class Diet(Objective):
    """Classify the index of each training image by a linear head without bias on the features of the encoder.

    The head has n * d weights: 154 MB in float32 for 100,000 images and a width of 384, and three times as much for
    their gradients and the moments of AdamW.

    Args:
        options: Options of the objective.
        encoder: The encoder.
        images: Number of training images, n.
    """

    options: diet_options.Diet

    def __init__(self, options: diet_options.Diet, *, encoder: Encoder, images: int) -> None:
        super().__init__(options, encoder)
        self.head = nn.Linear(encoder.width, images, bias=False)

    def forward(self, batch: Batch, noise: object = (), scheduled: Mapping[str, Tensor] = EMPTY) -> dict[str, Tensor]:
        """Return the mean cross-entropy with label smoothing, and the top-1 accuracy of the index."""
        assert batch.indices is not None
        features = self.encoder.represent(batch.only_view(), depth_noise=self.depth_noise(batch))
        if self.options.normalize:
            features = F.normalize(at_least_float32(features), dim=1)
        logits = at_least_float32(self.head(features))  # (b, n)
        accuracy = (logits.detach().argmax(1) == batch.indices).float().mean()
        loss = F.cross_entropy(logits, batch.indices, label_smoothing=self.options.label_smoothing)
        return {"loss": loss, "accuracy": accuracy}
