"""Define the options of the probes of a run."""

from typing import Annotated, Literal

from ssvit.config.declaration import Count, Expect, Options
from ssvit.evaluation.features_options import AUTO

Every = Annotated[Literal["auto"] | Count, Expect("a whole number of steps, 1 or more, or auto")]
"""Interval between two evaluations, in steps, or auto."""


class Probing(Options):
    """Configure all probes of a run."""

    every: Every = AUTO
    """Steps between two evaluations; auto: the smallest multiple of recipe.evaluate_every for which all
    evaluations take less than 5 % of the training time (`evaluation.evaluators.base.interval`)."""
    train_images: Count = 2000
    """Labelled training images of the probes, balanced over the classes."""
    test_images: Count = 2000
    """Held-out images on which the probes are evaluated."""
    batch_size: Count = 128
    """Batch size of the encoder."""
