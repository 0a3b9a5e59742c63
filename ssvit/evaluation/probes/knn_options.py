"""Define the options of the k-NN probe."""

from pydantic import Field

from ssvit.config.declaration import Counts, Options, Part, Positive


class Knn(Options):
    """Classify by the vote of the nearest training images in cosine similarity."""

    k: Counts = Field(20, validate_default=True)
    """Number of neighbours, or a list of numbers."""
    temperature: Positive | None = 0.07
    """Temperature of a vote's weight exp(cosine / temperature): 0.07 as in DINO and for ImageNet in Wu et al. 2018,
    whose code uses 0.1 for CIFAR. None: equal weights."""
    standardize: bool = False
    """Scale each feature to mean 0 and standard deviation 1 over the training images."""
    index: Part = None
    """faiss index of the neighbour search: flat is exact, ivf and hnsw are approximate. None: flat."""
