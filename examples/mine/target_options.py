"""The options of the target."""

from ssvit.config.declaration import Positive
from ssvit.objectives.targets_options import Target


class Grey(Target):
    """The mean grey of a patch."""

    contrast: Positive = 2.0
    """Factor of the labels."""
