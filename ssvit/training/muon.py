"""Muon: orthogonalised momentum for weight matrices (Jordan et al. 2024).

The singular values of the momentum of a Transformer's weights differ by orders of magnitude, so that a few directions
dominate the updates of plain momentum and of Adam. Muon moves a matrix by the same distance in all directions. Its
update is scaled to the root mean square of a typical AdamW update (Liu et al. 2025, arXiv 2502.16982, section 2.2), so
that learning rate and weight decay keep their meaning.

torch.optim.Muon orthogonalises matrices one by one and treats a packed projection as one matrix. This implementation
orthogonalises all matrices of one shape in one batch, and the parts of a packed projection separately.

Letters: n matrices of r rows and c columns.
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ssvit.models.block import Block
from ssvit.objectives.teacher import local
from ssvit.training.sharding import shard_of

# Each iteration computes a x + b x^3 + c x^5. Four of them map the singular values from 0.003 to 1 times the Frobenius
# norm to 0.78 to 1.22; five equal iterations of Jordan et al. map them to 0.68 to 1.20. Each polynomial minimises the
# maximum distance from 1 (Amsel et al. 2025, arXiv 2505.16932) on the interval of its inputs, extended by 2 % so that
# rounding to bfloat16 does not leave it.
COEFFICIENTS = (
    (8.2218, -23.3469, 16.6338),
    (3.9728, -2.8450, 0.5170),
    (3.4737, -2.5059, 0.4810),
    (2.5046, -1.7909, 0.4071),
)
RMS = 0.2  # root mean square of the update of a matrix, for a learning rate of 1
_Part = tuple[Tensor, Tensor, Mapping[str, Any]]  # a weight, its gradient and its group
_EPSILON = 1e-7  # lower bound of the norm that divides a matrix


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return approximately U V^T for matrices U S V^T, by Newton-Schulz iterations.

    Args:
        matrices: (n, r, c).
        dtype: Data type of the products. bfloat16 suffices, since the singular values of the result are only
            approximately 1 in any precision.

    Returns:
        (n, r, c), in the data type of `matrices`.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPSILON)).to(dtype)
    if dtype != torch.bfloat16 and x.shape[-1] >= 2 * x.shape[-2]:
        # Each iteration multiplies x by a polynomial of the first Gram matrix. For c = 4 r, their product takes 58 % of
        # the operations, but it magnifies the rounding errors of that matrix: in bfloat16, it is five times less exact.
        first = x @ x.mT
        factor = _polynomial(first, *COEFFICIENTS[0])
        for coefficients in COEFFICIENTS[1:]:
            factor = _polynomial(factor @ first @ factor, *coefficients) @ factor
        x = factor @ x
    else:
        for a, b, c in COEFFICIENTS:
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def _polynomial(gram: Tensor, a: float, b: float, c: float) -> Tensor:
    """Return a I + b G + c G^2 for symmetric matrices G, (n, r, r)."""
    result = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


def block_matrices(model: nn.Module) -> dict[Tensor, int]:
    """Return the weights that Muon updates, each with the number of matrices packed in it.

    These are the weights of the linear layers in all Transformer blocks of encoder and decoder. AdamW updates the patch
    projection, heads, norms, biases, tokens, position embeddings and low-rank updates.
    """
    blocks = (module for module in model.modules() if isinstance(module, Block))
    return {weight: count for block in blocks for weight, count in block.matrices()}


class Muon(torch.optim.AdamW):
    """Update weight matrices with Muon and all other parameters with fused AdamW.

    As with torch's fused optimisers, a step has no effect if the attribute `found_inf`, a () tensor, is 1. With sharded
    weights, a process keeps the momentum of its shards, and gathers one matrix at a time.

    Args:
        groups: Parameter groups, as for AdamW.
        matrices: Number of matrices packed along the first dimension of each weight that Muon updates, as returned by
            `block_matrices`.
        lr: Default learning rate of groups.
        betas: Decay rates of AdamW's running means.
        momentum: Decay rate of Muon's running mean of gradients, with Nesterov's update.
        dtype: Data type of the orthogonalisation; None: the weights' data type.
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        matrices: Mapping[Tensor, int],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.95,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._momentum, self._dtype = momentum, dtype
        self.found_inf: Tensor | None = None
        split: list[dict[str, Any]] = []
        for group in groups:
            by_count: dict[int, list[Tensor]] = {}
            for weight in group["params"]:
                by_count.setdefault(matrices.get(weight, 0), []).append(weight)
            split += [{**group, "params": weights, "matrices": count} for count, weights in by_count.items()]
        super().__init__(split, lr=lr, betas=betas, fused=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a saved state. AdamW's method expects a step count, which the state of matrices lacks."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # without a loss
        """Update all parameters that have a gradient; a closure is not supported."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["matrices"]]
        try:
            inspect.unwrap(torch.optim.AdamW.step)(self)  # see `private.step`
        finally:
            self.param_groups = groups
        by_shape: dict[tuple[int, int], list[_Part]] = {}
        for group in groups:
            for weight in group["params"] if group["matrices"] else ():
                if weight.grad is not None:
                    sides = weight.shape[0] // group["matrices"], weight.shape[1]
                    by_shape.setdefault((min(sides), max(sides)), []).append((weight, weight.grad, group))
        for parts in by_shape.values():
            self._update(parts)

    def _update(self, parts: Sequence[_Part]) -> None:
        """Update weights whose matrices have the same shape, unless `found_inf` is 1."""
        applied = None if self.found_inf is None else self.found_inf == 0
        for weight, _, _ in parts:
            if "momentum_buffer" not in self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        means = [local(self.state[weight]["momentum_buffer"]) for weight, _, _ in parts]
        gradients = [local(gradient) for _, gradient, _ in parts]
        if applied is not None:  # a gradient may contain NaNs, and 0 * NaN is NaN
            gradients = [torch.where(applied, new, mean) for new, mean in zip(gradients, means, strict=True)]
        torch._foreach_lerp_(means, gradients, 1 - self._momentum)
        nesterov = torch._foreach_lerp(gradients, means, self._momentum)
        counts = [group["matrices"] for _, _, group in parts]
        updates = zip(nesterov, parts, counts, strict=True)
        stacked = torch.cat([_unpacked(update, weight, count) for update, (weight, *_), count in updates])
        moves = orthogonalize(stacked, self._dtype or stacked.dtype)
        for (weight, _, group), move in zip(parts, moves.split(counts), strict=True):
            step, before = group["lr"] * RMS * math.sqrt(move.shape[2]), local(weight.detach())
            after = before * (1 - group["lr"] * group["weight_decay"]) - _packed(move, weight) * step
            before.copy_(after if applied is None else torch.where(applied, after, before))


def _unpacked(part: Tensor, weight: Any, count: int) -> Tensor:
    """Gather a shard of a tensor like `weight`, and unpack its matrices (count, r, c), transposed so that r <= c."""
    if hasattr(weight, "device_mesh"):
        from torch.distributed.tensor import DTensor

        layout = weight.device_mesh, weight.placements
        part = DTensor.from_local(part, *layout, shape=weight.shape, stride=weight.stride()).full_tensor()
    matrices = part.unflatten(0, (count, -1))
    return matrices.mT if matrices.shape[1] > matrices.shape[2] else matrices


def _packed(matrices: Tensor, weight: Tensor) -> Tensor:
    """Pack matrices (count, r, c) as `weight` is, and return this process's shard."""
    whole = (matrices if matrices.shape[2] == weight.shape[1] else matrices.mT).flatten(0, 1)
    return shard_of(whole, weight)
