"""Define the groups of options that select parts, such as objective=mae. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """A group of options.

    Attributes:
        meaning: Description for `--help`; "" if the command describes an option of the same name.
        package: Package whose modules *_options declare the choices; None if only YAML files do.
        several: Whether several parts may be chosen, each with its options under its name.
        key: Name of the part within the group; "" if the group contains the options directly.
    """

    meaning: str = ""
    package: str | None = None
    several: bool = False
    key: str = ""


GROUPS = {
    "augment": Group("Augmentation of the training images.", "ssvit.data.augment"),
    "continuation": Group("How training continues from existing weights.", "ssvit.objectives"),
    "data": Group(key="source"),
    "distillation": Group("Distillation from a teacher, in addition to the labels."),
    "evaluator": Group(package="ssvit.evaluation.evaluators", several=True),
    "experiment": Group("A complete run in one file."),
    "index": Group(package="ssvit.evaluation"),
    "logger": Group(package="ssvit.training.loggers", several=True),
    "objective": Group(package="ssvit.objectives"),
    "probe": Group(package="ssvit.evaluation.probes", several=True),
    "target": Group("What is predicted of a patch.", "ssvit.objectives"),
}
