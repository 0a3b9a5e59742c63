"""Define the options of the evaluation of contrastive methods."""

from collections.abc import Mapping
from typing import ClassVar

from ssvit.evaluation.evaluators.held_out_options import HeldOut


class Contrast(HeldOut):
    """Evaluate contrastive methods."""

    built_from: ClassVar[Mapping[str, str]] = {"augment": "data.augment"}
