"""Implement masked patch prediction: corrupt half of the patch embeddings and predict their colours (Appendix B.1.2).

With a decoder, only the uncorrupted patches are encoded, as in a masked autoencoder (He et al. 2022), so a step costs
less. The target is the same.

Letters: b images, n patches, m corrupted patches per image, d width.
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
    """Implement the paper's self-supervised objective, with a [mask] embedding and a linear head, or with a decoder.

    The head is initialised with zeros, as are all output layers of the authors.

    Args:
        options: Options of the objective.
        encoder: The encoder.
        target: Target that computes labels and losses.
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
        """Return the metadata of the base class and of the target."""
        return super().facts | getattr(self.target, "facts", {})

    def prepare(self, batches: Iterator[Batch]) -> str:
        """Fit the target if it has a method `prepare`; see `Objective.prepare`."""
        return self.target.prepare(batches) if hasattr(self.target, "prepare") else ""

    def sample(self, slots: Tensor, *, seed: int) -> Corruption:
        """Sample the corruption of images of slots (b,)."""
        return self.masking.sample(slots, seed=seed, grid=self.encoder.grid)

    def predict(self, images: Tensor, noise: Corruption, depth_noise: Tensor | None = None) -> Tensor:
        """Predict the corrupted patches, by the head from their outputs or by the decoder.

        Args:
            images: Images, (b, c, h, w), uint8 or float in [0, 1].
            noise: Corruption of the images.
            depth_noise: Random numbers of stochastic depth, (b, 2 * depth), or None.

        Returns:
            Predictions, (b, m, width of the target).

        Raises:
            OptionError: The images do not have the encoder's size, for which the masks are sampled.
        """
        self.encoder.check_size(images)
        if self.decoder is None:
            tokens = corrupt(self.encoder.embed(images), self.mask_token, noise)
            return self.head(self.encoder.encode(tokens, output_ids=noise.ids, depth_noise=depth_noise))
        visible_ids = uncorrupted(noise.ids, self.encoder.patches)
        return self.decoder(self.encoder(images, visible_ids, depth_noise=depth_noise), visible_ids, noise.ids)

    def corrupted_labels(self, images: Tensor, noise: Corruption) -> Tensor:
        """Return the labels of the corrupted patches, (b, m, ...)."""
        return gather(self.target.labels(images), noise.ids)

    def forward(self, batch: Batch, noise: Corruption, scheduled: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """Return the mean loss and the mean score of the most probable labels, over the corrupted patches."""
        prediction = self.predict(batch.only_view(), noise, self.depth_noise(batch))
        truth = self.corrupted_labels(batch.only_view(), noise)
        score = self.target.score(self.target.guess(prediction.detach()), truth)
        return {"loss": self.target.losses(prediction, truth).mean(), self.target.score_name: score.mean()}
