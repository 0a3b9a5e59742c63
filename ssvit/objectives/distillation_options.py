"""The options of distillation from a teacher."""

from typing import Literal, Self

from pydantic import model_validator

from ssvit.config.declaration import Fraction, Options, Part, Positive
from ssvit.options import OptionError


class Distillation(Options):
    """The loss of a classifier against its teacher."""

    teacher: Part = None
    """The teacher, a classifier of an earlier run."""
    kind: Literal["hard", "soft"] = "hard"
    """hard: the teacher's most probable class is the label (Touvron et al. 2021, section 4); soft: its probabilities
    are the target."""
    temperature: Positive = 3.0
    """Divides the logits of student and teacher, with soft (Hinton et al. 2015); the default of DeiT's code is 1.0
    (deit: main.py)."""
    weight: Fraction = 0.5
    """Weight of this loss, as in DeiT's code (deit: main.py); the labels' loss has the rest."""
    reduction: Literal["batch", "elements"] = "batch"
    """How the soft loss is averaged. batch: summed over the classes, averaged over the images; elements: averaged
    over both, k times less, as in DeiT's code (deit: losses.py)."""

    @model_validator(mode="after")
    def _check_reduction(self) -> Self:
        if self.kind == "hard" and self.reduction != "batch":
            raise OptionError("reduction", self.reduction, "must be batch with kind=hard, whose loss is of one class")
        return self
