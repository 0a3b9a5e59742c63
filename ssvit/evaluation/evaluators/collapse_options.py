"""Define the options of the evaluation of self-distillation."""

from ssvit.evaluation.evaluators.held_out_options import HeldOut


class Collapse(HeldOut):
    """Evaluate self-distillation."""


class PatchCollapse(HeldOut):
    """Evaluate self-distillation with masked patches."""
