"""The options of the k-NN probe."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ssvit.config.choices import choice
from ssvit.config.declaration import Counts, OneOf, Options, Part


@dataclass(frozen=True)
class KnnProtocol:
    """A neighbour's vote weighs exp(cosine / temperature), or 1 without a temperature. published: the authors' k."""

    temperature: float | None
    published: tuple[int, ...]


KNN_PROTOCOLS = {
    # Wu et al. 2018, section 3.4; the temperature is their code's for CIFAR (0.07 for ImageNet), and lightly's.
    "instance_discrimination": KnnProtocol(temperature=0.1, published=(200,)),
    # facebookresearch/dino, eval_knn.py. DINOv2 divides the weights by their sum, which changes no order of classes.
    "dino": KnnProtocol(temperature=0.07, published=(10, 20, 100, 200)),
    # vturrisi/solo-learn, solo/utils/knn.py.
    "solo_learn": KnnProtocol(temperature=0.07, published=(20,)),
    "uniform": KnnProtocol(temperature=None, published=()),
}


@choice("probe", "knn")
class Knn(Options):
    """The vote of the nearest training images by cosine."""

    protocol: Annotated[str, OneOf(KNN_PROTOCOLS)] = "dino"
    """The protocol of the vote."""
    k: Counts = Field(20, validate_default=True)
    """Number of neighbours that vote, or a list of numbers."""
    standardize: bool = False
    """Give every feature mean 0 and deviation 1 over the training images, so that none outweighs the others."""
    index: Part = None
    """Index of faiss that finds the neighbours: flat is exact, ivf and hnsw are approximate; null: flat."""
