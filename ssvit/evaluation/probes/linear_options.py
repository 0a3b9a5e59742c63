"""Define the options that the linear probes share."""

from typing import Annotated

from annotated_types import Gt, Le

from ssvit.config.declaration import Options, Whole


class Linear(Options):
    """Define the options that the linear probes share."""

    held_out: Annotated[float, Gt(0), Le(0.9)] = 0.1
    """Fraction of each class that is held out as validation images to choose hyper-parameters."""
    standardize: bool = True
    """Scale each feature to mean 0 and standard deviation 1 over the training images, so that one grid of
    hyper-parameters suits features of any scale."""
    seed: Whole = 0
    """Seed of the validation split and of the order of batches."""
