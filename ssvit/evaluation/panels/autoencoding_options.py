"""Define the options of the evaluation of masked autoencoders."""

from ssvit.evaluation.panels.held_out_options import HeldOut


class Autoencoding(HeldOut):
    """Evaluate masked autoencoders."""
