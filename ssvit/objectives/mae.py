"""Masked autoencoding: encode a quarter of the patches, reconstruct the pixels of the others (He et al. 2022).

The encoder sees neither masked patches nor [mask] tokens, so a step costs a fraction of one that encodes all patches.
Only the light decoder, which is used in training alone, has [mask] tokens.

Letters: b images, c channels, n patches of p x q pixels, m masked patches an image.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ssvit.data.batch import Batch
from ssvit.models.decoder import Decoder
from ssvit.models.vit import ViT
from ssvit.objectives import mae_options
from ssvit.objectives.base import NOTHING, Objective
from ssvit.objectives.masking import Masks
from ssvit.randomness import uniform

_EPSILON = 1e-6  # added to a patch's variance (facebookresearch/mae: models_mae.py)


class MAE(Objective):
    """A masked autoencoder; its options are those of `mae_options.MAE`.

    The class token goes through encoder and decoder as in the authors' code: it is trained through the patches alone.
    """

    encoder: ViT
    options: mae_options.MAE

    def __init__(self, options: mae_options.MAE, *, encoder: ViT) -> None:
        super().__init__(options, encoder)
        width = encoder.channels * math.prod(encoder.patch_size)
        self.decoder = Decoder(options.decoder, encoder=encoder, output_width=width)

    def sample(self, slots: Tensor, *, seed: int) -> Masks:
        """Which patches of the images of slots (b,) are masked, as many of each: a function of (seed, slot) alone."""
        order = uniform(seed, "masked patches", slots, self.encoder.patches).argsort(dim=1)
        masked_ids, visible_ids = order.tensor_split([self.options.count(self.encoder.patches)], dim=1)
        return Masks(visible_ids, masked_ids)

    def predict(self, images: Tensor, noise: Masks, depth_noise: Tensor | None = None) -> Tensor:
        """The decoder's prediction of the masked patches: (b, c, h, w), [0, 1] or uint8, -> (b, m, c * p * q).

        OptionError for images of another size than the encoder's, for which the masks are sampled.
        """
        self.encoder.check_size(images)
        encoded = self.encoder(images, noise.visible_ids, depth_noise=depth_noise)
        return self.decoder(encoded, noise.visible_ids, noise.masked_ids)

    def labels(self, images: Tensor, ids: Tensor | None = None) -> Tensor:
        """What is to be predicted of each patch: (b, c, h, w), [0, 1] or uint8, -> (b, n, c * p * q).

        Pixels as the encoder normalises them; with norm_pixels less the patch's mean, over its standard deviation.
        ids (b, m): of these patches alone -> (b, m, c * p * q).
        """
        pixels = self._pixels(images, ids)
        if not self.options.norm_pixels:
            return pixels
        # Layer norm divides squares by n, the authors by n - 1, and is several times faster than mean and variance.
        n = pixels.shape[-1]
        return F.layer_norm(pixels, (n,), eps=_EPSILON * (n - 1) / n) * math.sqrt((n - 1) / n)

    def paint(self, labels: Tensor, images: Tensor) -> Tensor:
        """Labels (b, n, c * p * q) as images in [0, 1], each patch with mean and deviation of that of `images`."""
        if self.options.norm_pixels:
            variance, mean = torch.var_mean(self._pixels(images), dim=-1, keepdim=True)
            labels = labels * (variance + _EPSILON).sqrt() + mean
        p, q = self.encoder.patch_size
        rows = images.shape[2] // p
        painted = rearrange(labels, "b (y x) (c p q) -> b c (y p) (x q)", y=rows, p=p, q=q)
        channel_mean, channel_std = (value[:, None, None] for value in (self.encoder.mean, self.encoder.std))
        return (painted * channel_std + channel_mean).clamp(0, 1)

    def forward(self, batch: Batch, noise: Masks, scheduled: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """The mean squared error over the masked patches' pixels."""
        prediction = self.predict(batch.only_view(), noise, self.depth_noise(batch))
        truth = self.labels(batch.only_view(), noise.masked_ids)
        return {"loss": F.mse_loss(prediction.to(truth.dtype), truth)}

    def _pixels(self, images: Tensor, ids: Tensor | None = None) -> Tensor:
        """Patches as the encoder normalises them: -> (b, n, c * p * q), or with ids (b, m) these alone."""
        patches = self.encoder.patchify(images, ids).unflatten(-1, (self.encoder.channels, *self.encoder.patch_size))
        return self.encoder.normalise(patches).flatten(-3)
