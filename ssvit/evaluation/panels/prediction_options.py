"""Define the options of the evaluation of masked patch prediction."""

from ssvit.evaluation.panels.reconstruction_options import Reconstruction


class Prediction(Reconstruction):
    """Evaluate masked patch prediction."""
