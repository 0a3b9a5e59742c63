"""The numbers of a training run, and what follows from them at each step: pure functions, no state, no torch.

`step` counts optimiser updates from 0; `batch_size` is the global one.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ssvit.options import OptionError, flag, number, one_of, whole


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train.

    steps: optimiser updates. batch_size: images of one update, over all processes. accumulate: micro-batches that a
    process splits its part of an update into. lr: the peak learning rate, reached after warmup steps and followed by
    a cosine or linear decay to zero, or constant. betas, weight_decay: AdamW's. clip: the largest global norm of the
    gradient, 0 for no limit. ema: momentum of the averaged copy of the weights, 0 for none. precision: auto
    (bfloat16 where the device computes in it natively), bf16-mixed, 32-true or 64-true. compile: auto (on
    for CUDA), true or false. seed: of everything random. evaluate_every, save_every, log_every: in steps.
    """

    steps: int = 1000
    batch_size: int = 256
    accumulate: int = 1
    lr: float = 1e-3
    warmup: int = 100
    decay: str = "cosine"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.05
    clip: float = 1.0
    ema: float = 0.0
    precision: str = "auto"
    compile: Any = "auto"
    seed: int = 0
    evaluate_every: int = 100
    save_every: int = 100
    log_every: int = 10

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "evaluate_every", "save_every", "log_every"):
            whole(name, getattr(self, name))
        for name in ("warmup", "seed"):
            whole(name, getattr(self, name), at_least=0)
        if self.warmup >= self.steps:
            raise OptionError("warmup", self.warmup, f"must be less than steps={self.steps}")
        number("lr", self.lr, 0, above=True)
        for name in ("weight_decay", "clip"):
            number(name, getattr(self, name), 0)
        if not isinstance(self.betas, list | tuple) or len(self.betas) != 2:
            raise OptionError("betas", self.betas, "must be two numbers, [beta1, beta2]")
        for beta in self.betas:
            number("betas", beta, 0, 0.999999)
        number("ema", self.ema, 0, 0.999999)
        one_of("decay", self.decay, ("cosine", "linear", "constant"))
        one_of("precision", self.precision, ("auto", "bf16-mixed", "32-true", "64-true"))
        if self.compile != "auto":
            flag("compile", self.compile)
        if self.batch_size % self.accumulate:
            raise OptionError("accumulate", self.accumulate, f"must divide batch_size={self.batch_size}")

    def learning_rate(self, step: int) -> float:
        """Linear warm-up from 0 (lr / warmup at step 0) to lr, then the decay, which would reach 0 at step `steps`."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / (self.steps - self.warmup)
        if self.decay == "constant":
            return self.lr
        return self.lr * (1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2)

    def due(self, step: int, every: int) -> bool:
        """Whether something done `every` so many steps, and at the end, is due once `step` steps are complete."""
        return step % every == 0 or step == self.steps


def parameter_groups(named_parameters: Iterable[tuple[str, Any]], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases, norms, positions and tokens do not. Only parameters that are trained are listed."""
    decayed, free = [], []
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and not any(word in name for word in ("positions", "token", "relative"))
            (decayed if is_matrix else free).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
