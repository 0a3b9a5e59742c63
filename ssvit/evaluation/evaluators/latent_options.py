"""Define the options of the evaluation of latent prediction."""

from ssvit.evaluation.evaluators.held_out_options import HeldOut


class LatentPrediction(HeldOut):
    """Evaluate latent prediction."""
