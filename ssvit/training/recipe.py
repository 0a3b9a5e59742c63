"""The numbers of a training run, and what follows from them at each step: pure functions, no state, no torch.

`step` counts optimiser updates from 0; `batch_size` is the global one.
"""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from annotated_types import Ge, Le, Len
from pydantic import model_validator

from ssvit.config.declaration import Count, Expect, NotNegative, Options, Positive, Run, Share, Whole
from ssvit.data.sources.base_options import DataSet, Subset, check_shares
from ssvit.devices import Fabric
from ssvit.models.encoder_options import Normalized
from ssvit.options import OptionError

Decay = Annotated[float, Ge(0), Le(0.999999)]  # of a running mean


class Recipe(Options):
    """How to train."""

    steps: Count = 600
    """Optimiser updates."""
    batch_size: Count = 64
    """Images of one update, over all processes."""
    accumulate: Count = 1
    """Micro-batches that a process splits its part of an update into: less memory, the same update."""
    optimizer: Literal["adamw", "sgd", "muon"] = "muon"
    """adamw, sgd, or muon (Jordan et al. 2024): Muon for the weight matrices of Transformer blocks, AdamW for the
    rest. docs/optimizers.md compares them."""
    lr: Positive = 3e-3
    """The peak learning rate, reached after `warmup` steps."""
    warmup: Whole = 30
    """Steps in which the learning rate rises from 0."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate goes on: cosine to zero, linear to lr_end, or constant."""
    lr_end: NotNegative = 0.0
    """Where decay=linear ends; 1e-5 in the authors' code (vit_jax: utils.py)."""
    betas: Annotated[Sequence[Decay], Len(2, 2), Expect("two numbers, [beta1, beta2], each below 1")] = (0.9, 0.95)
    """AdamW's running means keep these shares of themselves at each step."""
    momentum: Decay | None = None
    """Decay rate of the momentum of sgd and muon; None: 0.9 for sgd, as in the paper, and 0.95 for muon. The authors'
    code keeps SGD's in bfloat16 (vit_jax: train.py)."""
    layer_decay: Share = 1.0
    """A layer's learning rate over that of the layer above it."""
    weight_decay: NotNegative = 0.05
    """Weight decay, of matrices alone."""
    weight_decay_end: NotNegative | None = None
    """Where weight decay goes along half a cosine, as in DINO; None: it stays."""
    clip: NotNegative = 1.0
    """The largest global norm of the gradient; 0 for no limit."""
    sam: NotNegative = 0.0
    """How far up the gradient SAM looks (rho, Foret et al. 2021), usually 0.05; a step then costs two. 0: no SAM."""
    ema: Decay = 0.0
    """Momentum of the averaged weights (Polyak), 0 for none; 0.9999 in the paper's best results."""
    precision: Literal["auto", "bf16-mixed", "32-true", "64-true"] = "auto"
    """auto (bfloat16 where the device computes in it natively), bf16-mixed, 32-true or 64-true."""
    backend: Literal["auto", "eager", "compile", "kernels"] = "auto"
    """What computes the layers: eager (plain torch), compile (torch.compile, on a CPU over the kernels), kernels
    (ssvit's own, for a CPU), or auto (compile on CUDA, kernels on a CPU)."""
    seed: Whole = 0
    """Seed of everything random."""
    evaluate_every: Count = 150
    """Steps from one evaluation to the next."""
    save_every: Count = 150
    """Steps from one checkpoint to the next."""
    log_every: Count = 10
    """Steps from one line of metrics to the next."""
    best: str | None = "auto"
    """The metric whose best checkpoint is kept as best/, such as label_free/rankme or held_out/loss; losses and errors
    are better when less. auto: accuracy on validation images, or the first probe's on training images, by which nothing
    is kept unless evaluations differ significantly; None: no checkpoint is kept."""
    patience: Count | None = None
    """Evaluations of that metric without a gain after which the run ends early; None: it never does."""

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        if self.steps * self.batch_size >= 1 << 63:  # images are numbered by int64
            raise OptionError("steps", self.steps, f"must be less than 2^63 / batch_size={self.batch_size}")
        if self.warmup >= self.steps:
            raise OptionError("warmup", self.warmup, f"must be less than steps={self.steps}")
        if self.lr_end > self.lr:
            raise OptionError("lr_end", self.lr_end, f"must be at most lr={self.lr}")
        if self.lr_end > 0 and self.decay != "linear":
            raise OptionError("lr_end", self.lr_end, f"must be 0 with decay={self.decay}: only linear has it")
        if self.batch_size % self.accumulate:
            raise OptionError("accumulate", self.accumulate, f"must divide batch_size={self.batch_size}")
        return self

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        if self.best not in (None, "auto") and "/" not in self.best:
            raise OptionError("best", self.best, "must be auto, null, or a metric, such as held_out/loss")
        if self.best and (self.best.startswith("test/") or re.fullmatch(r"probe/\w+(?<!_choice)", self.best)):
            right = "must not choose by test images: probe/…_choice is a probe's accuracy on training images"
            raise OptionError("best", self.best, right)
        if self.patience is not None and self.best is None:
            raise OptionError("patience", self.patience, "needs a metric: recipe.best=auto, or its name")
        return self

    def check(self, run: Run) -> None:
        """Check that the processes can share a batch, and the encoder and the number of images."""
        count = run.fabric.processes if isinstance(run.fabric, Fabric) else None
        if count is not None:
            check_shares(batch_size=self.batch_size, accumulate=self.accumulate, processes=count)
        if isinstance(run.encoder, Normalized) and not run.encoder.has_patches and self.backend == "kernels":
            right = f"is for a ViT, and the encoder is timm's {run.encoder.label}"
            raise OptionError("backend", self.backend, right)
        images = run.subset.images if isinstance(run.subset, Subset) else None
        if images is None and isinstance(run.source, DataSet):
            images = run.source.count(at_most=self.batch_size)
        if images is not None and self.batch_size > images:
            right = f"must be no more than the {images} images to train on"
            raise OptionError("batch_size", self.batch_size, right)

    @property
    def decay_of_momentum(self) -> float:
        """The decay rate of the momentum of sgd or muon."""
        if self.momentum is not None:
            return self.momentum
        return 0.95 if self.optimizer == "muon" else 0.9

    @property
    def passes(self) -> int:
        """Forward and backward passes of an image in one update."""
        return 2 if self.sam else 1

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, lr / warmup at step 0, then the decay, which would reach its end at step `steps`.

        The authors' warm-up is a step behind: its first step has a learning rate of 0 (vit_jax: utils.py).
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / (self.steps - self.warmup)
        if self.decay == "constant":
            return self.lr
        if self.decay == "linear":
            return self.lr_end + (self.lr - self.lr_end) * (1 - done)
        return self.lr * (1 + math.cos(math.pi * done)) / 2

    def shared(self, processes: int, largest: int) -> "Recipe":
        """The recipe with micro-batches of at most `largest` images in each of so many processes: the same update."""
        each = self.batch_size // processes
        counts = (count for count in range(self.accumulate, each + 1) if each % count == 0 and each // count <= largest)
        return self.changed(accumulate=next(counts, self.accumulate))

    def due(self, step: int, every: int) -> bool:
        """Whether something done `every` so many steps, and at the end, is due once `step` steps are complete."""
        return step % every == 0 or step == self.steps
