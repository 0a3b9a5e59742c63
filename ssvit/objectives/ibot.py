"""Implement self-distillation of views and masked patches (iBOT, Zhou et al. 2022).

In some of the student's global views, blocks of patches are masked, while the teacher encodes these views completely.
The student predicts the teacher's prototypes of each masked patch, in addition to DINO's prototypes of the views.

Letters: b images, v views, t of them global, c channels, h, w pixels, n patches, m patches that may be masked, d width,
k prototypes.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.models.block import gather
from ssvit.models.vit import ViT
from ssvit.objectives import ibot_options
from ssvit.objectives.base import NOTHING
from ssvit.objectives.dino import Dino, Head, Student, entropy, follow, groups, logits, number_of_views
from ssvit.objectives.masking import rectangle_order
from ssvit.objectives.teacher import Teacher
from ssvit.options import UserError
from ssvit.randomness import uniform

VIEWS = 2  # number of global views


class Masks(NamedTuple):
    """Hold the masked patches of global views.

    Every view has the same number of ids, so that shapes are static; ids beyond the count have no weight in the loss.

    Attributes:
        ids: Indices of patches, (b, t, m) int64, of which the first `counts` are masked.
        counts: Number of masked patches, (b, t) int64.
    """

    ids: Tensor
    counts: Tensor


class IBot(Dino):
    """Implement iBOT, with the options of `ibot_options.IBot`.

    It differs from the authors' code in the shape of blocks (`rectangle_order`), and own_head creates a complete
    separate head instead of separate prototypes only.
    """

    options: ibot_options.IBot
    patch_center: Tensor

    def __init__(self, options: ibot_options.IBot, *, encoder: ViT) -> None:
        super().__init__(options, encoder=encoder)
        self.patch_head: Head | None = None
        if options.own_head:
            self.patch_head = Head(encoder.width, options)
        self.mask_token = nn.Parameter(torch.zeros(encoder.width))
        self.teacher = Teacher(self.student)  # created again to include the patch head
        self.register_buffer("patch_center", torch.zeros(options.prototypes))

    @property
    def student(self) -> Student:
        """Return the encoder and the heads."""
        return Student(self.encoder, self.head, getattr(self, "patch_head", None))

    def sample(self, slots: Tensor, *, seed: int) -> Masks:
        """Sample the masked patches of the global views of images, a function of (seed, slot).

        Args:
            slots: Slots of the images, (b,).
            seed: Seed of the run.

        Returns:
            The masks.
        """
        own, n = self.options, self.encoder.patches
        ids, counts = [], []
        for view in range(VIEWS):
            order = uniform(seed, "masked patches", slots, n, view)
            order = order + rectangle_order(slots, seed=seed, grid=self.encoder.grid, view=view)
            chance, place = uniform(seed, "masked fraction", slots, 2, view).unbind(1)
            count = ((own.masked + own.spread * (2 * place - 1)) * n).round().clamp(min=1)
            ids.append(order.argsort(dim=1)[:, : own.most(n)])
            counts.append(torch.where(chance < own.probability, count, 0).long())
        return Masks(torch.stack(ids, dim=1), torch.stack(counts, dim=1))

    @torch.no_grad()
    def teacher_answers(self, images: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the teacher's logits.

        Args:
            images: Global views, (b, c, h, w), uint8 or float in [0, 1].
            ids: Indices of patches, (b, m).

        Returns:
            Logits of the images (b, k), of the patches (b, m, k), and their mean over all patches, (k,).

        Raises:
            OptionError: The images do not have the encoder's size, for which the masks are sampled.
        """
        self.encoder.check_size(images)
        teacher = self.teacher.module
        head = of_patches(teacher)
        outputs = teacher.encoder(images)
        projected = head.project(outputs[:, teacher.encoder.num_prefix_tokens :])
        # Logits are linear in the projections, so the mean logits follow from the mean projection.
        mean = head.compare(projected.mean((0, 1)))
        return teacher.head(teacher.encoder.pool(outputs)), head.compare(gather(projected, ids)), mean

    def student_answers(
        self,
        images: Tensor,
        ids: Tensor,
        counts: Tensor,
        gradient: Tensor | float = 1.0,
        depth_noise: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the student's logits.

        Args:
            images: Global views, (b, c, h, w), uint8 or float in [0, 1].
            ids: Indices of patches, (b, m).
            counts: Number of these that are masked, from the first, (b,).
            gradient: Factor of the gradient of the prototypes.
            depth_noise: Random numbers of stochastic depth, (b, 2 * depth), or None.

        Returns:
            Logits of the images (b, k), and of the patches (b, m, k).
        """
        encoder = self.encoder
        tokens = encoder.embed(images)
        hidden = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=ids.device).scatter(1, ids, chosen(ids, counts))
        tokens = torch.where(hidden[:, :, None], self.mask_token.to(tokens.dtype), tokens)
        outputs = encoder.encode(tokens, grid=encoder.grid_of(images), depth_noise=depth_noise)
        patches = gather(outputs, ids + encoder.num_prefix_tokens)
        return self.head(encoder.pool(outputs), gradient), of_patches(self)(patches, gradient)

    def patch_targets(self, logits: Tensor, temperature: Tensor | float) -> Tensor:
        """Return log-probabilities as `targets` does, centred by the centre of the patches: (..., k) -> (..., k)."""
        return ((logits - self.patch_center) / temperature).log_softmax(-1)

    def forward(self, batch: Batch, noise: Masks, scheduled: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """Return the loss, its terms, the target entropies, and for `after_step` the mean teacher logits, (k,)."""
        views = groups(batch)
        if views[0].shape[1] != VIEWS:
            raise UserError(f"data.augment: iBOT needs {VIEWS} global views of an image, not {views[0].shape[1]}")
        images = rearrange(views[0], "b v c h w -> (v b) c h w")
        ids, counts = rearrange(noise.ids, "b v m -> (v b) m"), rearrange(noise.counts, "b v -> (v b)")
        gradient = scheduled["last_layer"]
        teacher, teacher_patches, patch_mean = self.teacher_answers(images, ids)
        depth_noise = self.depth_noise(batch, number_of_views(views))
        first, rest = (None, None) if depth_noise is None else depth_noise.tensor_split([len(images)])
        student, student_patches = self.student_answers(images, ids, counts, gradient, first)
        teacher, student = (rearrange(one, "(v b) k -> v b k", v=VIEWS) for one in (teacher, student))
        if views[1:]:
            student = torch.cat([student, logits(self.encoder, self.head, views[1:], gradient, rest)])
        result = self.compare(teacher, student, scheduled)
        with torch.autocast(images.device.type, enabled=False):
            targets = self.patch_targets(teacher_patches, scheduled["patch_temperature"])
            student_patches = student_patches / self.options.student_temperature
            patch_loss = patch_cross_entropy(targets.exp(), student_patches.log_softmax(-1), counts)
            return {
                **result,
                "loss": result["loss"] + self.options.patch_weight * patch_loss,
                "view_loss": result["loss"].detach(),
                "patch_loss": patch_loss.detach(),
                "patch_target_entropy": entropy(targets).mean(),
                "patch_teacher_mean": patch_mean,
            }

    def after_step(self, outputs: Mapping[str, Tensor], scheduled: Mapping[str, Tensor], applied: Tensor) -> None:
        """Update both centres and the teacher."""
        super().after_step(outputs, scheduled, applied)
        follow(self.patch_center, outputs["patch_teacher_mean"], self.options.center_momentum, applied)


def of_patches(student: Student | IBot) -> Head:
    """Return the patch head, or the head of the views if both are the same."""
    return student.head if student.patch_head is None else student.patch_head


def chosen(ids: Tensor, counts: Tensor) -> Tensor:
    """Return a mask of the first `counts` (b,) of the patches `ids` (b, m): -> (b, m) bool."""
    return torch.arange(ids.shape[1], device=ids.device) < counts[:, None]


def patch_cross_entropy(targets: Tensor, log_probabilities: Tensor, counts: Tensor) -> Tensor:
    """Return the cross-entropy, averaged over the masked patches of each image and then over images.

    Args:
        targets: Probabilities of the teacher, (b, m, k).
        log_probabilities: Log-probabilities of the student, (b, m, k).
        counts: Number of masked patches, from the first, (b,); an image without any counts as 0.

    Returns:
        The mean, ().
    """
    losses = -(targets * log_probabilities).sum(-1)
    return ((losses * chosen(losses, counts)).sum(1) / counts.clamp(min=1)).mean()
