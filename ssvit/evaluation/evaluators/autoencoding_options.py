"""Define the options of the evaluation of masked autoencoders."""

from ssvit.evaluation.evaluators.held_out_options import HeldOut


class Autoencoding(HeldOut):
    """Evaluate masked autoencoders."""
