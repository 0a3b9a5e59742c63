"""Implement latent prediction (data2vec 2.0, Baevski et al. 2022): predict a teacher's features of the masked patches.

The teacher, a moving average of the encoder, encodes the complete image once. The encoder encodes the visible patches
of several masks of that image, so one forward pass of the teacher serves all masks. A light convolutional decoder
predicts the masked patches.

Letters: b images, k masks per image, n patches, m masked patches of a mask, d width, e width of the decoder.
"""

import math
from collections.abc import Mapping
from itertools import islice

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.engine.randomness import uniform
from ssvit.models.block import gather_tokens
from ssvit.models.positions import Grid
from ssvit.models.vit import ViT
from ssvit.objectives import latent_options
from ssvit.objectives.base import EMPTY, Objective, at_least_float32
from ssvit.objectives.mae import Masks
from ssvit.objectives.teacher import Teacher

_EPSILON = 1e-5  # epsilon of the norms, torch's default


class Convolutions(nn.Module):
    """Implement the decoder: grouped residual convolutions over the patch grid, each with layer norm and GELU.

    Args:
        options: Options of the decoder (fairseq: data2vec/models/modalities/modules.py).
        grid: Rows and columns of patches.
        input_width: Width of the encoder, d.
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
        """Predict the masked patches from all patches, with zeros for masked ones: (b, n, d), (b, m) -> (b, m, d)."""
        for layer in self.layers:
            convolved = layer(rearrange(x, "b (y x) d -> b d y x", y=self.grid[0]))
            convolved = rearrange(convolved, "b e y x -> b (y x) e")
            changed = F.gelu(F.layer_norm(convolved, convolved.shape[-1:]))
            x = x + changed if x.shape == changed.shape else changed
        return self.head(gather_tokens(x, masked_ids))


class Latent(Objective):
    """Implement latent prediction, with the options of `latent_options.Latent`.

    The student's encoder is probed and exported, as in the authors' code. There are three differences from that code:
    the encoder is pre-norm, so the targets are outputs of its layers and not of their MLPs; the decoder gets zeros for
    masked patches, not noise of deviation 0.01; and the class token's loss is a mean (see
    `latent_options.Latent.class_token_weight`).
    """

    encoder: ViT
    options: latent_options.Latent

    def __init__(self, options: latent_options.Latent, *, encoder: ViT) -> None:
        super().__init__(options, encoder)
        self.decoder = Convolutions(options.decoder, grid=encoder.grid, input_width=encoder.width)
        self.teacher = Teacher(encoder)

    def sample(self, slots: Tensor, *, seed: int) -> Masks:
        """Sample the masks of images, a function of (seed, slot).

        Args:
            slots: Slots of the images, (b,).
            seed: Seed of the run.

        Returns:
            Visible patches (b, k, n - m) and masked patches (b, k, m).
        """
        masked = self.options.count(self.encoder.patches)
        visible = self.encoder.patches - masked
        orders = [self.visible_blocks(slots, visible, seed=seed, mask=mask) for mask in range(self.options.masks)]
        return Masks(*torch.stack(orders, dim=1).split([visible, masked], dim=2))

    def visible_blocks(self, slots: Tensor, visible: int, *, seed: int, mask: int) -> Tensor:
        """Return an order of the patches whose first `visible` ones lie in blocks: inverse block masking.

        Square blocks are centred on random patches and cropped at the image border; their number would cover the
        fraction of visible patches, plus the option `adjust`, without overlap. Random patches are added or removed
        until the number is exact (fairseq: compute_block_mask_2d).

        Args:
            slots: Slots of the images, (b,).
            visible: Number of visible patches.
            seed: Seed of the run.
            mask: Index of the mask of an image.

        Returns:
            Patch indices, (b, n).
        """
        (_, width), n, length = self.encoder.grid, self.encoder.patches, self.options.block
        count = max(1, int(n * (visible / n + self.options.adjust) / length**2))
        center = (uniform(seed, "block centres", slots, count, mask) * n).long()
        patches = torch.arange(n, device=slots.device)
        # Offsets start at -(length // 2); for an even length, the block is not symmetric, as in the authors' code.
        rows = patches // width - (center // width)[..., None] + length // 2
        columns = patches % width - (center % width)[..., None] + length // 2
        inside = (rows >= 0) & (rows < length) & (columns >= 0) & (columns < length)  # (b, blocks, n)
        return (uniform(seed, "block order", slots, n, mask) + ~inside.any(1)).argsort(dim=1)

    @torch.no_grad()
    def targets(self, images: Tensor) -> Tensor:
        """Return the targets of all patches, computed by the teacher: (b, c, h, w), uint8 or [0, 1], -> (b, n, d).

        The outputs of the teacher's upper layers are normalised over the patches of an image (instance norm) and
        averaged, and the mean is normalised over the channels of a patch (layer norm).
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
        """Predict the masked patches.

        Args:
            images: Images, (b, c, h, w), uint8 or float in [0, 1].
            noise: Masks of the images.
            depth_noise: Random numbers of stochastic depth, (k b, 2 * depth), or None.

        Returns:
            Predictions (b, k, m, d), and the encoder's first output for each mask (b, k, d).

        Raises:
            OptionError: The images do not have the encoder's size, for which the masks are sampled.
        """
        encoder, b = self.encoder, len(images)
        encoder.check_size(images)
        visible_ids, masked_ids = (ids.flatten(0, 1) for ids in noise)
        tokens = encoder.embed(images, noise.visible_ids.flatten(1)).view(*visible_ids.shape, -1)
        if depth_noise is not None:
            depth_noise = rearrange(depth_noise, "(k b) l -> (b k) l", b=b)
        encoded = encoder.encode(tokens, patch_ids=visible_ids, depth_noise=depth_noise)
        patches = encoded[:, encoder.num_prefix_tokens :]
        # Flat row indices, so that one index_copy writes all outputs to the positions of their patches.
        rows = visible_ids + torch.arange(len(visible_ids), device=visible_ids.device)[:, None] * encoder.patches
        placed = torch.zeros(len(patches) * encoder.patches, encoder.width, dtype=patches.dtype, device=patches.device)
        placed = placed.index_copy(0, rows.flatten(), patches.flatten(0, 1)).unflatten(0, (len(patches), -1))
        prediction = self.decoder(placed, masked_ids)
        return prediction.unflatten(0, (b, -1)), encoder.class_output(encoded).unflatten(0, (b, -1))

    def loss(self, prediction: Tensor, truth: Tensor) -> Tensor:
        """Return the squared error summed over channels, divided by sqrt(d), its mean over vectors: (..., d) -> ()."""
        return (at_least_float32(prediction) - truth).square().mean() * math.sqrt(truth.shape[-1])

    def forward(self, batch: Batch, noise: Masks, scheduled: Mapping[str, Tensor] = EMPTY) -> dict[str, Tensor]:
        """Return the loss of the masked patches plus the loss of the class token, which predicts the mean target."""
        targets = self.targets(batch.only_view())
        prediction, token = self.predict(batch.only_view(), noise, self.depth_noise(batch, self.options.masks))
        truth = gather_tokens(targets, noise.masked_ids.flatten(1)).unflatten(1, noise.masked_ids.shape[1:])
        loss = patch_loss = self.loss(prediction, truth)
        if self.options.class_token_weight:
            mean = targets.mean(1, keepdim=True).expand_as(token)
            loss = patch_loss + self.options.class_token_weight * self.loss(token, mean)
        return {"loss": loss, "patch_loss": patch_loss.detach()}

    def after_step(self, outputs: Mapping[str, Tensor], scheduled: Mapping[str, Tensor], applied: Tensor) -> None:
        """Update the teacher."""
        self.teacher.update(self.encoder, scheduled["teacher_momentum"], applied)
