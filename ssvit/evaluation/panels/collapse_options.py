"""The options of the evaluation of self-distillation."""

from ssvit.config.declaration import AtLeastTwo
from ssvit.evaluation.panels.held_out_options import HeldOut


class Collapse(HeldOut):
    """The evaluation of self-distillation."""

    images: AtLeastTwo = 1024
    """The most held-out images."""


class PatchCollapse(Collapse):
    """The evaluation of self-distillation with masked patches."""
