"""Self-distillation of views and masked patches (iBOT, Zhou et al. 2022): DINO, and a teacher that is a tokenizer.

In some of the student's global views, blocks of patches are masked. The teacher sees these views completely. The
student predicts the teacher's prototypes of each masked patch, in addition to those of the views.

Letters: b images, v views, t of them global, c channels, h, w pixels, n patches, m patches that may be hidden, d width,
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

VIEWS = 2  # global ones


class Masks(NamedTuple):
    """Of each global view the first `counts` (b, t) of `ids` (b, t, m), both int64, are hidden.

    As many ids for every view, so that shapes are static; the others have no weight in the loss.
    """

    ids: Tensor
    counts: Tensor


class IBot(Dino):
    """The options are those of `ibot_options.IBot`.

    It differs from the authors' code in the shape of blocks (`rectangle_order`), and own_head makes a head of its own
    and not only prototypes of its own.
    """

    options: ibot_options.IBot
    patch_center: Tensor

    def __init__(self, options: ibot_options.IBot, *, encoder: ViT) -> None:
        super().__init__(options, encoder=encoder)
        self.patch_head: Head | None = None
        if options.own_head:
            self.patch_head = Head(encoder.width, options)
        self.mask_token = nn.Parameter(torch.zeros(encoder.width))
        self.teacher = Teacher(self.student)  # with the head of patches
        self.register_buffer("patch_center", torch.zeros(options.prototypes))

    @property
    def student(self) -> Student:
        """The encoder and the heads."""
        return Student(self.encoder, self.head, getattr(self, "patch_head", None))

    def sample(self, slots: Tensor, *, seed: int) -> Masks:
        """Which patches of the global views of the images of slots (b,) are hidden: a function of (seed, slot)."""
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
        """Logits of the images (b, k), of the patches ids (b, m), (b, m, k), and their mean over all patches, (k,).

        OptionError for images of another size than the encoder's, for which the masks are sampled.
        """
        self.encoder.check_size(images)
        teacher = self.teacher.module
        head = of_patches(teacher)
        outputs = teacher.encoder(images)
        projected = head.project(outputs[:, teacher.encoder.num_prefix_tokens :])
        # Logits are linear in what is projected, so their mean needs no logits of all patches.
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
        """Logits of the images (b, k) and the patches ids (b, m), (b, m, k), the first counts (b,) of them hidden."""
        encoder = self.encoder
        tokens = encoder.embed(images)
        hidden = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=ids.device).scatter(1, ids, chosen(ids, counts))
        tokens = torch.where(hidden[:, :, None], self.mask_token.to(tokens.dtype), tokens)
        outputs = encoder.encode(tokens, grid=encoder.grid_of(images), depth_noise=depth_noise)
        patches = gather(outputs, ids + encoder.num_prefix_tokens)
        return self.head(encoder.pool(outputs), gradient), of_patches(self)(patches, gradient)

    def patch_targets(self, logits: Tensor, temperature: Tensor | float) -> Tensor:
        """As `targets`, with the patches' own centre: (..., k) -> (..., k)."""
        return ((logits - self.patch_center) / temperature).log_softmax(-1)

    def forward(self, batch: Batch, noise: Masks, scheduled: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """DINO's loss and the patches', their targets' entropies, and the means for `after_step`, both (k,)."""
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
    """The head of patches, which may be that of images."""
    return student.head if student.patch_head is None else student.patch_head


def chosen(ids: Tensor, counts: Tensor) -> Tensor:
    """Whether each of ids (b, m) is one of the first counts (b,): -> (b, m) bool."""
    return torch.arange(ids.shape[1], device=ids.device) < counts[:, None]


def patch_cross_entropy(targets: Tensor, log_probabilities: Tensor, counts: Tensor) -> Tensor:
    """The mean over images of their hidden patches' mean, 0 for an image without: both (b, m, k), (b,) -> ()."""
    losses = -(targets * log_probabilities).sum(-1)
    return ((losses * chosen(losses, counts)).sum(1) / counts.clamp(min=1)).mean()
