"""Accelerate models on a CPU without changing their code: `accelerate` replaces the classes of modules.

The new class is a subclass of the module's class that calls the kernels, with the same parameters, state and name. A
parametrized module (LoRA) becomes a parametrized module of the subclass. The original code runs for tensors of types,
shapes or devices that the kernels do not support, and for modules with hooks or of other classes.

Letters: b images, t tokens, m output tokens, d width.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ssvit.engine.private import has_hooks
from ssvit.kernels import operators
from ssvit.kernels.fused import Branch, attention, branches, layer_norm, linear, packed_weight, version
from ssvit.models import block, vit
from ssvit.models.block import ALL, Ids, TokenInfo


class Linear(nn.Linear):
    """Apply `fused.linear` to tokens; a single vector per image is too little work to profit.

    Attributes:
        packed: The result of `pack`, with the version of the weight.
    """

    packed: tuple[Tensor, int | None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the linear layer: (..., i) -> (..., o)."""
        if self.bias is None or x.ndim < 3:
            return super().forward(x)
        return linear(x, self.weight, self.bias, packed_weight(self))


class LayerNorm(nn.LayerNorm):
    """Apply `fused.layer_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        if self.bias is None or len(self.normalized_shape) > 1:
            return super().forward(x)
        return layer_norm(x, self.weight, self.bias, self.eps)


class Attention(block.Attention):
    """Apply attention to the packed projections by `fused.attention`."""

    linear = staticmethod(linear)

    def mix(self, query: Tensor | None, packed: Tensor, output_ids: Ids, info: TokenInfo) -> Tensor:
        """Mix the values of the tokens; see `block.Attention.mix`."""
        is_plain = self.relative is None and not (self.training and self.dropout > 0)
        mixed = attention(query, packed, self.heads, info.rotation, output_ids) if is_plain else None
        return super().mix(query, packed, output_ids, info) if mixed is None else mixed


class Block(block.Block):
    """Compute each branch and its layer norm as one kernel, including the residual unless there is dropout."""

    def forward(self, x: Tensor, output_ids: Ids = None, info: TokenInfo = ALL) -> Tensor:
        """Apply attention and MLP to tokens; see `block.Block.forward`."""
        attention, mlp = self.branches()
        fits = output_ids is None and info.rotation is None
        added = self._added(x, attention, self.scale1, info, 0) if fits else None
        if added is None:
            attended = self.attention(self.norm1(x), output_ids, info)
            added = self.add(
                x if output_ids is None else block.gather_tokens(x, output_ids), attended, self.scale1, info, 0
            )
        changed = self._added(added, mlp, self.scale2, info, 1)
        return self.add(added, self.mlp(self.norm2(added)), self.scale2, info, 1) if changed is None else changed

    @property
    def adds(self) -> bool:
        """Return whether branches are added unchanged, without LayerScale, dropout or stochastic depth."""
        scaled = isinstance(self.scale1, block.LayerScale)
        return not scaled and (not self.training or self.dropout.p == self.drop.rate == 0)

    def branches(self) -> tuple[Branch | None, Branch | None]:
        """Return attention and MLP, each None if the kernels do not support it or one of its modules must be called."""
        attention, mlp, part = None, None, self.attention
        if unhooked(part, Attention) and part.relative is None and not (self.training and part.dropout > 0):
            attention = _branch(self.norm1, part.qkv, part.out, part.heads)
        if self.gelu == "exact" and not self.gated and not (self.training and self.dropout.p > 0):
            mlp = _branch(self.norm2, self.expand, self.contract, 0)
        return attention, mlp

    def _added(self, x: Tensor, branch: Branch | None, scale: nn.Module, info: TokenInfo, number: int) -> Tensor | None:
        """Return the sum of x and a branch, or None if the kernels do not support the branch."""
        out = None if branch is None else branches(x, branch, adds=self.adds)
        return out if out is None or self.adds else self.add(x, out, scale, info, number)


class Layers(block.Layers):
    """Compute all layers as one kernel if nothing happens between them."""

    def forward(self, x: Tensor, output_ids: Ids = None, info: TokenInfo = ALL) -> Tensor:
        """Apply all blocks to tokens; see `block.Layers.forward`."""
        whole, out = list(self)[: len(self) - (output_ids is not None)], None
        apart = info.between or self.checkpoints or not all(unhooked(block, Block) and block.adds for block in whole)
        if whole and not apart and info.rotation is None:
            parts = [part for block in whole if isinstance(block, Block) for part in block.branches()]
            known = [part for part in parts if part is not None]
            out = branches(x, *known) if len(known) == len(parts) else None
        if out is None:
            return super().forward(x, output_ids, info)
        return out if output_ids is None else self[-1](out, output_ids, info.of_layer(len(self) - 1))


class ViT(vit.ViT):
    """Embed patches without a normalised copy of the images."""

    def embed(self, images: Tensor, visible_ids: Ids = None) -> Tensor:
        """Normalise and project patches in one product, x W / std + (bias - mean W / std); see `vit.ViT.embed`.

        The mean is subtracted from floats before they are rounded to half precision, which is exact only for bytes.
        """
        # A stem pads normalised images with zeros, so its normalisation cannot be folded into the projection.
        if self.stem is not None or not unhooked(self.patch, Linear):
            return super().embed(images, visible_ids)
        self.check(images)
        unit = 255.0 if images.dtype == torch.uint8 else 1.0
        area = self.patch.in_features // self.channels
        mean, std = ((value * unit).repeat_interleave(area) for value in (self.mean, self.std))
        weight = self.patch.weight / std
        kind, dtype = images.device.type, weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            weight = weight.to(dtype).to(weight.dtype)  # rounded as in the product, so that the mean cancels exactly
        patches = self.patchify(images, visible_ids)
        if images.dtype != torch.uint8:
            return linear((patches - mean).to(dtype), weight, self.patch.bias)
        # An elementwise sum, since autocast would round the mean to half precision in a matrix product.
        return linear(patches.to(dtype), weight, self.patch.bias - (weight * mean).sum(1))


_FASTER: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear, nn.LayerNorm: LayerNorm, block.Attention: Attention,
    block.Block: Block, block.Layers: Layers, vit.ViT: ViT,
}  # fmt: skip
_PLAIN = {faster: plain for plain, faster in _FASTER.items()}


def accelerate(module: nn.Module, enabled: bool = True) -> None:
    """Replace the classes of a module and its submodules by accelerated classes, in place.

    Args:
        module: The module.
        enabled: Whether to accelerate; False restores the original classes.
    """
    swaps = _FASTER if enabled else _PLAIN
    for part in module.modules():
        kind = type(part)
        if is_parametrized(part) and kind.__base__ in swaps:
            # torch creates a class for each parametrized module, with a property that computes its weight.
            part.__class__ = type(kind.__name__, (swaps[kind.__base__],), dict(vars(kind)))
        else:
            part.__class__ = swaps.get(kind, kind)


def pack(module: nn.Module) -> None:
    """Convert the weights of accelerated linear layers once for passes without gradients, instead of at each pass.

    The converted weights are not used after a change of the weights.
    """
    for part in module.modules():
        if type(part) is Linear and operators.supports(part.weight, *part.weight.shape):
            part.packed = operators.library().pack(part.weight.detach()), version(part.weight)


def unhooked(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module is exactly of a class and has no hooks, so that calling it can be skipped."""
    return type(module) is kind and not has_hooks(module)


def _branch(norm: nn.LayerNorm, first: nn.Linear, second: nn.Linear, heads: int) -> Branch | None:
    """Return a branch of these modules, or None if one of them must be called."""
    known = unhooked(norm, LayerNorm) and unhooked(first, Linear) and unhooked(second, Linear)
    return Branch(norm, first, second, heads) if known else None
