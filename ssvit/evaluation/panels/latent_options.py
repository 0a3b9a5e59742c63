"""Define the options of the evaluation of latent prediction."""

from ssvit.evaluation.panels.reconstruction_options import Reconstruction


class LatentPrediction(Reconstruction):
    """Evaluate latent prediction."""
