"""The groups of options from which a part is chosen: objective=mae chooses mae of the group objective. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """A group of options.

    Attributes:
        meaning: What is chosen, for `--help`; "" if the command explains its option of that name.
        package: The package whose modules *_options declare the choices; None if YAML files alone do.
        several: Whether several parts are chosen, each with its options under its name.
        key: The name of the part within the group; "" if the options of the group are those of the part.
    """

    meaning: str = ""
    package: str | None = None
    several: bool = False
    key: str = ""


GROUPS = {
    "augment": Group("Augmentation of the training images.", "ssvit.data.augment"),
    "data": Group(key="source"),
    "distillation": Group("Learning from a teacher besides the labels."),
    "evaluator": Group(package="ssvit.evaluation.panels", several=True),
    "experiment": Group("A complete run in one file."),
    "index": Group(package="ssvit.evaluation"),
    "logger": Group(package="ssvit.training.loggers", several=True),
    "objective": Group(package="ssvit.objectives"),
    "probe": Group(package="ssvit.evaluation.probes", several=True),
    "target": Group("What is predicted of a patch.", "ssvit.objectives"),
}
