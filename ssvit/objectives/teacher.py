"""Implement a teacher: a copy of a module whose weights are an exponential moving average of the module's weights."""

import copy
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

Student = TypeVar("Student", bound=nn.Module)


class Teacher(nn.Module, Generic[Student]):
    """Hold a copy of a student that is part of the state dict, has no gradients and stays in eval mode.

    Attributes:
        module: The copy.
    """

    def __init__(self, student: Student) -> None:
        super().__init__()
        self.module: Student = copy.deepcopy(student).requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "Teacher[Student]":
        """Stay in eval mode for any `mode`."""
        return super().train(False)

    @torch.no_grad()
    def update(self, student: Student, momentum: Tensor, applied: Tensor) -> None:
        """Set weights to momentum * weights + (1 - momentum) * the student's, and buffers to the student's.

        Args:
            student: The student.
            momentum: Momentum of the weights, (), not read by the host.
            applied: Whether the student was updated, () bool, not read by the host; if false, nothing changes.
        """
        approach(list(self.module.parameters()), list(student.parameters()), (1 - momentum) * applied)
        for buffer, source in zip(self.module.buffers(), student.buffers(), strict=True):
            buffer.copy_(torch.where(applied, source, buffer))


def approach(weights: list[Tensor], others: list[Tensor], rate: Tensor) -> None:
    """Interpolate weights in place: weights = (1 - rate) * weights + rate * others.

    A rate of 0 keeps the weights if the other weights are finite, as a student's are after a skipped step too. For
    sharded weights, each rank updates its shard: both lists are sharded identically.

    Args:
        weights: Weights that are changed.
        others: Target weights of the same shapes.
        rate: Interpolation factor, (), not read by the host.
    """
    weights, others = [*map(local, weights)], [*map(local, others)]
    rates = {dtype: rate.to(dtype) for dtype in {weight.dtype for weight in weights}}
    torch._foreach_lerp_(weights, others, [rates[weight.dtype] for weight in weights])


def local(tensor: Tensor) -> Tensor:
    """Return the shard of a tensor on this rank, without a copy, or the tensor itself if it is not sharded."""
    to_local = getattr(tensor, "to_local", None)  # of a DTensor, whose module takes a second to import
    return tensor if to_local is None else to_local()


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor in every process. All processes must call this function."""
    full_tensor = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else full_tensor()
