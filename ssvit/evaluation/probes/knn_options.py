"""Define the options of the k-NN probe."""

from typing import Annotated

from pydantic import Field

from ssvit.config.choices import choice
from ssvit.config.declaration import Counts, OneOf, Options, Part

KNN_TEMPERATURES: dict[str, float | None] = {
    # Wu et al. 2018, section 3.4. The temperature is that of their code for CIFAR (0.07 for ImageNet) and of lightly.
    "instance_discrimination": 0.1,
    # facebookresearch/dino, eval_knn.py. DINOv2 normalises the weights, which does not change the ranking of classes.
    "dino": 0.07,
    # vturrisi/solo-learn, solo/utils/knn.py.
    "solo_learn": 0.07,
    "uniform": None,
}
"""Temperature of each protocol: a neighbour's vote has the weight exp(cosine / temperature), or 1 for None."""


@choice("probe", "knn")
class Knn(Options):
    """Classify by the vote of the nearest training images in cosine similarity."""

    protocol: Annotated[str, OneOf(KNN_TEMPERATURES)] = "dino"
    """Protocol, which sets the weights of the votes."""
    k: Counts = Field(20, validate_default=True)
    """Number of neighbours, or a list of numbers."""
    standardize: bool = False
    """Scale each feature to mean 0 and standard deviation 1 over the training images."""
    index: Part = None
    """faiss index of the neighbour search: flat is exact, ivf and hnsw are approximate. None: flat."""
