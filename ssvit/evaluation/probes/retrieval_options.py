"""The options of the retrieval probe."""

from ssvit.config.choices import choice
from ssvit.config.declaration import Count, Counts, Options


@choice("probe", "retrieval")
class Retrieval(Options):
    """Whether the training images nearest to a test image are of its class."""

    k: Counts = (1, 5, 10)
    """Number of neighbours, or a list of numbers."""
    queries: Count | None = 1000
    """The most test images, always the same ones, since each sorts all training images; None: all."""
    standardize: bool = False
    """Whether each feature is scaled to mean 0 and standard deviation 1 over the training images."""
