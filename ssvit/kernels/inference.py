"""Compute the outputs of trained models in float32 or bfloat16 by the fastest layers of this machine."""

import copy
from contextlib import AbstractContextManager
from typing import Literal, TypeVar

import torch
from torch import nn

from ssvit.devices import Precision
from ssvit.engine import private
from ssvit.kernels import operators
from ssvit.kernels.accelerate import accelerate, pack

T = TypeVar("T", bound=nn.Module)


def resolved(precision: Literal["auto"] | Precision, device: torch.device) -> Precision:
    """Return the precision; auto is bf16 on devices that are faster in it."""
    if precision != "auto":
        return precision
    return "bf16" if private.prefers_bfloat16(device) else 32


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return a context that computes in a precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def prepared(model: T, precision: Precision, *, by_kernels: bool = True) -> T:
    """Return a copy of a model for passes without gradients within `autocast`, or in float32 the model itself.

    The copy shares the weights in float32 and also stores them in bfloat16, so that they are converted once. On a CPU
    it computes by the kernels, if they are built. Changes of the weights have no effect on a copy without kernels.

    Args:
        model: The model, on its device.
        precision: The precision.
        by_kernels: Whether to use the kernels.
    """
    if precision == 32:
        return model
    fast = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    if by_kernels and next(model.parameters()).device.type == "cpu" and operators.library() is not None:
        accelerate(fast)
        pack(fast)
        return fast
    for part in fast.modules():
        if type(part) is nn.Linear:
            for name, weight in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(weight.detach().bfloat16(), requires_grad=False))
    return fast
