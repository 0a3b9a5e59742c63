"""A teacher: a copy of a module whose weights follow the module's as an exponential moving average."""

import copy
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Student = TypeVar("Student", bound=nn.Module)


class Teacher(nn.Module, Generic[Student]):
    """`module` is a copy of the student: part of the state dict, without gradients, always in eval mode."""

    def __init__(self, student: Student) -> None:
        super().__init__()
        self.module: Student = copy.deepcopy(student).requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "Teacher[Student]":
        """Stay in eval mode, whatever `mode` is."""
        return super().train(False)

    @torch.no_grad()
    def update(self, student: Student, momentum: Tensor, applied: Tensor) -> None:
        """weights = momentum * weights + (1 - momentum) * the student's; buffers become the student's.

        momentum: (). applied: () bool; where it is false nothing changes. Neither is read back to the host.
        """
        approach(list(self.module.parameters()), list(student.parameters()), (1 - momentum) * applied)
        for own, other in zip(self.module.buffers(), student.buffers(), strict=True):
            own.copy_(torch.where(applied, other, own))


def approach(weights: list[Tensor], others: list[Tensor], rate: Tensor) -> None:
    """weights = (1 - rate) * weights + rate * others, in place; the rate, (), is not read by the host.

    A rate of 0 keeps the weights, if the others are finite, which a student's are after a skipped step, too. Of sharded
    ones each process changes its part: both are shared out alike.
    """
    weights, others = [*map(local, weights)], [*map(local, others)]
    rates = {dtype: rate.to(dtype) for dtype in {weight.dtype for weight in weights}}
    torch._foreach_lerp_(weights, others, [rates[weight.dtype] for weight in weights])


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: all of it, or its part of a sharded one, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
