"""Define the options of the evaluators."""

import os
from typing import Annotated, Literal

from ssvit.config.declaration import Count, Expect, NotNegative, Options, Tree, Whole
from ssvit.errors import OptionError, RootOptionError
from ssvit.evaluation.options import AUTO

Every = Annotated[Literal["auto"] | Count, Expect("a whole number of steps, 1 or more, or auto")]
"""Interval between two evaluations, in steps, or auto."""


class HeldOut(Options):
    """Select the held-out images on which an objective is evaluated."""

    images: Count = 1024
    """Maximum number of held-out images."""
    batch_size: Count = 128
    """Batch size of the forward pass."""
    seed: Whole = 0
    """Seed of random choices, such as masks and views."""


class Prediction(HeldOut):
    """Evaluate masked patch prediction."""


class Autoencoding(HeldOut):
    """Evaluate masked autoencoders."""


class LatentPrediction(HeldOut):
    """Evaluate latent prediction."""


class Collapse(HeldOut):
    """Evaluate self-distillation."""


class PatchCollapse(HeldOut):
    """Evaluate self-distillation with masked patches."""


class Contrast(HeldOut):
    """Evaluate contrastive methods."""


class LabelFree(HeldOut):
    """Measure features without labels."""

    images: Count = 512
    """Maximum number of held-out images. It bounds the ranks and should therefore exceed the width of the encoder."""
    every: Every = AUTO
    """Steps between two evaluations; auto: the smallest interval for which all evaluations take less than 5 % of the
    training time, at steps of the probes (`evaluation.evaluators.base.interval`)."""


class ShapeBias(HeldOut):
    """Measure whether a classifier decides by shape or by texture (Geirhos et al. 2019)."""

    def check(self, tree: Tree) -> None:
        """Check that the run trains a classifier of the rendered shapes with both cues."""
        if not getattr(tree.objective, "needs_labels", True):
            expected = "must be supervised, or classify in fine-tuning, for evaluator=[shape_bias]"
            raise RootOptionError("objective", type(tree.objective).__name__, expected)
        if not getattr(tree.data, "textures", False):
            raise RootOptionError("data.textures", False, "must be true, with data=shapes, for evaluator=[shape_bias]")


class Supervised(Options):
    """Evaluate a model on all validation images during training, and on all test images at the end."""

    batch_size: Count = 256
    """Batch size of each process."""
    workers: Whole = 0
    """Loader processes of each process."""
    timeout: NotNegative = 300.0
    """Seconds to wait for a batch from the loader processes; 0: no limit."""


class Segmentation(Supervised):
    """Evaluate a segmentation model. A batch consists of windows; `workers` are threads, without a time limit."""


class Classification(Supervised):
    """Evaluate a classifier."""

    real: str | None = None
    """File of ImageNet's ReaL labels (Beyer et al. 2020), for the metric accuracy_real; None: without it."""

    def check_consistency(self) -> None:
        """Raise OptionError unless the file of ReaL labels exists."""
        if self.real is not None and not os.path.isfile(self.real):
            raise OptionError("real", self.real, "must be a file or null")


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
