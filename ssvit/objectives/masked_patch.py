"""Masked patch prediction: corrupt half of the patch embeddings, predict each one's colour (Appendix B.1.2).

Letters: b images, n patches, m corrupted patches an image, d width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.models.vit import ViT, gather
from ssvit.objectives.base import NOTHING, Objective
from ssvit.objectives.masking import Corruption, Masking, corrupt
from ssvit.objectives.targets import Target


class MaskedPatch(Objective):
    """The paper's self-supervised objective: a [mask] embedding and a linear head beside the encoder.

    The head starts at zero, as all the authors' output layers do.
    """

    def __init__(self, *, encoder: ViT, masking: Masking, target: Target) -> None:
        super().__init__()
        self.encoder, self.masking, self.target = encoder, masking, target
        self.mask_token = nn.Parameter(torch.randn(encoder.width) * 0.02)
        self.head = nn.Linear(encoder.width, target.width)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def sample(self, slots: Tensor, *, seed: int) -> Corruption:
        """Which patches of the images of slots (b,) are corrupted, and how."""
        return self.masking.sample(slots, seed=seed, grid=self.encoder.grid)

    def predict(self, images: Tensor, noise: Corruption) -> Tensor:
        """The head's prediction of each corrupted patch from that patch's output: -> (b, m, target.width)."""
        tokens = corrupt(self.encoder.embed(images), self.mask_token, noise)
        return self.head(self.encoder.encode(tokens, output_ids=noise.ids))

    def corrupted_labels(self, images: Tensor, noise: Corruption) -> Tensor:
        """The labels of the corrupted patches: -> (b, m, ...)."""
        return gather(self.target.labels(images), noise.ids)

    def forward(self, batch: Batch, noise: Corruption, scheduled: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """The mean loss over the corrupted patches, and the mean score of the best guess."""
        truth = self.corrupted_labels(batch.images, noise)
        prediction = self.predict(batch.images, noise)
        score = self.target.score(self.target.guess(prediction.detach()), truth)
        return {"loss": self.target.losses(prediction, truth).mean(), self.target.score_name: score.mean()}
