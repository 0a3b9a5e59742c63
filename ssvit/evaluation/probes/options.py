"""The options of the probes, which check themselves. Standard library only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ssvit.options import OptionError, flag, number, one_of, whole

ALL = "all"  # shots: the whole training set, once


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


@dataclass(frozen=True, kw_only=True)
class Knn:
    """The vote of the nearest training images by cosine."""

    protocol: str = "dino"
    """The protocol of the vote: dino, instance_discrimination, solo_learn, uniform."""
    k: int | Sequence[int] = 20
    """Number of neighbours that vote, or a list of numbers."""
    standardize: bool = False
    """Give every feature mean 0 and deviation 1 over the training images, so that none outweighs the others."""

    def __post_init__(self) -> None:
        one_of("protocol", self.protocol, KNN_PROTOCOLS)
        flag("standardize", self.standardize)
        object.__setattr__(self, "k", _counts("k", self.k))


@dataclass(frozen=True)
class FewShotProtocol:
    """See `FewShot`."""

    shots: tuple[int | str, ...]
    seeds: int
    l2: tuple[float, ...]


FEW_SHOT_PROTOCOLS = {
    # The paper names the regression and ImageNet's 5 shots. The penalties are those of the authors' older public
    # evaluator (uncertainty-baselines: jft/experiments/common_fewshot.py), whose "leave-self-out" chooses among them.
    "paper": FewShotProtocol(shots=(5,), seeds=3, l2=tuple(2.0**i for i in range(-10, 20))),
    # google-research/big_vision, evaluators/fewshot_lsr.py and the configurations that use it.
    "big_vision": FewShotProtocol(shots=(1, 5, 10, 25), seeds=3, l2=(2.0**10,)),
}


@dataclass(frozen=True, kw_only=True)
class FewShot:
    """Ridge regression on a few images of each class. None stands for the protocol's value."""

    protocol: str = "paper"
    """paper or big_vision."""
    shots: int | str | Sequence[int | str] | None = None
    """Training images of each class, or all; or a list of numbers."""
    seeds: int | None = None
    """Samples for each number of shots."""
    l2: Sequence[float] | None = None
    """Penalties, from which leave-one-out accuracy on the sampled images chooses one."""

    def __post_init__(self) -> None:
        one_of("protocol", self.protocol, FEW_SHOT_PROTOCOLS)
        for name, value in vars(FEW_SHOT_PROTOCOLS[self.protocol]).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        shots = (self.shots,) if isinstance(self.shots, int | str) else self.shots
        shots, l2 = _listed("shots", shots), _listed("l2", self.l2)
        object.__setattr__(self, "shots", shots)
        object.__setattr__(self, "l2", l2)
        for count in shots:
            if isinstance(count, str):
                one_of("shots", count, (ALL, "a whole number"))
            else:
                whole("shots", count)
        whole("seeds", self.seeds)
        for penalty in l2:
            number("l2", penalty, 0, above=True)


@dataclass(frozen=True, kw_only=True)
class Linear:
    """The options that linear probes share."""

    held_out: float = 0.1
    """The fraction of each class that is held out from training to choose options."""
    standardize: bool = True
    """Whether each feature is scaled to mean 0 and standard deviation 1 over the training images, so that one grid of
    options suits features of any scale."""
    seed: int = 0
    """Seed of the held-out images and of the order of batches."""

    def __post_init__(self) -> None:
        number("held_out", self.held_out, 0, 0.9, above=True)
        flag("standardize", self.standardize)
        whole("seed", self.seed, 0)


@dataclass(frozen=True, kw_only=True)
class Sgd(Linear):
    """Linear layers trained by SGD on the same batches, one for each learning rate, starting at zero."""

    # DINOv2's grid, there for batches of 256.
    learning_rates: Sequence[float] = (
        1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0,
    )  # fmt: skip
    """Learning rates at the start, not scaled by the batch size; each falls to 0 along half a cosine."""
    epochs: int = 20
    """Passes over the training images."""
    batch_size: int = 256
    """Images of a step."""
    momentum: float = 0.9
    """Share of itself that the momentum keeps at each step."""
    weight_decay: float = 0.0
    """Weight decay of weights and biases, as in torch.optim.SGD."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _different("learning_rates", self.learning_rates)
        whole("epochs", self.epochs)
        whole("batch_size", self.batch_size)
        number("momentum", self.momentum, 0, 0.999)
        number("weight_decay", self.weight_decay, 0)


@dataclass(frozen=True, kw_only=True)
class Attentive(Linear):
    """Attention pooling of the patches and a linear classifier, trained by AdamW on frozen features."""

    learning_rates: Sequence[float] = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    """Learning rates for batches of 256, in proportion for others; each rises over a tenth of the steps and falls to 0
    along half a cosine."""
    weight_decays: Sequence[float] = (5e-4, 5e-2)
    """Weight decays; biases have none. Each is tried with each learning rate."""
    epochs: int = 20
    """Passes over the training images."""
    batch_size: int = 128
    """Images of a step."""
    train_images: int | None = None
    """The most training images; all their patches are held in memory, in 16 bits. None: all."""
    test_images: int | None = None
    """The most test images. None: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _different("learning_rates", self.learning_rates)
        _different("weight_decays", self.weight_decays)
        whole("epochs", self.epochs)
        whole("batch_size", self.batch_size)
        for name in ("train_images", "test_images"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 2)


@dataclass(frozen=True, kw_only=True)
class Logistic(Linear):
    """Multinomial logistic regression by L-BFGS on all images at once."""

    l2s: Sequence[float] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    """The penalties to choose from (scikit-learn's C is 1 / (n l2)); the bias is not penalised."""
    iterations: int = 500
    """The most iterations of a fit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _different("l2s", self.l2s)
        whole("iterations", self.iterations)


@dataclass(frozen=True, kw_only=True)
class Segmentation(Logistic):
    """The class of each pixel from the features of patches, by a linear layer and by nearest neighbours."""

    train_images: int = 500
    """The most training images; all their patches are held in memory."""
    test_images: int = 250
    """The most test images."""
    k: int = 30
    """Neighbours of a patch, or all if there are fewer."""
    temperature: float = 0.02
    """A neighbour's vote has the weight exp(cosine / temperature)."""
    l2s: Sequence[float] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
    iterations: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("train_images", self.train_images, 2)
        whole("test_images", self.test_images)
        whole("k", self.k)
        number("temperature", self.temperature, 0, above=True)


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """Whether the training images nearest to a test image are of its class."""

    k: int | Sequence[int] = (1, 5, 10)
    """Number of neighbours, or a list of numbers."""
    queries: int | None = None
    """The most test images, always the same ones, since each sorts all training images; None: all."""
    standardize: bool = False
    """Whether each feature is scaled to mean 0 and standard deviation 1 over the training images."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", _counts("k", self.k))
        flag("standardize", self.standardize)
        if self.queries is not None:
            whole("queries", self.queries)


def _listed(name: str, values: object, expected: str = "must be a list of one or more") -> tuple[Any, ...]:
    """OptionError unless it is a list that is not empty."""
    if not isinstance(values, list | tuple) or not values:
        raise OptionError(name, values, expected)
    return tuple(values)


def _counts(name: str, values: object) -> tuple[int, ...]:
    """One integer or a list of rising integers. OptionError for anything else."""
    counts = _listed(name, [values] if isinstance(values, int) else values)
    for count in counts:
        whole(name, count)
    return tuple(sorted(set(counts)))


def _different(name: str, values: object) -> None:
    """OptionError unless it is a list of different numbers above 0."""
    expected = "must be a list of different numbers"
    listed = _listed(name, values, expected)
    for value in listed:
        number(name, value, 0, above=True)
    if len(set(listed)) < len(listed):
        raise OptionError(name, values, expected)
