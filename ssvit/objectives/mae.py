"""Implement masked autoencoding: encode a quarter of the patches, reconstruct the masked pixels (He et al. 2022).

The encoder encodes neither masked patches nor [mask] tokens, so a step costs a fraction of one that encodes all
patches. Only the light decoder, which is used in training alone, has [mask] tokens.

Letters: b images, c channels, n patches of p x q pixels, m masked patches per image.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ssvit.data.batch import Batch
from ssvit.engine.randomness import uniform
from ssvit.models.decoder import Decoder
from ssvit.models.vit import ViT
from ssvit.objectives import mae_options
from ssvit.objectives.base import EMPTY, Objective

_EPSILON = 1e-6  # added to a patch's variance (facebookresearch/mae: models_mae.py)


class Masks(NamedTuple):
    """Hold the indices of the patches that the encoder encodes and of the masked patches, both int64.

    Attributes:
        visible_ids: Visible patches, (b, n - m).
        masked_ids: Masked patches, (b, m).
    """

    visible_ids: Tensor
    masked_ids: Tensor


class MAE(Objective):
    """Implement a masked autoencoder, with the options of `mae_options.MAE`.

    The class token passes through encoder and decoder as in the authors' code: it is trained only by way of the
    patches.
    """

    encoder: ViT
    options: mae_options.MAE

    def __init__(self, options: mae_options.MAE, *, encoder: ViT) -> None:
        super().__init__(options, encoder)
        width = encoder.channels * math.prod(encoder.patch_size)
        self.decoder = Decoder(options.decoder, encoder=encoder, output_width=width)

    def sample(self, slots: Tensor, *, seed: int) -> Masks:
        """Sample the masked patches of images, the same number for each, a function of (seed, slot) alone.

        Args:
            slots: Slots of the images, (b,).
            seed: Seed of the run.

        Returns:
            Indices of the visible and of the masked patches.
        """
        order = uniform(seed, "masked patches", slots, self.encoder.patches).argsort(dim=1)
        masked_ids, visible_ids = order.tensor_split([self.options.count(self.encoder.patches)], dim=1)
        return Masks(visible_ids, masked_ids)

    def predict(self, images: Tensor, noise: Masks, depth_noise: Tensor | None = None) -> Tensor:
        """Predict the masked patches.

        Args:
            images: Images, (b, c, h, w), uint8 or float in [0, 1].
            noise: Masks of the images.
            depth_noise: Random numbers of stochastic depth, (b, 2 * depth), or None.

        Returns:
            Predictions, (b, m, c * p * q).

        Raises:
            OptionError: The images do not have the encoder's size, for which the masks are sampled.
        """
        self.encoder.check_size(images)
        encoded = self.encoder(images, noise.visible_ids, depth_noise=depth_noise)
        return self.decoder(encoded, noise.visible_ids, noise.masked_ids)

    def labels(self, images: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the labels of patches: pixels as the encoder normalises them.

        With norm_pixels, each patch is standardised by its mean and standard deviation.

        Args:
            images: Images, (b, c, h, w), uint8 or float in [0, 1].
            ids: Indices of patches, (b, m); None: all patches.

        Returns:
            Labels, (b, n, c * p * q), or (b, m, c * p * q) with ids.
        """
        pixels = self._pixels(images, ids)
        if not self.options.norm_pixels:
            return pixels
        # Layer norm, which divides squares by n and not by n - 1, is several times faster than mean and variance.
        n = pixels.shape[-1]
        return F.layer_norm(pixels, (n,), eps=_EPSILON * (n - 1) / n) * math.sqrt((n - 1) / n)

    def paint(self, labels: Tensor, images: Tensor) -> Tensor:
        """Convert labels (b, n, c * p * q) to images in [0, 1].

        With norm_pixels, each patch gets the mean and the standard deviation of the same patch of `images` (b, c, h,
        w).
        """
        if self.options.norm_pixels:
            variance, mean = torch.var_mean(self._pixels(images), dim=-1, keepdim=True)
            labels = labels * (variance + _EPSILON).sqrt() + mean
        p, q = self.encoder.patch_size
        rows = images.shape[2] // p
        painted = rearrange(labels, "b (y x) (c p q) -> b c (y p) (x q)", y=rows, p=p, q=q)
        channel_mean, channel_std = (value[:, None, None] for value in (self.encoder.mean, self.encoder.std))
        return (painted * channel_std + channel_mean).clamp(0, 1)

    def forward(self, batch: Batch, noise: Masks, scheduled: Mapping[str, Tensor] = EMPTY) -> dict[str, Tensor]:
        """Return the mean squared error over the pixels of the masked patches."""
        prediction = self.predict(batch.only_view(), noise, self.depth_noise(batch))
        truth = self.labels(batch.only_view(), noise.masked_ids)
        return {"loss": F.mse_loss(prediction.to(truth.dtype), truth)}

    def _pixels(self, images: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return patches as the encoder normalises them: -> (b, n, c * p * q), or (b, m, c * p * q) for ids (b, m)."""
        patches = self.encoder.patchify(images, ids).unflatten(-1, (self.encoder.channels, *self.encoder.patch_size))
        return self.encoder.normalise(patches).flatten(-3)
