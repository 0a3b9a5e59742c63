"""Define the options of the evaluation of self-distillation."""

from ssvit.config.declaration import AtLeastTwo
from ssvit.evaluation.panels.held_out_options import HeldOut


class Collapse(HeldOut):
    """Evaluate self-distillation."""

    images: AtLeastTwo = 1024
    """Maximum number of held-out images."""


class PatchCollapse(Collapse):
    """Evaluate self-distillation with masked patches."""
