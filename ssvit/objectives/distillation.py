"""Distillation: a classifier learns the predictions of a trained one, its teacher (Hinton et al. 2015, DeiT).

The teacher is no submodule, so it is neither trained nor saved nor spread over processes.

Letters: b images, k classes.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.models.encoder import Encoder
from ssvit.objectives import classify_options, distillation_options
from ssvit.options import OptionError, UserError


class Distillation:
    """The options of `distillation_options.Distillation` and the teacher, a trained `Classify`."""

    def __init__(self, options: distillation_options.Distillation, teacher: Any) -> None:
        self.options = options
        self.teacher = teacher.eval()

    def check(self, encoder: Encoder, classes: Sequence[str]) -> None:
        """UserError unless the teacher takes the images of this encoder and knows these classes, in this order.

        And unless its probabilities are those of a softmax, if they are the target.
        """
        if self.options.kind == "soft" and self.teacher.options.loss != classify_options.SOFTMAX:
            loss = self.teacher.options.loss
            right = f"must be hard with this teacher, whose probabilities are no softmax: its loss is {loss}"
            raise OptionError("objective.distillation.kind", self.options.kind, right)
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
        if self.teacher.encoder.mean.device != images.device:
            self._move(images.device)
        with torch.no_grad():
            taught = self.teacher.logits(images)
        if self.options.kind == "hard":
            return F.cross_entropy(logits, taught.argmax(1))
        temperature = self.options.temperature
        student, teacher = (F.log_softmax(x / temperature, 1, dtype=logits.dtype) for x in (logits, taught))
        count = len(logits) if self.options.reduction == "batch" else logits.numel()
        return temperature**2 * F.kl_div(student, teacher, reduction="sum", log_target=True) / count

    @torch.compiler.disable
    def _move(self, device: torch.device) -> None:
        self.teacher.to(device)
