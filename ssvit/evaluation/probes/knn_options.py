"""The options of the k-NN probe."""

from typing import Annotated

from pydantic import Field

from ssvit.config.choices import choice
from ssvit.config.declaration import Counts, OneOf, Options, Part

KNN_TEMPERATURES: dict[str, float | None] = {
    # Wu et al. 2018, section 3.4; the temperature is their code's for CIFAR (0.07 for ImageNet), and lightly's.
    "instance_discrimination": 0.1,
    # facebookresearch/dino, eval_knn.py. DINOv2 divides the weights by their sum, which changes no order of classes.
    "dino": 0.07,
    # vturrisi/solo-learn, solo/utils/knn.py.
    "solo_learn": 0.07,
    "uniform": None,
}
"""By protocol: a neighbour's vote weighs exp(cosine / temperature), or 1 without a temperature."""


@choice("probe", "knn")
class Knn(Options):
    """The vote of the nearest training images by cosine."""

    protocol: Annotated[str, OneOf(KNN_TEMPERATURES)] = "dino"
    """The protocol of the vote."""
    k: Counts = Field(20, validate_default=True)
    """Number of neighbours that vote, or a list of numbers."""
    standardize: bool = False
    """Give every feature mean 0 and deviation 1 over the training images, so that none outweighs the others."""
    index: Part = None
    """Index of faiss that finds the neighbours: flat is exact, ivf and hnsw are approximate; null: flat."""
