"""Define the options of the retrieval probe."""

from ssvit.config.declaration import Count, Counts, Options


class Retrieval(Options):
    """Score the ranking of training images by similarity to each test image."""

    k: Counts = (1, 5, 10)
    """Number of neighbours, or a list of numbers."""
    queries: Count | None = 1000
    """Maximum number of test images used as queries, a fixed sample, since each query sorts all training images. None:
    all."""
    standardize: bool = False
    """Scale each feature to mean 0 and standard deviation 1 over the training images."""
