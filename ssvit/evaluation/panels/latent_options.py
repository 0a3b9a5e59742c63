"""The options of the evaluation of latent prediction."""

from ssvit.evaluation.panels.reconstruction_options import Reconstruction


class LatentPrediction(Reconstruction):
    """The evaluation of latent prediction."""
