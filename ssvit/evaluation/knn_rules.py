"""What a k-NN evaluation may be: the published votes, and the numbers of neighbours. Standard library only.

The votes are of cosines s, each neighbour for its class; they differ in the weight exp(s / temperature) alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ssvit.options import OptionError, one_of, whole

NEIGHBOURS = (1, 10, 20, 100, 200)


@dataclass(frozen=True)
class KnnProtocol:
    """How neighbours vote, and with how many of them its authors report. temperature: None for a vote each."""

    temperature: float | None
    published: tuple[int, ...]


PROTOCOLS = {
    # Wu et al. 2018, section 3.4; the temperature is their code's for CIFAR (0.07 for ImageNet), and lightly's.
    "instance_discrimination": KnnProtocol(temperature=0.1, published=(200,)),
    # facebookresearch/dino, eval_knn.py. DINOv2 divides the weights by their sum, which changes no order of classes.
    "dino": KnnProtocol(temperature=0.07, published=(10, 20, 100, 200)),
    # vturrisi/solo-learn, solo/utils/knn.py.
    "solo_learn": KnnProtocol(temperature=0.07, published=(20,)),
    "uniform": KnnProtocol(temperature=None, published=()),
}


def knn(protocols: Any, k: Any) -> tuple[dict[str, KnnProtocol], tuple[int, ...]]:
    """The protocols by name, and the numbers of neighbours, rising. OptionError unless they can be."""
    for name, values in (("protocols", protocols), ("k", k)):
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise OptionError(name, values, "must be a list of one or more")
    for protocol in protocols:
        one_of("protocols", protocol, PROTOCOLS)
    for count in k:
        whole("k", count)
    return {protocol: PROTOCOLS[protocol] for protocol in protocols}, tuple(sorted(set(k)))
