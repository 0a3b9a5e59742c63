"""Latent prediction (data2vec 2.0, Baevski et al. 2022): predict a teacher's features of the patches that are masked.

The teacher, a moving average of the encoder, sees the complete image once. The encoder sees the visible patches of
several masks of that image, so one forward pass of the teacher serves all of them. A light convolutional decoder
predicts the masked patches.

Letters: b images, k masks an image, n patches, m masked patches of a mask, d width, e width of the decoder.
"""

import math
from collections.abc import Mapping
from itertools import islice

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.models.block import gather
from ssvit.models.positions import Grid
from ssvit.models.vit import ViT
from ssvit.objectives import latent_options
from ssvit.objectives.base import NOTHING, Objective, at_least_float32
from ssvit.objectives.masking import Masks, visible_blocks
from ssvit.objectives.teacher import Teacher

_EPSILON = 1e-5  # added to variances, as torch's norms do


class Convolutions(nn.Module):
    """The decoder: grouped convolutions over the grid of patches, each with a layer norm, GELU and its input added.

    Its options are those of `latent_options.Convolutions`; input_width: d (fairseq:
    data2vec/models/modalities/modules.py).
    """

    def __init__(self, options: latent_options.Convolutions, *, grid: Grid, input_width: int) -> None:
        super().__init__()
        self.grid = grid
        width = options.width
        self.layers = nn.ModuleList(
            nn.Conv2d(width if layer else input_width, width, options.kernel, padding="same", groups=options.groups)
            for layer in range(options.depth)
        )
        self.head = nn.Linear(width, input_width)

    def forward(self, x: Tensor, masked_ids: Tensor) -> Tensor:
        """All patches, the masked ones 0, -> what the masked are: (b, n, d), (b, m) -> (b, m, d)."""
        for layer in self.layers:
            convolved = layer(rearrange(x, "b (y x) d -> b d y x", y=self.grid[0]))
            convolved = rearrange(convolved, "b e y x -> b (y x) e")
            changed = F.gelu(F.layer_norm(convolved, convolved.shape[-1:]))
            x = x + changed if x.shape == changed.shape else changed
        return self.head(gather(x, masked_ids))


class Latent(Objective):
    """The options are those of `latent_options.Latent`.

    The student's encoder is probed and exported, as by the authors.

    Of the authors' code it differs in three points. The encoder is pre-norm, so the targets are its layers' outputs
    and not those of their MLPs. The decoder has 0 for masked patches, not noise of deviation 0.01. The class token's
    loss is a mean (see `latent_options.Latent.class_token_weight`).
    """

    encoder: ViT
    options: latent_options.Latent

    def __init__(self, options: latent_options.Latent, *, encoder: ViT) -> None:
        super().__init__(options, encoder)
        self.decoder = Convolutions(options.decoder, grid=encoder.grid, input_width=encoder.width)
        self.teacher = Teacher(encoder)

    def sample(self, slots: Tensor, *, seed: int) -> Masks:
        """Return the masks of the images of slots (b,), (b, k, n - m) and (b, k, m): a function of (seed, slot)."""
        own, grid = self.options, self.encoder.grid
        masked = own.count(self.encoder.patches)
        visible = self.encoder.patches - masked
        orders = [
            visible_blocks(slots, seed=seed, grid=grid, visible=visible, length=own.block, adjust=own.adjust, view=mask)
            for mask in range(own.masks)
        ]
        return Masks(*torch.stack(orders, dim=1).split([visible, masked], dim=2))

    @torch.no_grad()
    def targets(self, images: Tensor) -> Tensor:
        """What is predicted of each patch, from the whole image: (b, c, h, w), [0, 1] or uint8, -> (b, n, d).

        The teacher's upper layers, each normalised over the patches of an image (instance norm), their mean, and that
        normalised over a patch's numbers (layer norm).
        """
        encoder = self.teacher.module
        first = len(encoder.blocks) - self.options.layers
        total = torch.zeros((), device=images.device)
        for tokens in islice(encoder.layers(images), first, None):
            patches = at_least_float32(tokens[:, encoder.num_prefix_tokens :])
            centred = patches - patches.mean(1, keepdim=True)
            total = total + centred * (centred.square().mean(1, keepdim=True) + _EPSILON).rsqrt()
        return F.layer_norm(total / self.options.layers, total.shape[-1:], eps=_EPSILON)

    def predict(self, images: Tensor, noise: Masks, depth_noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of the masked patches, (b, k, m, d), and the encoder's first output for each mask, (b, k, d).

        OptionError for images of another size than the encoder's, for which the masks are sampled.
        """
        encoder, b = self.encoder, len(images)
        encoder.check_size(images)
        visible_ids, masked_ids = (ids.flatten(0, 1) for ids in noise)
        tokens = encoder.embed(images, noise.visible_ids.flatten(1)).view(*visible_ids.shape, -1)
        if depth_noise is not None:
            depth_noise = rearrange(depth_noise, "(k b) l -> (b k) l", b=b)
        encoded = encoder.encode(tokens, patch_ids=visible_ids, depth_noise=depth_noise)
        patches = encoded[:, encoder.num_prefix_tokens :]
        # Indices of whole rows, so that each output is written to its patch's place at once.
        rows = visible_ids + torch.arange(len(visible_ids), device=visible_ids.device)[:, None] * encoder.patches
        placed = torch.zeros(len(patches) * encoder.patches, encoder.width, dtype=patches.dtype, device=patches.device)
        placed = placed.index_copy(0, rows.flatten(), patches.flatten(0, 1)).unflatten(0, (len(patches), -1))
        prediction = self.decoder(placed, masked_ids)
        return prediction.unflatten(0, (b, -1)), encoded[:, 0].unflatten(0, (b, -1))

    def loss(self, prediction: Tensor, truth: Tensor) -> Tensor:
        """The squared errors of the numbers of a vector, their sum over the root of d, its mean: (..., d) -> ()."""
        return (at_least_float32(prediction) - truth).square().mean() * math.sqrt(truth.shape[-1])

    def masked(self, targets: Tensor, noise: Masks) -> Tensor:
        """The targets of the masked patches: (b, n, d) -> (b, k, m, d)."""
        return gather(targets, noise.masked_ids.flatten(1)).unflatten(1, noise.masked_ids.shape[1:])

    def forward(self, batch: Batch, noise: Masks, scheduled: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """The loss of the masked patches, and that of the class token, which predicts the mean target."""
        targets = self.targets(batch.only_view())
        prediction, token = self.predict(batch.only_view(), noise, self.depth_noise(batch, self.options.masks))
        loss = patch_loss = self.loss(prediction, self.masked(targets, noise))
        if self.options.class_token_weight:
            mean = targets.mean(1, keepdim=True).expand_as(token)
            loss = patch_loss + self.options.class_token_weight * self.loss(token, mean)
        return {"loss": loss, "patch_loss": patch_loss.detach()}

    def after_step(self, outputs: Mapping[str, Tensor], scheduled: Mapping[str, Tensor], applied: Tensor) -> None:
        """Update the teacher."""
        self.teacher.update(self.encoder, scheduled["teacher_momentum"], applied)
