"""Masked patch prediction: corrupt half of the patch embeddings, predict each one's colour (Appendix B.1.2).

With a decoder, the encoder sees only the uncorrupted patches, as in a masked autoencoder (He et al. 2022), so a step
costs less. The target stays the same.

Letters: b images, n patches, m corrupted patches an image, d width.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.models.block import gather
from ssvit.models.decoder import Decoder
from ssvit.models.vit import ViT
from ssvit.objectives import masked_patch_options
from ssvit.objectives.base import NOTHING, Objective
from ssvit.objectives.masking import Corruption, Masking, corrupt, uncorrupted
from ssvit.objectives.targets import Target


class MaskedPatch(Objective):
    """The paper's self-supervised objective: a [mask] embedding and a linear head beside the encoder, or a decoder.

    The head starts at zero, as all the authors' output layers do.
    """

    encoder: ViT
    options: masked_patch_options.MaskedPatch

    def __init__(self, options: masked_patch_options.MaskedPatch, *, encoder: ViT, target: Target) -> None:
        super().__init__(options, encoder)
        self.target = target
        self.masking: Masking = options.masking.build()
        self.decoder: Decoder | None = None
        if options.decoder is not None:
            self.decoder = Decoder(options.decoder, encoder=encoder, output_width=target.width)
            return
        self.mask_token = nn.Parameter(torch.randn(encoder.width) * 0.02)
        self.head = nn.Linear(encoder.width, target.width)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def facts(self) -> dict[str, object]:
        """The base's, and what the labels depend on beside the options."""
        return super().facts | getattr(self.target, "facts", {})

    def prepare(self, batches: Iterator[Batch]) -> str:
        """Let a target that has a `prepare` fit itself."""
        return self.target.prepare(batches) if hasattr(self.target, "prepare") else ""

    def sample(self, slots: Tensor, *, seed: int) -> Corruption:
        """Which patches of the images of slots (b,) are corrupted, and how."""
        return self.masking.sample(slots, seed=seed, grid=self.encoder.grid)

    def predict(self, images: Tensor, noise: Corruption, depth_noise: Tensor | None = None) -> Tensor:
        """The prediction of each corrupted patch: by the head from its output, or by the decoder: -> (b, m, width).

        OptionError for images of another size than the encoder's, for which the masks are sampled.
        """
        self.encoder.check_size(images)
        if self.decoder is None:
            tokens = corrupt(self.encoder.embed(images), self.mask_token, noise)
            return self.head(self.encoder.encode(tokens, output_ids=noise.ids, depth_noise=depth_noise))
        visible_ids = uncorrupted(noise.ids, self.encoder.patches)
        return self.decoder(self.encoder(images, visible_ids, depth_noise=depth_noise), visible_ids, noise.ids)

    def corrupted_labels(self, images: Tensor, noise: Corruption) -> Tensor:
        """The labels of the corrupted patches: -> (b, m, ...)."""
        return gather(self.target.labels(images), noise.ids)

    def forward(self, batch: Batch, noise: Corruption, scheduled: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """The mean loss over the corrupted patches, and the mean score of the best guess."""
        prediction = self.predict(batch.only_view(), noise, self.depth_noise(batch))
        truth = self.corrupted_labels(batch.only_view(), noise)
        score = self.target.score(self.target.guess(prediction.detach()), truth)
        return {"loss": self.target.losses(prediction, truth).mean(), self.target.score_name: score.mean()}
