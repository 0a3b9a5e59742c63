"""A teacher: a frozen copy of a module that follows the module as an exponential moving average of its weights."""

import copy

import torch
from torch import Tensor, nn


class Teacher(nn.Module):
    """`module`, a copy of the student as it is at the start: part of the state dict, without gradients.

    It is in eval mode always, also where the objective that holds it is trained.
    """

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
        # A rate of zero leaves a weight as it is: after a skipped step the student's weights are finite, too.
        rate = (1 - momentum) * applied
        torch._foreach_lerp_(weights, list(student.parameters()), [rate.to(weight.dtype) for weight in weights])
        for own, other in zip(self.module.buffers(), student.buffers(), strict=True):
            own.copy_(torch.where(applied, other, own))
