"""The options of the evaluations of held-out images."""

from ssvit.config.declaration import Count, Options


class HeldOut(Options):
    """The held-out images on which an objective is evaluated."""

    images: Count = 1024
    """The most held-out images."""
    batch_size: Count = 128
    """Images predicted at a time."""
