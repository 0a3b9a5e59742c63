"""The options of the probes of a run."""

from typing import Annotated, Literal

from ssvit.config.declaration import Count, Expect, Options
from ssvit.evaluation.features_options import AUTO

Every = Annotated[Literal["auto"] | Count, Expect("a whole number of steps, 1 or more, or auto")]
"""How often an evaluator evaluates."""


class Probing(Options):
    """The options of all probes of a run."""

    every: Every = AUTO
    """Steps from one evaluation to the next; auto: as often as takes less than 5 % of the training time, in multiples
    of recipe.evaluate_every (see `evaluation.base.interval`)."""
    train_images: Count = 2000
    """Labelled training images of the probes, balanced over the classes."""
    test_images: Count = 2000
    """Held-out images on which the probes are measured."""
    batch_size: Count = 128
    """Images encoded at a time."""
