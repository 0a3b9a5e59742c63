"""Define the options of the evaluation of masked autoencoders."""

from ssvit.evaluation.panels.reconstruction_options import Reconstruction


class Autoencoding(Reconstruction):
    """Evaluate masked autoencoders."""
