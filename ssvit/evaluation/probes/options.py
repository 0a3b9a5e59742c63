"""Define the options of the probes."""

from collections.abc import Sequence
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import Field

from ssvit.config.declaration import (
    ONE_OR_SEVERAL,
    Count,
    Counts,
    Different,
    Expect,
    NotNegative,
    Options,
    Part,
    Positive,
    Whole,
)

Shots = Annotated[
    tuple[Count | Literal["all"], ...], *ONE_OR_SEVERAL, Expect("one of all, a whole number, or a list of them")
]


class Linear(Options):
    """Define the options that the linear probes share."""

    held_out: Annotated[float, Gt(0), Le(0.9)] = 0.1
    """Fraction of each class that is held out as validation images to choose hyper-parameters."""
    standardize: bool = True
    """Scale each feature to mean 0 and standard deviation 1 over the training images, so that one grid of
    hyper-parameters suits features of any scale."""
    seed: Whole = 0
    """Seed of the validation split and of the order of batches."""


class Attentive(Linear):
    """Train attention pooling of the patches and a linear classifier by AdamW on frozen features."""

    learning_rates: Different = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    """Learning rates for a batch size of 256, scaled linearly; linear warm-up over a tenth of the steps, then cosine
    decay to 0."""
    weight_decays: Different = (5e-4, 5e-2)
    """Weight decays, each combined with each learning rate; not applied to biases."""
    epochs: Count = 20
    """Epochs over the training images."""
    batch_size: Count = 128
    """Batch size."""
    train_images: Annotated[int, Ge(2)] | None = None
    """Maximum number of training images; all their patches are held in memory, in 16 bits. None: all."""
    test_images: Annotated[int, Ge(2)] | None = None
    """Maximum number of test images. None: all."""


class Knn(Options):
    """Classify by the vote of the nearest training images in cosine similarity."""

    k: Counts = Field(20, validate_default=True)
    """Number of neighbours, or a list of numbers."""
    temperature: Positive | None = 0.07
    """Temperature of a vote's weight exp(cosine / temperature): 0.07 as in DINO and for ImageNet in Wu et al. 2018,
    whose code uses 0.1 for CIFAR. None: equal weights."""
    standardize: bool = False
    """Scale each feature to mean 0 and standard deviation 1 over the training images."""
    index: Part[Options | None] = None
    """faiss index of the neighbour search: flat is exact, ivf and hnsw are approximate. None: flat."""


class Logistic(Linear):
    """Fit multinomial logistic regression by full-batch L-BFGS."""

    l2s: Different = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    """L2 penalties to choose from (scikit-learn's C is 1 / (n l2)); the bias is not penalised."""
    iterations: Count = 500
    """Maximum number of iterations of a fit."""


class Retrieval(Options):
    """Score the ranking of training images by similarity to each test image."""

    k: Counts = (1, 5, 10)
    """Number of neighbours, or a list of numbers."""
    queries: Count | None = 1000
    """Maximum number of test images used as queries, a fixed sample, since each query sorts all training images. None:
    all."""
    standardize: bool = False
    """Scale each feature to mean 0 and standard deviation 1 over the training images."""


class Ridge(Options):
    """Fit ridge regression to all training images, or to a few images of each class."""

    shots: Shots = Field(default="all", validate_default=True)
    """Training images of each class, or all; or a list of numbers."""
    seeds: Count = 3
    """Number of samples for each number of shots."""
    # The paper specifies the regression and 5 shots for ImageNet. The penalties, and their choice by leave-one-out, are
    # those of the authors' older public evaluator (uncertainty-baselines: jft/experiments/common_fewshot.py).
    l2: Annotated[Sequence[Positive], *ONE_OR_SEVERAL, Expect("a number above 0, or a list of them")] = tuple(
        2.0**i for i in range(-10, 20)
    )
    """L2 penalties; one is chosen by the leave-one-out accuracy on the sampled images."""


class Segmentation(Logistic):
    """Predict the class of each pixel from patch features, by a linear layer."""

    train_images: Annotated[int, Ge(2)] = 500
    """Maximum number of training images; all their patches are held in memory."""
    test_images: Count = 250
    """Maximum number of test images."""
    l2s: Different = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
    iterations: Count = 200


class Sgd(Linear):
    """Train linear layers by SGD on the same batches, one for each learning rate, initialised at zero."""

    # The grid of DINOv2, where the batch size is 256.
    learning_rates: Different = (
        1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0,
    )  # fmt: skip
    """Initial learning rates, not scaled by the batch size, with a cosine decay to 0."""
    epochs: Count = 20
    """Epochs over the training images."""
    batch_size: Count = 256
    """Batch size."""
    momentum: Annotated[float, Ge(0), Le(0.999)] = 0.9
    """Momentum of SGD."""
    weight_decay: NotNegative = 0.0
    """Weight decay of weights and biases, as in torch.optim.SGD."""
