"""A teacher: a copy of a module whose weights follow the module's as an exponential moving average."""

import copy

import torch
from torch import Tensor, nn


class Teacher(nn.Module):
    """`module` is a copy of the student: part of the state dict, without gradients, always in eval mode."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(student).requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "Teacher":
        """Stay in eval mode, whatever `mode` is."""
        return super().train(False)

    @torch.no_grad()
    def update(self, student: nn.Module, momentum: Tensor, applied: Tensor) -> None:
        """weights = momentum * weights + (1 - momentum) * the student's; buffers become the student's.

        momentum: (). applied: () bool; where it is false nothing changes. Neither is read back to the host.
        """
        weights = list(self.module.parameters())
        # A rate of 0 keeps a weight: the student's are finite after a skipped step, too.
        rate = (1 - momentum) * applied
        torch._foreach_lerp_(weights, list(student.parameters()), [rate.to(weight.dtype) for weight in weights])
        for own, other in zip(self.module.buffers(), student.buffers(), strict=True):
            own.copy_(torch.where(applied, other, own))
