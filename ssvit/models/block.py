"""Implement the layers of a Transformer (Dosovitskiy et al. 2021, equations 2 and 3) for encoders and decoders.

Letters: b images, t tokens, q queries, m selected tokens, h heads, k width of a head, d width.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint

from ssvit.models import positions
from ssvit.models.positions import Grid

_APPROXIMATE = {"exact": "none", "tanh": "tanh"}  # values of torch's argument `approximate`
_MOST_TOKENS = 1000  # beyond it, plain attention is slower than torch's fused kernel (docs/performance.md)
Ids = Tensor | None  # token indices, (b, m); None: all tokens in order


class TokenInfo(NamedTuple):
    """Hold the inputs of the layers in addition to the token embeddings.

    Attributes:
        position_ids: Position of each token, (b, t); None: all tokens in order.
        rotation: Result of `positions.Rotary` for the tokens in their order; None without rotary positions.
        between: Values added to the input of each layer after the first, (t, d) or (b, t, d); empty for none.
        depth_noise: Uniform random numbers of stochastic depth for the two branches of each layer, (b, 2 * depth), see
            `Encoder.depth_noise`; None: torch's generator samples them.
        grid: Rows and columns of patches; None: those of the encoder's image size.
    """

    position_ids: Ids = None
    rotation: Tensor | None = None
    between: Sequence[Tensor] = ()
    depth_noise: Tensor | None = None
    grid: Grid | None = None

    def of_layer(self, layer: int) -> "TokenInfo":
        """Return the inputs of one layer (from 0), with its depth_noise (b, 2) and without `between`."""
        noise = None if self.depth_noise is None else self.depth_noise[:, 2 * layer : 2 * layer + 2]
        return TokenInfo(self.position_ids, self.rotation, depth_noise=noise, grid=self.grid)


ALL = TokenInfo()  # all tokens in order, without further inputs


def lecun_normal_(matrix: Tensor) -> None:
    """Fill a matrix (out, in) from a normal distribution of variance 1 / in, truncated at two deviations, as in JAX."""
    # Truncation reduces the standard deviation to 0.8796 of its value, for which JAX corrects.
    std = matrix.shape[1] ** -0.5 / 0.87962566
    nn.init.trunc_normal_(matrix, std=std, a=-2 * std, b=2 * std)


def gather_tokens(tokens: Tensor, ids: Tensor) -> Tensor:
    """Select tokens of each image by index: (b, t, d) and (b, m) -> (b, m, d)."""
    # Copying complete rows is 5 to 10 times faster on a CPU than torch's `gather`, which looks up each number.
    rows = ids + torch.arange(tokens.shape[0], device=ids.device)[:, None] * tokens.shape[1]
    return tokens.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, ids.shape)


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Compute scaled dot-product attention.

    In bfloat16 on a CPU, matrix products and a softmax are up to 4 times as fast as torch's fused kernel, which
    computes in float32. They store the attention weights, so the fused kernel is used for long sequences.

    Args:
        query: Queries, (b, h, q, k).
        key: Keys, (b, h, t, k).
        value: Values, (b, h, t, k).
        bias: Values added to the logits, (b, h, q, t), or None.
        dropout: Dropout rate of the attention weights.

    Returns:
        Outputs, (b, h, q, k).
    """
    if query.device.type != "cpu" or query.dtype != torch.bfloat16 or key.shape[2] > _MOST_TOKENS:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
    logits = (query * query.shape[-1] ** -0.5) @ key.mT
    weights = (logits if bias is None else logits + bias).softmax(-1)
    return F.dropout(weights, dropout) @ value


class StochasticDepth(nn.Module):
    """Drop a residual branch for a random subset of the images in training (Huang et al. 2016).

    The branch of an image is dropped if the image's random number, uniform in [0, 1), is below the rate.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor, noise: Tensor | None = None) -> Tensor:
        """Drop the branch (b, t, d) of some images and scale up the remaining ones: -> (b, t, d).

        Args:
            branch: Output of a residual branch, (b, t, d).
            noise: Uniform random numbers, (b,); None: torch's generator samples them.

        Returns:
            The branch, zero where it is dropped and divided by 1 - rate elsewhere, (b, t, d).
        """
        if not self.training or self.rate == 0:
            return branch
        noise = torch.rand(len(branch), device=branch.device) if noise is None else noise
        kept = (noise >= self.rate).to(noise.dtype)
        return branch * (kept / (1 - self.rate)).to(branch.dtype)[:, None, None]


class LayerScale(nn.Module):
    """Per-channel learned scale of a residual branch (Touvron et al. 2021: CaiT)."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, branch: Tensor) -> Tensor:
        """Multiply a branch (..., d) by the learned scale."""
        return branch * self.gamma.to(branch.dtype)


class Attention(nn.Module):
    """Implement multi-head self-attention with one packed projection (Appendix A).

    Args:
        width: Width of the tokens.
        heads: Number of heads.
        dropout: Dropout rate of the attention weights.
        relative: Patch grid and number of prefix tokens for `positions.Relative`; None: no relative positions.
    """

    linear: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(F.linear)

    def __init__(self, *, width: int, heads: int, dropout: float, relative: tuple[Grid, int] | None) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.relative = None if relative is None else positions.Relative(*relative, width // heads)

    def forward(self, x: Tensor, output_ids: Ids = None, info: TokenInfo = ALL) -> Tensor:
        """Apply attention to tokens.

        Args:
            x: Tokens, (b, t, d).
            output_ids: Indices of the tokens whose outputs are computed, (b, m); None: all tokens.
            info: Positions of the tokens.

        Returns:
            Outputs, (b, t, d), or (b, m, d) with output_ids.
        """
        return self.out(self.mix(*self.project(x, output_ids), output_ids, info))

    def project(self, x: Tensor, output_ids: Ids) -> tuple[Tensor | None, Tensor]:
        """Project tokens to queries, keys and values.

        Returns:
            None, and queries, keys and values, (b, t, 3 * d); or with output_ids the queries of these tokens,
            (b, m, d), and the keys and values of all tokens, (b, t, 2 * d).
        """
        if output_ids is None:
            return None, self.qkv(x)
        sizes = x.shape[-1], 2 * x.shape[-1]
        (weight, rest), (bias, rest_bias) = self.qkv.weight.split(sizes), self.qkv.bias.split(sizes)
        return self.linear(gather_tokens(x, output_ids), weight, bias), self.linear(x, rest, rest_bias)

    def mix(self, query: Tensor | None, packed: Tensor, output_ids: Ids, info: TokenInfo) -> Tensor:
        """Mix the values of the tokens.

        Args:
            query: First result of `project`.
            packed: Second result of `project`.
            output_ids: Indices of the tokens whose outputs are computed, (b, m); None: all tokens.
            info: Positions of the tokens.

        Returns:
            Outputs, (b, t, d), or (b, m, d) with output_ids.
        """
        inputs = self.split(query, packed, output_ids, info)
        mixed = attend(*inputs, self.dropout if self.training else 0.0)
        return mixed.transpose(1, 2).flatten(2)

    def split(
        self, query: Tensor | None, packed: Tensor, output_ids: Ids, info: TokenInfo
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Split the projections into heads and add the positions, with the arguments of `mix`.

        Returns:
            Queries (b, h, q, k), keys and values, both (b, h, t, k), and the bias of the logits, see `attend`.
        """
        # einops would take up to 2 % of the time of a pass with a single image. The gradients of the parts are stacked
        # where they are split: in dimension 2, their stack is the gradient of `packed` without a further copy.
        parts = packed.unflatten(2, (3 if query is None else 2, self.heads, -1)).unbind(2)
        parts = parts if query is None else (query.unflatten(2, (self.heads, -1)), *parts)
        query, key, value = (part.transpose(1, 2) for part in parts)
        if info.rotation is not None:
            query, key = positions.rotate(query, info.rotation, output_ids), positions.rotate(key, info.rotation)
        bias = None if self.relative is None else self.relative(query, packed.shape[1], info.position_ids, output_ids)
        return query, key, value, bias


class Block(nn.Module):
    """Implement a pre-norm layer: x = x + attention(norm(x)), then x = x + mlp(norm(x)) (equations 2 and 3).

    Args:
        attention: The self-attention.
        width: Width of the tokens.
        mlp_width: Width of the MLP's hidden layer.
        dropout: Dropout rate of both branches and of the MLP's hidden layer.
        drop: Rate of stochastic depth.
        mlp: gelu or swiglu.
        gelu: exact or tanh.
        layer_scale: Initial value of LayerScale; None: no LayerScale.
        norm_epsilon: Epsilon of the layer norms.
    """

    def __init__(
        self,
        attention: Attention,
        *,
        width: int,
        mlp_width: int,
        dropout: float,
        drop: float,
        mlp: str = "gelu",
        gelu: str = "exact",
        layer_scale: float | None = None,
        norm_epsilon: float = 1e-6,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=norm_epsilon)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width, eps=norm_epsilon)
        self.gated = mlp == "swiglu"
        self.expand = nn.Linear(width, mlp_width * (1 + self.gated))
        self.contract = nn.Linear(mlp_width, width)
        self.gelu = gelu
        self.dropout = nn.Dropout(dropout)
        self.drop = StochasticDepth(drop)
        self.scale1, self.scale2 = (
            nn.Identity() if layer_scale is None else LayerScale(width, layer_scale) for _ in range(2)
        )

    def matrices(self) -> Iterator[tuple[Tensor, int]]:
        """Yield the weight of each linear layer and the number of matrices packed along its first dimension.

        Layers with low-rank updates (LoRA) are left out: their weights are frozen.
        """
        counts = {self.attention.qkv: 3, self.attention.out: 1, self.expand: 1 + self.gated, self.contract: 1}
        yield from ((layer.weight, count) for layer, count in counts.items() if not is_parametrized(layer, "weight"))

    def forward(self, x: Tensor, output_ids: Ids = None, info: TokenInfo = ALL) -> Tensor:
        """Apply attention and MLP to tokens.

        Args:
            x: Tokens, (b, t, d).
            output_ids: Indices of the tokens whose outputs are computed, (b, m); None: all tokens.
            info: Positions of the tokens and random numbers of stochastic depth, (b, 2).

        Returns:
            Tokens, (b, t, d), or (b, m, d) with output_ids.
        """
        attended = self.attention(self.norm1(x), output_ids, info)
        x = self.add(x if output_ids is None else gather_tokens(x, output_ids), attended, self.scale1, info, 0)
        return self.add(x, self.mlp(self.norm2(x)), self.scale2, info, 1)

    def add(self, x: Tensor, branch: Tensor, scale: nn.Module, info: TokenInfo, number: int) -> Tensor:
        """Add a residual branch to its input.

        Args:
            x: Input of the branch, (b, t, d).
            branch: Output of the branch, (b, t, d).
            scale: LayerScale of the branch, or the identity.
            info: Random numbers of stochastic depth.
            number: 0 for attention, 1 for the MLP.

        Returns:
            The sum, (b, t, d).
        """
        noise = None if info.depth_noise is None else info.depth_noise[:, number]
        return x + self.drop(scale(self.dropout(branch)), noise)

    def mlp(self, x: Tensor) -> Tensor:
        """Apply two linear layers with a GELU between them, or SwiGLU: (b, t, d) -> (b, t, d)."""
        return self.contract(self.dropout(self.activate(self.expand(x))))

    def activate(self, hidden: Tensor) -> Tensor:
        """Apply the GELU, or multiply the second half of the hidden layer by the SiLU of the first (SwiGLU)."""
        if not self.gated:
            return F.gelu(hidden, approximate=_APPROXIMATE[self.gelu])
        gate, hidden = hidden.chunk(2, dim=-1)
        return F.silu(gate) * hidden


class Layers(nn.ModuleList):
    """Apply blocks in sequence.

    Args:
        blocks: The blocks.
        activation_checkpointing: Whether each block is recomputed in the backward pass to save memory.
    """

    def __init__(self, blocks: Iterable[Block], *, activation_checkpointing: bool = False) -> None:
        super().__init__(blocks)
        self.activation_checkpointing = activation_checkpointing

    if TYPE_CHECKING:  # nn.ModuleList is not generic, so the type of its items is declared here

        def __iter__(self) -> Iterator[Block]: ...
        def __getitem__(self, idx: int | slice) -> Any: ...

    def forward(self, x: Tensor, output_ids: Ids = None, info: TokenInfo = ALL) -> Tensor:
        """Apply all blocks to tokens.

        Args:
            x: Tokens, (b, t, d).
            output_ids: Indices of the tokens that the last block computes, (b, m); None: all tokens.
            info: Inputs of all layers.

        Returns:
            Tokens, (b, t, d), or (b, m, d) with output_ids.
        """
        for layer in range(len(self)):
            x = self.step(layer, x, output_ids if layer == len(self) - 1 else None, info)
        return x

    @property
    def checkpoints(self) -> bool:
        """Return whether this forward pass uses activation checkpointing."""
        return self.activation_checkpointing and self.training and torch.is_grad_enabled()

    def step(self, layer: int, x: Tensor, output_ids: Ids, info: TokenInfo) -> Tensor:
        """Apply one block, after adding the values of `info.between` to its input.

        Args:
            layer: Index of the block, from 0.
            x: Tokens, (b, t, d).
            output_ids: Indices of the tokens whose outputs are computed, (b, m); None: all tokens.
            info: Inputs of all layers.

        Returns:
            Tokens, (b, t, d), or (b, m, d) with output_ids.
        """
        if layer > 0 and info.between:
            x = x + info.between[layer - 1].to(x.dtype)
        if self.checkpoints:
            return checkpoint(self[layer], x, output_ids, info.of_layer(layer), use_reentrant=False)
        return self[layer](x, output_ids, info.of_layer(layer))
