"""The layers of a Transformer (Dosovitskiy et al. 2021, equations 2 and 3), for encoders and decoders.

Letters: b images, t tokens, q queries, m chosen tokens, h heads, k width of a head, d width.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ssvit.models import positions
from ssvit.models.positions import Grid

_APPROXIMATE = {"exact": "none", "tanh": "tanh"}  # torch's names of the GELUs
Ids = Tensor | None  # of tokens, (b, m); None for all of them, in order


class TokenInfo(NamedTuple):
    """What the layers need besides the embeddings of the tokens.

    Attributes:
        position_ids: Position of each token, (b, t); None for all tokens in order.
        rotation: Result of `positions.Rotary` for the tokens as they come; None without rotary positions.
        between: What is added before each layer but the first, (t, d) or (b, t, d); empty for nothing.
        depth_noise: Uniform numbers for stochastic depth, of each layer's two branches, (b, 2 * depth), see
            `Encoder.depth_noise`; None: torch's generator samples them.
    """

    position_ids: Ids = None
    rotation: Tensor | None = None
    between: Sequence[Tensor] = ()
    depth_noise: Tensor | None = None

    def of_layer(self, layer: int) -> "TokenInfo":
        """Return what a layer needs, whose depth_noise is (b, 2)."""
        noise = None if self.depth_noise is None else self.depth_noise[:, 2 * layer : 2 * layer + 2]
        return TokenInfo(self.position_ids, self.rotation, depth_noise=noise)


ALL = TokenInfo()  # all tokens in order, without more


def lecun_normal_(matrix: Tensor) -> None:
    """Fill a matrix (out, in) as the authors' JAX code does: normal of variance 1 / in, cut off at two deviations."""
    # Cutting off leaves 0.8796 of the deviation, which JAX divides out.
    std = matrix.shape[1] ** -0.5 / 0.87962566
    nn.init.trunc_normal_(matrix, std=std, a=-2 * std, b=2 * std)


def gather(tokens: Tensor, ids: Tensor) -> Tensor:
    """Some tokens of each image, by index: (b, t, d) and (b, m) -> (b, m, d)."""
    # Copies whole rows, where torch's `gather` looks up each number: 5 to 10 times faster on a CPU.
    rows = ids + torch.arange(tokens.shape[0], device=ids.device)[:, None] * tokens.shape[1]
    return tokens.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, ids.shape)


class StochasticDepth(nn.Module):
    """Leave out a residual branch for a random part of the images, in training (Huang et al. 2016).

    An image's branch is left out where its number, uniform in [0, 1), is below the rate.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor, noise: Tensor | None = None) -> Tensor:
        """(b, t, d) -> (b, t, d). noise (b,): None for torch's generator."""
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
        return branch * self.gamma.to(branch.dtype)


class Attention(nn.Module):
    """Multi-head self-attention with one packed projection (Appendix A).

    dropout: of the attention weights. relative: the arguments of `positions.Relative`, or None.
    """

    def __init__(self, *, width: int, heads: int, dropout: float, relative: tuple[Grid, int] | None) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.relative = None if relative is None else positions.Relative(*relative, width // heads)

    def forward(self, x: Tensor, output_ids: Ids = None, info: TokenInfo = ALL) -> Tensor:
        """(b, t, d) -> (b, t, d), or with output_ids (b, m) the outputs of these tokens alone, (b, m, d)."""
        query, key, value = self._project(x, output_ids)
        if info.rotation is not None:
            query, key = positions.rotate(query, info.rotation, output_ids), positions.rotate(key, info.rotation)
        bias = None if self.relative is None else self.relative(query, x.shape[1], info.position_ids, output_ids)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
        return self.out(rearrange(mixed, "b h q k -> b q (h k)"))

    def _project(self, x: Tensor, output_ids: Ids) -> tuple[Tensor, ...]:
        """Queries (b, h, q, k), of all tokens or of output_ids, keys and values (b, h, t, k)."""
        if output_ids is None:
            return rearrange(self.qkv(x), "b t (parts h k) -> parts b h t k", parts=3, h=self.heads).unbind()
        sizes = x.shape[-1], 2 * x.shape[-1]
        (weight, rest), (bias, rest_bias) = self.qkv.weight.split(sizes), self.qkv.bias.split(sizes)
        query = rearrange(F.linear(gather(x, output_ids), weight, bias), "b q (h k) -> b h q k", h=self.heads)
        packed = F.linear(x, rest, rest_bias)
        return query, *rearrange(packed, "b t (parts h k) -> parts b h t k", parts=2, h=self.heads).unbind()


class Block(nn.Module):
    """A pre-norm Transformer layer: x = x + attention(norm(x)), then x = x + mlp(norm(x)) (equations 2 and 3).

    relative: as of `Attention`. layer_scale: where the factors of both branches start, None for none.
    """

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        mlp_width: int,
        dropout: float,
        drop: float,
        relative: tuple[Grid, int] | None,
        mlp: str = "gelu",
        gelu: str = "exact",
        attention_dropout: float = 0.0,
        layer_scale: float | None = None,
        norm_epsilon: float = 1e-6,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=norm_epsilon)
        self.attention = Attention(width=width, heads=heads, dropout=attention_dropout, relative=relative)
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
        """Yield the weight of each linear layer, and the number of matrices packed along its first dimension."""
        yield self.attention.qkv.weight, 3
        yield self.attention.out.weight, 1
        yield self.expand.weight, 1 + self.gated
        yield self.contract.weight, 1

    def forward(self, x: Tensor, output_ids: Ids = None, info: TokenInfo = ALL) -> Tensor:
        """As `Attention.forward`; depth_noise (b, 2)."""
        attended = self.attention(self.norm1(x), output_ids, info)
        x = self.add(x if output_ids is None else gather(x, output_ids), attended, self.scale1, info, 0)
        return self.add(x, self.mlp(self.norm2(x)), self.scale2, info, 1)

    def add(self, x: Tensor, branch: Tensor, scale: nn.Module, info: TokenInfo, number: int) -> Tensor:
        """Add a branch, the first or the second of the layer, to its input."""
        noise = None if info.depth_noise is None else info.depth_noise[:, number]
        return x + self.drop(scale(self.dropout(branch)), noise)

    def mlp(self, x: Tensor) -> Tensor:
        """Two linear layers with a GELU between them, or SwiGLU: (b, t, d) -> (b, t, d)."""
        return self.contract(self.dropout(self.activate(self.expand(x))))

    def activate(self, hidden: Tensor) -> Tensor:
        """The GELU; or SwiGLU's product of the second half with the SiLU of the first."""
        if not self.gated:
            return F.gelu(hidden, approximate=_APPROXIMATE[self.gelu])
        gate, hidden = hidden.chunk(2, dim=-1)
        return F.silu(gate) * hidden


class Layers(nn.ModuleList):
    """Blocks one after the other. activation_checkpointing: in training, compute each once more for its gradients."""

    def __init__(self, blocks: Iterable[Block], *, activation_checkpointing: bool = False) -> None:
        super().__init__(blocks)
        self.activation_checkpointing = activation_checkpointing

    if TYPE_CHECKING:  # a ModuleList does not say of what

        def __iter__(self) -> Iterator[Block]: ...
        @overload
        def __getitem__(self, idx: slice) -> "Layers": ...
        @overload
        def __getitem__(self, idx: int) -> Block: ...
        def __getitem__(self, idx: int | slice) -> "Block | Layers": ...

    def forward(self, x: Tensor, output_ids: Ids = None, info: TokenInfo = ALL) -> Tensor:
        """(b, t, d) -> (b, t, d), or with output_ids (b, m), by the last layer alone, (b, m, d)."""
        for layer in range(len(self)):
            x = self.step(layer, x, output_ids if layer == len(self) - 1 else None, info)
        return x

    @property
    def checkpoints(self) -> bool:
        return self.activation_checkpointing and self.training and torch.is_grad_enabled()

    def step(self, layer: int, x: Tensor, output_ids: Ids, info: TokenInfo) -> Tensor:
        """Compute one layer, from 0, with what is added before it."""
        if layer > 0 and info.between:
            x = x + info.between[layer - 1].to(x.dtype)
        if self.checkpoints:
            return checkpoint(self[layer], x, output_ids, info.of_layer(layer), use_reentrant=False)
        return self[layer](x, output_ids, info.of_layer(layer))
