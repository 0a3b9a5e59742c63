"""Define the options of evaluations on held-out images."""

from ssvit.config.declaration import Count, Options, Whole


class HeldOut(Options):
    """Select the held-out images on which an objective is evaluated."""

    images: Count = 1024
    """Maximum number of held-out images."""
    batch_size: Count = 128
    """Batch size of the forward pass."""
    seed: Whole = 0
    """Seed of random choices, such as masks and views."""
