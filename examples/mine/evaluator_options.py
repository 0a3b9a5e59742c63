"""The options of the evaluator."""

from ssvit.config.declaration import Count, Options


class Spread(Options):
    """The standard deviation of the features over held-out images."""

    images: Count = 64
    """Held-out images."""
