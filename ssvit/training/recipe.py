"""Define the hyperparameters of the optimisation, and the learning rate as a function of the step. No torch.

`step` counts optimiser updates from 0, and `batch_size` is the global batch size.
"""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Literal

from annotated_types import Ge, Le, Len

from ssvit.config.declaration import Count, Expect, NotNegative, Options, Positive, Share, Tree, Whole
from ssvit.data.sources.base_options import check_shares, count_images
from ssvit.devices import Launch
from ssvit.errors import OptionError

Decay = Annotated[float, Ge(0), Le(0.999999)]  # decay rate of a running mean


class Recipe(Options):
    """Hyperparameters of the optimisation."""

    steps: Count = 600
    """Optimiser updates."""
    batch_size: Count = 64
    """Images of one update, summed over all processes."""
    accumulate: Count = 1
    """Micro-batches into which each process splits its share of a batch, for less memory and the same update, except
    with simclr and contrastive_tuning, MixUp and batch norm, which depend on the other images of a micro-batch."""
    repeats: Count = 1
    """Copies of each image in a batch, each augmented differently (repeated augmentation, Hoffer et al. 2020); 3 in
    DeiT. They count towards `batch_size`."""
    optimizer: Literal["adamw", "sgd", "muon"] = "muon"
    """adamw, sgd, or muon (Jordan et al. 2024): Muon for the weight matrices of Transformer blocks, AdamW for all
    other weights. docs/optimizers.md compares them."""
    lr: Positive = 3e-3
    """Peak learning rate, reached after `warmup` steps."""
    warmup: Whole = 30
    """Steps of linear warm-up from 0."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """Schedule of the learning rate after warm-up: cosine or linear to zero, or constant."""
    betas: Annotated[Sequence[Decay], Len(2, 2), Expect("two numbers, [beta1, beta2], each below 1")] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments."""
    layer_decay: Share = 1.0
    """Factor of the learning rate from each layer to the layer below it (layer-wise decay)."""
    weight_decay: NotNegative = 0.05
    """Weight decay, applied to matrices only."""
    weight_decay_end: NotNegative | None = None
    """Final weight decay of a cosine schedule, as in DINO; None: constant weight decay."""
    clip: NotNegative = 1.0
    """Maximum global norm of the gradient; 0: no clipping."""
    sam: NotNegative = 0.0
    """Radius rho of sharpness-aware minimisation (Foret et al. 2021), usually 0.05, at twice the cost; 0: no SAM."""
    ema: Decay = 0.0
    """Decay rate of the moving average of the weights (Polyak), 0.9999 in the paper's best results; 0: no average. It
    rises with the steps, (1 + step) / (10 + step), until it has this value."""
    precision: Literal["auto", "bf16-mixed", "32-true", "64-true"] = "auto"
    """auto (bfloat16 on devices that multiply faster in it), bf16-mixed, 32-true or 64-true."""
    backend: Literal["auto", "eager", "compile", "kernels"] = "auto"
    """Implementation of the layers: eager, compile (torch.compile), kernels (faster layers for CPUs, in bfloat16 after
    ssvit build-kernels), or auto: compile on CUDA; on a CPU kernels, or without them compile in long runs."""
    seed: Whole = 0
    """Seed of all random numbers."""
    evaluate_every: Count = 150
    """Steps from one evaluation to the next."""
    save_every: Count = 150
    """Steps from one checkpoint to the next. An evaluation that is the best so far also has a checkpoint."""
    log_every: Count = 10
    """Steps from one line of metrics to the next."""
    best: str | None = "auto"
    """Metric whose best checkpoint is kept as best/, such as label_free/rankme or held_out/loss; for losses and errors,
    lower is better. auto: the accuracy, mAP or mIoU on validation images, the accuracy of the first probe on training
    images, or without labels the loss on held-out images; no checkpoint is kept unless accuracies differ significantly.
    None: no checkpoint is kept."""

    def check_consistency(self) -> None:
        """Check warm-up, repetitions and the metric of the best checkpoint."""
        if self.warmup >= self.steps:
            raise OptionError("warmup", self.warmup, f"must be less than steps={self.steps}")
        if self.repeats > self.batch_size:
            raise OptionError("repeats", self.repeats, f"must be at most batch_size={self.batch_size}")
        if self.best not in (None, "auto") and "/" not in self.best:
            raise OptionError("best", self.best, "must be auto, null, or a metric, such as held_out/loss")
        if self.best and (self.best.startswith("test/") or re.fullmatch(r"probe/\w+(?<!_choice)", self.best)):
            expected = "must not be measured on test images; probe/…_choice is the accuracy on training images"
            raise OptionError("best", self.best, expected)

    def check(self, tree: Tree) -> None:
        """Check the batch size against the processes, the micro-batches and the number of images."""
        count = tree.launch.processes if isinstance(tree.launch, Launch) else None
        check_shares(batch_size=self.batch_size, accumulate=self.accumulate, processes=count or 1)
        images = count_images(tree, at_most=self.batch_size)
        if images is not None and self.batch_size > images:
            raise OptionError("batch_size", self.batch_size, f"must be at most the {images} training images")

    @property
    def momentum(self) -> float:
        """Decay rate of the momentum of sgd, as in the paper, or of muon."""
        return 0.95 if self.optimizer == "muon" else 0.9

    @property
    def passes(self) -> int:
        """Number of forward and backward passes of each update."""
        return 2 if self.sam else 1

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step: linear warm-up from lr / warmup, then the decay until step `steps`.

        In the authors' code, the warm-up starts one step later, with a learning rate of 0 (vit_jax: utils.py).
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / (self.steps - self.warmup)
        if self.decay == "constant":
            return self.lr
        if self.decay == "linear":
            return self.lr * (1 - done)
        return self.lr * (1 + math.cos(math.pi * done)) / 2

    def due(self, step: int, every: int) -> bool:
        """Return whether an action that is repeated every `every` steps, and at the end, is due after `step` steps."""
        return step % every == 0 or step == self.steps
