"""What the options of classification and distillation may be: asked by their constructors, and by the tools before
torch is loaded. What only an encoder or a teacher can tell is asked when it is built. Standard library only.
"""

from typing import Any

from ssvit.options import OptionError, number, one_of, whole

KINDS = ("hard", "soft")
REDUCTIONS = ("batch", "elements")
LOSSES = ("softmax", "sigmoid")


def classify(
    *,
    encoder: Any = None,
    classes: Any = None,
    hidden: Any = None,
    label_smoothing: Any = 0.0,
    mixup: Any = 0.0,
    cutmix: Any = 0.0,
    distillation: Any = None,
    loss: Any = "softmax",
    head_bias: Any = 0.0,
) -> None:
    """OptionError unless these can be the options of `ssvit.objectives.classify.Classify`."""
    if hidden is not None:
        whole("hidden", hidden)
    number("label_smoothing", label_smoothing, 0, 0.999999)
    for name, value in (("mixup", mixup), ("cutmix", cutmix)):
        number(name, value, 0)
    one_of("loss", loss, LOSSES)
    number("head_bias", head_bias, -100, 100)
    if loss == "sigmoid" and label_smoothing > 0:
        raise OptionError("label_smoothing", label_smoothing, "must be 0 with loss=sigmoid")
    if loss == "sigmoid" and distillation is not None:
        raise OptionError("loss", loss, "must be softmax with a teacher, whose opinion is a softmax")


def distillation(
    *,
    teacher: Any = None,
    kind: Any = "hard",
    temperature: Any = 3.0,
    weight: Any = 0.5,
    reduction: Any = "batch",
) -> None:
    """OptionError unless these can be the options of `ssvit.objectives.distillation.Distillation`."""
    one_of("kind", kind, KINDS)
    number("temperature", temperature, 0, above=True)
    number("weight", weight, 0, 1)
    one_of("reduction", reduction, REDUCTIONS)
    if kind == "hard" and reduction != "batch":
        raise OptionError("reduction", reduction, "must be batch with kind=hard, whose loss is of one class")
