"""The numbers of a training run, and what follows from them at each step: pure functions, no state, no torch.

`step` counts optimiser updates from 0; `batch_size` is the global one.
"""

import math
import re
from dataclasses import dataclass, replace

from ssvit.options import OptionError, number, one_of, whole


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train."""

    steps: int = 1000
    """Optimiser updates."""
    batch_size: int = 256
    """Images of one update, over all processes."""
    accumulate: int = 1
    """Micro-batches that a process splits its part of an update into: less memory, the same update."""
    optimizer: str = "adamw"
    """adamw, sgd, or muon (Jordan et al. 2024): Muon for the weight matrices of Transformer blocks, AdamW for the
    rest."""
    lr: float = 1e-3
    """The peak learning rate, reached after `warmup` steps."""
    warmup: int = 100
    """Steps in which the learning rate rises from 0."""
    decay: str = "cosine"
    """How the learning rate goes on: cosine to zero, linear to lr_end, or constant."""
    lr_end: float = 0.0
    """Where decay=linear ends; 1e-5 in the authors' code (vit_jax: utils.py)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's running means keep these shares of themselves at each step."""
    momentum: float | None = None
    """Decay rate of the momentum of sgd and muon; None: 0.9 for sgd, as in the paper, and 0.95 for muon. The authors'
    code keeps SGD's in bfloat16 (vit_jax: train.py)."""
    layer_decay: float = 1.0
    """A layer's learning rate over that of the layer above it."""
    weight_decay: float = 0.05
    """Weight decay, of matrices alone."""
    weight_decay_end: float | None = None
    """Where weight decay goes along half a cosine, as in DINO; None: it stays."""
    clip: float = 1.0
    """The largest global norm of the gradient; 0 for no limit."""
    sam: float = 0.0
    """How far up the gradient SAM looks (rho, Foret et al. 2021), usually 0.05; a step then costs two. 0: no SAM."""
    ema: float = 0.0
    """Momentum of the averaged weights (Polyak), 0 for none; 0.9999 in the paper's best results."""
    precision: str = "auto"
    """auto (bfloat16 where the device computes in it natively), bf16-mixed, 32-true or 64-true."""
    backend: str = "auto"
    """What computes the layers: eager (plain torch), compile (torch.compile, on a CPU over the kernels), kernels
    (ssvit's own, for a CPU), or auto (compile on CUDA, kernels on a CPU)."""
    seed: int = 0
    """Seed of everything random."""
    evaluate_every: int = 100
    """Steps from one evaluation to the next."""
    save_every: int = 100
    """Steps from one checkpoint to the next."""
    log_every: int = 10
    """Steps from one line of metrics to the next."""
    best: str | None = "auto"
    """The metric whose best checkpoint is kept as best/, such as label_free/rankme or held_out/loss; losses and errors
    are better when less. auto: accuracy on validation images, or a probe's on training images; None: no checkpoint is
    kept."""
    patience: int | None = None
    """Evaluations of that metric without a gain after which the run ends early; None: it never does."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "evaluate_every", "save_every", "log_every"):
            whole(name, getattr(self, name))
        if self.steps * self.batch_size >= 1 << 63:  # images are numbered by int64
            raise OptionError("steps", self.steps, f"must be less than 2^63 / batch_size={self.batch_size}")
        for name in ("warmup", "seed"):
            whole(name, getattr(self, name), at_least=0)
        if self.warmup >= self.steps:
            raise OptionError("warmup", self.warmup, f"must be less than steps={self.steps}")
        number("lr", self.lr, 0, above=True)
        number("lr_end", self.lr_end, 0, self.lr)
        for name in ("weight_decay", "clip", "sam"):
            number(name, getattr(self, name), 0)
        if self.weight_decay_end is not None:
            number("weight_decay_end", self.weight_decay_end, 0)
        if not isinstance(self.betas, list | tuple) or len(self.betas) != 2:
            raise OptionError("betas", self.betas, "must be two numbers, [beta1, beta2]")
        for beta in self.betas:
            number("betas", beta, 0, 0.999999)
        number("ema", self.ema, 0, 0.999999)
        if self.momentum is not None:
            number("momentum", self.momentum, 0, 0.999999)
        number("layer_decay", self.layer_decay, 0, 1, above=True)
        one_of("optimizer", self.optimizer, ("adamw", "sgd", "muon"))
        one_of("decay", self.decay, ("cosine", "linear", "constant"))
        if self.lr_end > 0 and self.decay != "linear":
            raise OptionError("lr_end", self.lr_end, f"must be 0 with decay={self.decay}: only linear has it")
        one_of("precision", self.precision, ("auto", "bf16-mixed", "32-true", "64-true"))
        one_of("backend", self.backend, ("auto", "eager", "compile", "kernels"))
        if self.best not in (None, "auto") and "/" not in str(self.best):
            raise OptionError("best", self.best, "must be auto, null, or a metric, such as held_out/loss")
        if self.best and (self.best.startswith("test/") or re.fullmatch(r"probe/\w+(?<!_choice)", self.best)):
            right = "must not choose by test images: probe/…_choice is a probe's accuracy on training images"
            raise OptionError("best", self.best, right)
        if self.patience is not None:
            whole("patience", self.patience)
            if self.best is None:
                raise OptionError("patience", self.patience, "needs a metric: recipe.best=auto, or its name")
        if self.batch_size % self.accumulate:
            raise OptionError("accumulate", self.accumulate, f"must divide batch_size={self.batch_size}")

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
        return replace(self, accumulate=next(counts, self.accumulate))

    def due(self, step: int, every: int) -> bool:
        """Whether something done `every` so many steps, and at the end, is due once `step` steps are complete."""
        return step % every == 0 or step == self.steps
