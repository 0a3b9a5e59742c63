"""The options of the probes. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import AfterValidator, BeforeValidator, model_validator

from ssvit.config.declaration import Count, Different, Expect, NotNegative, OneOf, Options, Positive, Whole

ALL: Final = "all"  # shots: the whole training set, once
AtLeastTwo = Annotated[int, Ge(2)]


def _listed(value: object) -> object:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


_LIST = BeforeValidator(_listed), MinLen(1)
Counts = Annotated[
    tuple[Count, ...],
    *_LIST,
    AfterValidator(lambda counts: tuple(sorted(set(counts)))),
    Expect("a whole number, 1 or more, or a list of them"),
]


Shots = Annotated[tuple[Count | Literal["all"], ...], *_LIST, Expect("one of all, a whole number, or a list of them")]


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


class Knn(Options):
    """The vote of the nearest training images by cosine."""

    protocol: Annotated[str, OneOf(KNN_PROTOCOLS)] = "dino"
    """The protocol of the vote."""
    k: Counts = (20,)
    """Number of neighbours that vote, or a list of numbers."""
    standardize: bool = False
    """Give every feature mean 0 and deviation 1 over the training images, so that none outweighs the others."""


@dataclass(frozen=True)
class FewShotProtocol:
    """See `FewShot`."""

    shots: tuple[int | Literal["all"], ...]
    seeds: int
    l2: tuple[float, ...]


FEW_SHOT_PROTOCOLS = {
    # The paper names the regression and ImageNet's 5 shots. The penalties are those of the authors' older public
    # evaluator (uncertainty-baselines: jft/experiments/common_fewshot.py), whose "leave-self-out" chooses among them.
    "paper": FewShotProtocol(shots=(5,), seeds=3, l2=tuple(2.0**i for i in range(-10, 20))),
    # google-research/big_vision, evaluators/fewshot_lsr.py and the configurations that use it.
    "big_vision": FewShotProtocol(shots=(1, 5, 10, 25), seeds=3, l2=(2.0**10,)),
}


class FewShot(Options):
    """Ridge regression on a few images of each class. None stands for the protocol's value."""

    protocol: Annotated[str, OneOf(FEW_SHOT_PROTOCOLS)] = "paper"
    """The protocol, which has values for the other options."""
    shots: Shots = FEW_SHOT_PROTOCOLS["paper"].shots
    """Training images of each class, or all; or a list of numbers."""
    seeds: Count = FEW_SHOT_PROTOCOLS["paper"].seeds
    """Samples for each number of shots."""
    l2: Annotated[Sequence[Positive], MinLen(1), Expect("a list of numbers above 0")] = FEW_SHOT_PROTOCOLS["paper"].l2
    """Penalties, from which leave-one-out accuracy on the sampled images chooses one."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_protocol(cls, values: dict[str, Any]) -> dict[str, Any]:
        protocol = FEW_SHOT_PROTOCOLS.get(values.get("protocol", "paper"))
        usual = vars(protocol) if protocol else {}
        return values | {name: value for name, value in usual.items() if values.get(name) is None}


class Linear(Options):
    """The options that linear probes share."""

    held_out: Annotated[float, Gt(0), Le(0.9)] = 0.1
    """The fraction of each class that is held out from training to choose options."""
    standardize: bool = True
    """Whether each feature is scaled to mean 0 and standard deviation 1 over the training images, so that one grid of
    options suits features of any scale."""
    seed: Whole = 0
    """Seed of the held-out images and of the order of batches."""


class Sgd(Linear):
    """Linear layers trained by SGD on the same batches, one for each learning rate, starting at zero."""

    # DINOv2's grid, there for batches of 256.
    learning_rates: Different = (
        1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0,
    )  # fmt: skip
    """Learning rates at the start, not scaled by the batch size; each falls to 0 along half a cosine."""
    epochs: Count = 20
    """Passes over the training images."""
    batch_size: Count = 256
    """Images of a step."""
    momentum: Annotated[float, Ge(0), Le(0.999)] = 0.9
    """Share of itself that the momentum keeps at each step."""
    weight_decay: NotNegative = 0.0
    """Weight decay of weights and biases, as in torch.optim.SGD."""


class Attentive(Linear):
    """Attention pooling of the patches and a linear classifier, trained by AdamW on frozen features."""

    learning_rates: Different = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    """Learning rates for batches of 256, in proportion for others; each rises over a tenth of the steps and falls to 0
    along half a cosine."""
    weight_decays: Different = (5e-4, 5e-2)
    """Weight decays; biases have none. Each is tried with each learning rate."""
    epochs: Count = 20
    """Passes over the training images."""
    batch_size: Count = 128
    """Images of a step."""
    train_images: AtLeastTwo | None = None
    """The most training images; all their patches are held in memory, in 16 bits. None: all."""
    test_images: AtLeastTwo | None = None
    """The most test images. None: all."""


class Logistic(Linear):
    """Multinomial logistic regression by L-BFGS on all images at once."""

    l2s: Different = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    """The penalties to choose from (scikit-learn's C is 1 / (n l2)); the bias is not penalised."""
    iterations: Count = 500
    """The most iterations of a fit."""


class Segmentation(Logistic):
    """The class of each pixel from the features of patches, by a linear layer and by nearest neighbours."""

    train_images: AtLeastTwo = 500
    """The most training images; all their patches are held in memory."""
    test_images: Count = 250
    """The most test images."""
    k: Count = 30
    """Neighbours of a patch, or all if there are fewer."""
    temperature: Positive = 0.02
    """A neighbour's vote has the weight exp(cosine / temperature)."""
    l2s: Different = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
    iterations: Count = 200


class Retrieval(Options):
    """Whether the training images nearest to a test image are of its class."""

    k: Counts = (1, 5, 10)
    """Number of neighbours, or a list of numbers."""
    queries: Count | None = None
    """The most test images, always the same ones, since each sorts all training images; None: all."""
    standardize: bool = False
    """Whether each feature is scaled to mean 0 and standard deviation 1 over the training images."""
