"""Define the options of the evaluation of predicted patches."""

from ssvit.config.declaration import Whole
from ssvit.evaluation.panels.held_out_options import HeldOut


class Reconstruction(HeldOut):
    """Evaluate an objective that predicts patches."""

    seed: Whole = 0
    """Seed of the random choices of the objective, such as masks."""
