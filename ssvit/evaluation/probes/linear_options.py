"""The options that linear probes share."""

from typing import Annotated

from annotated_types import Gt, Le

from ssvit.config.declaration import Options, Whole


class Linear(Options):
    """The options that linear probes share."""

    held_out: Annotated[float, Gt(0), Le(0.9)] = 0.1
    """The fraction of each class that is held out from training to choose options."""
    standardize: bool = True
    """Whether each feature is scaled to mean 0 and standard deviation 1 over the training images, so that one grid of
    options suits features of any scale."""
    seed: Whole = 0
    """Seed of the held-out images and of the order of batches."""
