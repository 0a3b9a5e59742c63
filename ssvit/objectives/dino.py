"""Implement self-distillation with no labels (DINO, Caron et al. 2021): predict a teacher's prototypes of other views.

The teacher is a moving average of the student and encodes the global views; the student encodes all views. Targets are
centred, so that no prototype dominates, and sharpened by a low temperature, so that they do not become uniform: these
two operations alone prevent collapse (section 3.1).

Letters: b images, v views, t of them global, c channels, h, w pixels, d width, k prototypes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.models.vit import ViT
from ssvit.objectives import dino_options
from ssvit.objectives.base import NOTHING, Objective, at_least_float32
from ssvit.objectives.teacher import Teacher
from ssvit.options import UserError


class Head(nn.Module):
    """Compute the cosines of a feature vector, after three layers, with the prototypes: (b, d) -> (b, k).

    This is lightly's DINOProjectionHead, which cannot be deep-copied, with a normalised last layer. Cosines are
    computed in float32 under autocast too: half precision would round away most of their differences.
    """

    def __init__(self, width: int, options: dino_options.Dino) -> None:
        super().__init__()
        hidden, bottleneck = options.hidden, options.bottleneck
        first, second, third = nn.Linear(width, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, bottleneck)
        self.layers = nn.Sequential(first, nn.GELU(), second, nn.GELU(), third)
        for layer in (first, second, third):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.prototypes = nn.Parameter(torch.empty(options.prototypes, bottleneck))
        nn.init.uniform_(self.prototypes, -(bottleneck**-0.5), bottleneck**-0.5)

    def forward(self, x: Tensor, gradient: Tensor | float = 1.0) -> Tensor:
        """Return the cosines with the prototypes.

        Args:
            x: Feature vectors, (..., d).
            gradient: Factor of the gradient of the prototypes; the result does not depend on it.

        Returns:
            Cosines, (..., k).
        """
        return self.compare(self.project(x), gradient)

    def project(self, x: Tensor) -> Tensor:
        """Return the unit vectors that are compared with the prototypes: (..., d) -> (..., bottleneck)."""
        x = self.layers(x)
        with torch.autocast(x.device.type, enabled=False):
            return F.normalize(at_least_float32(x), dim=-1)

    def compare(self, projected: Tensor, gradient: Tensor | float = 1.0) -> Tensor:
        """Return the cosines of unit vectors with the prototypes: (..., bottleneck) -> (..., k)."""
        prototypes = self.prototypes * gradient + self.prototypes.detach() * (1 - gradient)
        with torch.autocast(projected.device.type, enabled=False):
            return projected @ F.normalize(at_least_float32(prototypes), dim=-1).T


class Student(nn.Module):
    """Hold the modules that the teacher averages.

    Args:
        encoder: The encoder.
        head: Head of the views.
        patch_head: Separate head of the patches; None without one.
    """

    def __init__(self, encoder: ViT, head: Head, patch_head: Head | None = None) -> None:
        super().__init__()
        self.encoder, self.head, self.patch_head = encoder, head, patch_head


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

    def teacher_logits(self, views: Sequence[Tensor]) -> Tensor:
        """Return the teacher's logits of groups of views, each (b, v, c, h, w): -> (all v, b, k)."""
        with torch.no_grad():
            return logits(self.teacher.module.encoder, self.teacher.module.head, views)

    def student_logits(
        self, views: Sequence[Tensor], gradient: Tensor | float = 1.0, depth_noise: Tensor | None = None
    ) -> Tensor:
        """Return the student's logits of groups of views.

        Args:
            views: Groups of views, each (b, v, c, h, w).
            gradient: Factor of the gradient of the prototypes.
            depth_noise: Random numbers of stochastic depth for all views, or None.

        Returns:
            Logits, (all v, b, k).
        """
        return logits(self.encoder, self.head, views, gradient, depth_noise)

    def targets(self, logits: Tensor, temperature: Tensor | float) -> Tensor:
        """Return the teacher's log-probabilities of the prototypes, centred and sharpened: (..., k) -> (..., k)."""
        return ((logits - self.center) / temperature).log_softmax(-1)

    def forward(self, batch: Batch, noise: Any, scheduled: Mapping[str, Tensor] = NOTHING) -> dict[str, Tensor]:
        """Return the mean loss, the entropy of the targets, and for `after_step` the mean teacher logits, (k,)."""
        views = groups(batch)
        teacher = self.teacher_logits(views[:1])
        depth_noise = self.depth_noise(batch, number_of_views(views))
        return self.compare(teacher, self.student_logits(views, scheduled["last_layer"], depth_noise), scheduled)

    def compare(self, teacher: Tensor, student: Tensor, scheduled: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of `forward` from logits.

        Args:
            teacher: The teacher's logits of the global views, (t, b, k).
            student: The student's logits of all views, (v, b, k).
            scheduled: Value of each schedule at this step, ().

        Returns:
            Loss, entropy of the targets and mean of the teacher's logits, by name.
        """
        with torch.autocast(student.device.type, enabled=False):
            targets = self.targets(teacher, scheduled["teacher_temperature"])
            loss = cross_entropy(targets.exp(), (student / self.options.student_temperature).log_softmax(-1))
            return {"loss": loss, "target_entropy": entropy(targets).mean(), "teacher_mean": teacher.mean((0, 1))}

    def frozen(self, scheduled: Mapping[str, float]) -> Iterable[Tensor]:
        """Return the prototypes while the factor of their gradient is 0."""
        student = self.student
        heads = () if scheduled["last_layer"] else (student.head, student.patch_head)
        return [head.prototypes for head in heads if head is not None]

    def after_step(self, outputs: Mapping[str, Tensor], scheduled: Mapping[str, Tensor], applied: Tensor) -> None:
        """Update the centre and the teacher."""
        follow(self.center, outputs["teacher_mean"], self.options.center_momentum, applied)
        self.teacher.update(self.student, scheduled["teacher_momentum"], applied)


def groups(batch: Batch) -> list[Tensor]:
    """Return the global views and the local views, if any, each (b, v, c, h, w).

    Raises:
        UserError: The batch has no global views.
    """
    if "global" not in batch.views:
        raise UserError("data.augment: DINO needs several views of an image; add augment@data.augment=multi_crop")
    return [batch.views[name] for name in ("global", "local") if name in batch.views]


def follow(center: Tensor, mean: Tensor, momentum: float, applied: Tensor) -> None:
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
    encoder: ViT,
    head: Head,
    views: Sequence[Tensor],
    gradient: Tensor | float = 1.0,
    depth_noise: Tensor | None = None,
) -> Tensor:
    """Return the logits of groups of views; views of one group have the same size and are encoded together.

    Args:
        encoder: The encoder.
        head: The head.
        views: Groups of views, each (b, v, c, h, w).
        gradient: Factor of the gradient of the prototypes.
        depth_noise: Random numbers of stochastic depth for all views, or None.

    Returns:
        Logits, (all v, b, k).
    """
    images = [rearrange(group, "b v c h w -> (v b) c h w") for group in views]
    noises = [None] * len(images) if depth_noise is None else depth_noise.split([*map(len, images)])
    vectors = [encoder.represent(x, depth_noise=noise) for x, noise in zip(images, noises, strict=True)]
    return rearrange(head(torch.cat(vectors), gradient), "(v b) k -> v b k", b=len(views[0]))


def cross_entropy(targets: Tensor, log_probabilities: Tensor) -> Tensor:
    """Return the cross-entropy, averaged over images and pairs of a teacher's view and a different student's view.

    Args:
        targets: Probabilities of the teacher, (t, b, k).
        log_probabilities: Log-probabilities of the student, (v, b, k); its first t views are the teacher's.

    Returns:
        The mean, ().

    Raises:
        ValueError: There is only one view, and therefore no pair.
    """
    pairs = len(targets) * (len(log_probabilities) - 1)
    if not pairs:
        raise ValueError("one view alone has no other to be compared with")
    losses = -torch.einsum("tbk,vbk->tv", targets, log_probabilities) / targets.shape[1]
    return (losses.sum() - losses.diagonal().sum()) / pairs


def entropy(log_probabilities: Tensor) -> Tensor:
    """Return the entropy in nats: (..., k) -> (...)."""
    return -(log_probabilities.exp() * log_probabilities).sum(-1)
