"""Define the options of the evaluation of masked patch prediction."""

from ssvit.evaluation.evaluators.held_out_options import HeldOut


class Prediction(HeldOut):
    """Evaluate masked patch prediction."""
