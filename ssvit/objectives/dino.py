"""Implement self-distillation: DINO (Caron et al. 2021), and iBOT (Zhou et al. 2022), which adds masked patches.

The teacher is a moving average of the student and encodes the global views; the student encodes all views and predicts
the prototypes that the teacher assigns to other views of the image. Targets are centred, so that no prototype
dominates, and sharpened by a low temperature, so that they do not become uniform: these two operations alone prevent
collapse (DINO, section 3.1).

Letters: b images, v views, t of them global, c channels, h, w pixels, n patches, m patches that may be masked, d width,
k prototypes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.engine.randomness import uniform
from ssvit.models.block import gather_tokens
from ssvit.models.vit import ViT
from ssvit.objectives import dino_options
from ssvit.objectives.base import EMPTY, VIEWS, Objective, at_least_float32, mlp, scale_gradient, two_views
from ssvit.objectives.masked_patch import rectangle_order
from ssvit.objectives.teacher import Teacher


class Head(nn.Module):
    """Compute the cosines of a feature vector, after three layers, with the prototypes: (b, d) -> (b, k).

    This is lightly's DINOProjectionHead, which cannot be deep-copied, with a normalised last layer. Cosines are
    computed in float32 under autocast too: half precision would round away most of their differences.
    """

    def __init__(self, width: int, options: dino_options.Dino) -> None:
        super().__init__()
        widths = (width, options.hidden, options.hidden, options.bottleneck)
        # The identity keeps the names of the weights in checkpoints, which had a dropout layer there.
        self.layers = mlp(widths, between=(lambda hidden: nn.GELU(), nn.Identity))
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        bound = options.bottleneck**-0.5
        self.prototypes = nn.Parameter(torch.empty(options.prototypes, options.bottleneck).uniform_(-bound, bound))

    def forward(self, x: Tensor, gradient: Tensor | float = 1.0) -> Tensor:
        """Return the cosines with the prototypes.

        Args:
            x: Feature vectors, (..., d).
            gradient: Factor of the gradient of the prototypes; the result does not depend on it.

        Returns:
            Cosines, (..., k).
        """
        return self.cosines(self.project(x), gradient)

    def project(self, x: Tensor) -> Tensor:
        """Return the unit vectors that are compared with the prototypes: (..., d) -> (..., bottleneck)."""
        x = self.layers(x)
        with torch.autocast(x.device.type, enabled=False):
            return F.normalize(at_least_float32(x), dim=-1)

    def cosines(self, projected: Tensor, gradient: Tensor | float = 1.0) -> Tensor:
        """Return the cosines of unit vectors with the prototypes: (..., bottleneck) -> (..., k)."""
        prototypes = scale_gradient(self.prototypes, gradient)
        with torch.autocast(projected.device.type, enabled=False):
            return projected @ F.normalize(at_least_float32(prototypes), dim=-1).T


class Student(nn.Module):
    """Hold the modules that the teacher averages."""

    def __init__(self, encoder: ViT, head: Head) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head


class Dino(Objective):
    """Implement DINO, with the options of `dino_options.Dino`.

    Batches have "global" views and may have "local" views. The teacher's encoder is probed and exported, as in the
    authors' code.
    """

    encoder: ViT
    options: dino_options.Dino
    center: Tensor

    def __init__(self, options: dino_options.Dino, *, encoder: ViT) -> None:
        super().__init__(options, encoder)
        self.head = Head(encoder.width, options)
        self.teacher = Teacher(self.student)
        self.register_buffer("center", torch.zeros(options.prototypes))

    def backbone(self) -> ViT:
        """Return the teacher's encoder."""
        return self.teacher.module.encoder

    @property
    def student(self) -> Student:
        """Return the encoder and the head."""
        return Student(self.encoder, self.head)

    def forward(self, batch: Batch, noise: Any, scheduled: Mapping[str, Tensor] = EMPTY) -> dict[str, Tensor]:
        """Return the mean loss, the entropy of the targets, and for `after_step` the mean teacher logits, (k,)."""
        views = groups(batch)
        with torch.no_grad():
            teacher = logits(self.teacher.module, views[:1])
        student = logits(self, views, scheduled["last_layer"], self.depth_noise(batch, number_of_views(views)))
        return self.outputs(teacher, student, scheduled)

    def outputs(self, teacher: Tensor, student: Tensor, scheduled: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of `forward` from logits.

        Args:
            teacher: The teacher's logits of the global views, (t, b, k).
            student: The student's logits of all views, (v, b, k).
            scheduled: Value of each schedule at this step, ().

        Returns:
            Loss, entropy of the targets and mean of the teacher's logits, by name.
        """
        with torch.autocast(student.device.type, enabled=False):
            targets = sharpened(teacher, self.center, scheduled["teacher_temperature"])
            loss = cross_entropy(targets.exp(), (student / self.options.student_temperature).log_softmax(-1))
            return {"loss": loss, "target_entropy": entropy(targets).mean(), "teacher_mean": teacher.mean((0, 1))}

    def frozen(self, scheduled: Mapping[str, float]) -> Iterable[Tensor]:
        """Return the prototypes while the factor of their gradient is 0."""
        return () if scheduled["last_layer"] else (self.head.prototypes,)

    def after_step(self, outputs: Mapping[str, Tensor], scheduled: Mapping[str, Tensor], applied: Tensor) -> None:
        """Update the centre and the teacher."""
        update_mean(self.center, outputs["teacher_mean"], self.options.center_momentum, applied)
        self.teacher.update(self.student, scheduled["teacher_momentum"], applied)


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
    """Implement iBOT, with the options of `dino_options.IBot`.

    In some of the student's global views, blocks of patches are masked, while the teacher encodes these views
    completely. The student predicts the teacher's prototypes of each masked patch, in addition to DINO's prototypes of
    the views. The shape of the blocks differs from the authors' code (`rectangle_order`).
    """

    options: dino_options.IBot
    patch_center: Tensor

    def __init__(self, options: dino_options.IBot, *, encoder: ViT) -> None:
        super().__init__(options, encoder=encoder)
        self.mask_token = nn.Parameter(torch.zeros(encoder.width))
        self.register_buffer("patch_center", torch.zeros(options.prototypes))

    def sample(self, slots: Tensor, *, seed: int) -> Masks:
        """Sample the masked patches of the global views of images, a function of (seed, slot).

        Args:
            slots: Slots of the images, (b,).
            seed: Seed of the run.

        Returns:
            The masks.
        """
        options, n = self.options, self.encoder.patches
        ids, counts = [], []
        for view in range(VIEWS):
            order = uniform(seed, "masked patches", slots, n, view)
            order = order + rectangle_order(slots, seed=seed, grid=self.encoder.grid, view=view)
            chance, deviation = uniform(seed, "masked fraction", slots, 2, view).unbind(1)
            count = ((options.masked + options.spread * (2 * deviation - 1)) * n).round().clamp(min=1)
            ids.append(order.argsort(dim=1)[:, : options.max_masked(n)])
            counts.append(torch.where(chance < options.probability, count, 0).long())
        return Masks(torch.stack(ids, dim=1), torch.stack(counts, dim=1))

    @torch.no_grad()
    def teacher_logits(self, images: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
        encoder, head = self.teacher.module.encoder, self.teacher.module.head
        outputs = encoder(images)
        projected = head.project(outputs[:, encoder.num_prefix_tokens :])
        # Logits are linear in the projections, so the mean logits follow from the mean projection.
        mean = head.cosines(projected.mean((0, 1)))
        return head(encoder.pool(outputs)), head.cosines(gather_tokens(projected, ids)), mean

    def student_logits(
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
        masked = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=ids.device)
        masked = masked.scatter(1, ids, first_ids(ids, counts))
        tokens = torch.where(masked[:, :, None], self.mask_token.to(tokens.dtype), tokens)
        outputs = encoder.encode(tokens, grid=encoder.grid_of(images), depth_noise=depth_noise)
        patches = gather_tokens(outputs, ids + encoder.num_prefix_tokens)
        return self.head(encoder.pool(outputs), gradient), self.head(patches, gradient)

    def forward(self, batch: Batch, noise: Masks, scheduled: Mapping[str, Tensor] = EMPTY) -> dict[str, Tensor]:
        """Return the loss, its terms, the target entropies, and for `after_step` the mean teacher logits, (k,)."""
        views = groups(batch)
        images = rearrange(views[0], "b v c h w -> (v b) c h w")
        ids, counts = rearrange(noise.ids, "b v m -> (v b) m"), rearrange(noise.counts, "b v -> (v b)")
        gradient = scheduled["last_layer"]
        teacher, teacher_patches, patch_mean = self.teacher_logits(images, ids)
        depth_noise = self.depth_noise(batch, number_of_views(views))
        first, rest = (None, None) if depth_noise is None else depth_noise.tensor_split([len(images)])
        student, student_patches = self.student_logits(images, ids, counts, gradient, first)
        teacher, student = (rearrange(x, "(v b) k -> v b k", v=VIEWS) for x in (teacher, student))
        if views[1:]:
            student = torch.cat([student, logits(self, views[1:], gradient, rest)])
        result = self.outputs(teacher, student, scheduled)
        with torch.autocast(images.device.type, enabled=False):
            targets = sharpened(teacher_patches, self.patch_center, scheduled["patch_temperature"])
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
        update_mean(self.patch_center, outputs["patch_teacher_mean"], self.options.center_momentum, applied)


def groups(batch: Batch) -> list[Tensor]:
    """Return the two global views and the local views, if any, each (b, v, c, h, w).

    Raises:
        UserError: The batch does not have two global views.
    """
    local = batch.views.get("local")
    return [two_views(batch)] if local is None else [two_views(batch), local]


def update_mean(center: Tensor, mean: Tensor, momentum: float, applied: Tensor) -> None:
    """Update a running mean in place, unless the step was skipped.

    Args:
        center: Running mean, (k,).
        mean: Mean of this step, (k,).
        momentum: Weight of the running mean, in [0, 1].
        applied: Whether the update was applied, () bool.
    """
    center.copy_(torch.where(applied, torch.lerp(mean.to(center), center, momentum), center))


def number_of_views(views: Sequence[Tensor]) -> int:
    """Return the number of views per image in all groups."""
    return sum(group.shape[1] for group in views)


def logits(
    model: Dino | Student, views: Sequence[Tensor], gradient: Tensor | float = 1.0, depth_noise: Tensor | None = None
) -> Tensor:
    """Return the logits of groups of views; views of one group have the same size and are encoded together.

    Args:
        model: The student or the teacher.
        views: Groups of views, each (b, v, c, h, w).
        gradient: Factor of the gradient of the prototypes.
        depth_noise: Random numbers of stochastic depth for all views, or None.

    Returns:
        Logits, (all v, b, k).
    """
    images = [rearrange(group, "b v c h w -> (v b) c h w") for group in views]
    noises = [None] * len(images) if depth_noise is None else depth_noise.split([*map(len, images)])
    vectors = [model.encoder.represent(x, depth_noise=noise) for x, noise in zip(images, noises, strict=True)]
    return rearrange(model.head(torch.cat(vectors), gradient), "(v b) k -> v b k", b=len(views[0]))


def sharpened(logits: Tensor, center: Tensor, temperature: Tensor | float) -> Tensor:
    """Return the log-probabilities of the prototypes as targets.

    Args:
        logits: The teacher's logits, (..., k).
        center: Mean of its logits in earlier steps, (k,).
        temperature: Divisor of the centred logits.

    Returns:
        Log-probabilities, (..., k).
    """
    return ((logits - center) / temperature).log_softmax(-1)


def cross_entropy(targets: Tensor, log_probabilities: Tensor) -> Tensor:
    """Return the cross-entropy, averaged over images and pairs of a teacher's view and a different student's view.

    Args:
        targets: Probabilities of the teacher, (t, b, k).
        log_probabilities: Log-probabilities of the student, (v, b, k); its first t views are the teacher's.

    Returns:
        The mean, ().
    """
    pairs = len(targets) * (len(log_probabilities) - 1)
    losses = -torch.einsum("tbk,vbk->tv", targets, log_probabilities) / targets.shape[1]
    return (losses.sum() - losses.diagonal().sum()) / pairs


def entropy(log_probabilities: Tensor) -> Tensor:
    """Return the entropy in nats: (..., k) -> (...)."""
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


def first_ids(ids: Tensor, counts: Tensor) -> Tensor:
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
    return ((losses * first_ids(losses, counts)).sum(1) / counts.clamp(min=1)).mean()
