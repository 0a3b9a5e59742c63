"""Define the options of the evaluation of masked patch prediction."""

from ssvit.evaluation.panels.held_out_options import HeldOut


class Prediction(HeldOut):
    """Evaluate masked patch prediction."""
