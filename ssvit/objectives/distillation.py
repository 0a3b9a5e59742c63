"""Distillation: a trained classifier, the teacher, is a second opinion on each image (Hinton et al. 2015, DeiT).

The teacher is held outside of torch's modules, so that it is neither trained nor saved nor spread over processes.

Letters: b images, k classes.
"""

from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.models.vit import ViT
from ssvit.objectives import rules
from ssvit.objectives.base import Objective
from ssvit.options import UserError


class Distillation:
    """What a classifier loses against its teacher, and how much that weighs.

    teacher: a trained `ssvit.objectives.classify.Classify`. kind: hard, the teacher's first choice is the label
    (Touvron et al. 2021, section 4), or soft, its probabilities at a temperature are (Hinton et al. 2015). weight: of
    the teacher's opinion, the rest is the label's. reduction: of soft; batch, summed over the classes, the mean over
    the images, or elements, the mean over both, k times less, as DeiT's code has it (deit: losses.py). OptionError
    names an option that cannot be.
    """

    def __init__(
        self,
        *,
        teacher: Objective,
        kind: str = "hard",
        temperature: float = 3.0,
        weight: float = 0.5,
        reduction: str = "batch",
    ) -> None:
        rules.distillation(kind=kind, temperature=temperature, weight=weight, reduction=reduction)
        self.teacher = teacher.eval()
        self.kind, self.temperature, self.weight, self.reduction = kind, temperature, weight, reduction

    def check(self, encoder: ViT, classes: Sequence[str]) -> None:
        """UserError unless the teacher takes the images of this encoder and knows these classes, in this order."""
        own, theirs = ("x".join(map(str, (vit.channels, *vit.image_size))) for vit in (encoder, self.teacher.encoder))
        if own != theirs:
            raise UserError(f"distillation.teacher: takes images of {theirs}, this encoder takes {own}")
        for number, (known, wanted) in enumerate(zip_longest(self.teacher.classes, classes)):
            if known != wanted:
                raise UserError(
                    f"distillation.teacher: must know the same classes in the same order, but its class {number} "
                    f"(of {len(self.teacher.classes)}) is {known}, not {wanted} (of {len(classes)})"
                )

    def loss(self, logits: Tensor, images: Tensor) -> Tensor:
        """The mean loss of a student's logits (b, k) on images (b, c, h, w) against the teacher's, -> ().

        hard: cross-entropy with the teacher's first choice. soft: temperature^2 * KL(teacher || student), both at the
        temperature, so that its gradients stay as large as those of labels (Hinton et al. 2015, section 2).
        """
        opinion = self._ask(images)
        if self.kind == "hard":
            return F.cross_entropy(logits, opinion.argmax(1))
        student, teacher = (F.log_softmax(x / self.temperature, 1, dtype=logits.dtype) for x in (logits, opinion))
        count = len(logits) if self.reduction == "batch" else logits.numel()
        return self.temperature**2 * F.kl_div(student, teacher, reduction="sum", log_target=True) / count

    @torch.no_grad()
    def _ask(self, images: Tensor) -> Tensor:
        if self.teacher.encoder.mean.device != images.device:
            self._move(images.device)
        return self.teacher.logits(images)

    @torch.compiler.disable
    def _move(self, device: torch.device) -> None:
        self.teacher.to(device)
