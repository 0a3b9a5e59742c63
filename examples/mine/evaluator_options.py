"""The options of the evaluator."""

from ssvit.config.choices import choice
from ssvit.config.declaration import Count, Options


@choice("evaluator", "spread")
class Spread(Options):
    """The standard deviation of the features over held-out images."""

    images: Count = 64
    """Held-out images."""
