"""The Vision Transformer (Dosovitskiy et al. 2021, section 3.1), with a seam between its patches and its layers.

`embed` turns an image into patch embeddings and `encode` runs the Transformer over them; whatever a method does to
the sequence (corrupt it, drop patches from it) it does between the two. Normalisation belongs to the encoder, so
images come in as they are: float in [0, 1], or uint8.

Letters: b images, c channels, n patches, t tokens (the class token, if any, and the patches), d width, m places.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ssvit import rules
from ssvit.encoder import positions
from ssvit.encoder.attention import attend
from ssvit.options import OptionError, pair


def gather(tokens: Tensor, places: Tensor) -> Tensor:
    """The tokens at some places of each image: (b, t, d) and (b, m) -> (b, m, d)."""
    return tokens.gather(1, places[:, :, None].expand(-1, -1, tokens.shape[-1]))


class StochasticDepth(nn.Module):
    """Leave out a whole residual branch for a random part of the images, in training (Huang et al. 2016)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.rate
        return branch * (kept / (1 - self.rate)).to(branch.dtype)


class Attention(nn.Module):
    """Multi-head self-attention with one packed projection, (b, t, d) -> (b, t, d), or (b, m, d) at given places."""

    def __init__(self, *, width: int, heads: int, dropout: float, relative_tokens: int | None) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.relative = None if relative_tokens is None else positions.Relative(relative_tokens, width // heads)

    def forward(self, x: Tensor, places: Tensor | None, at: Tensor | None) -> Tensor:
        """`places` (b, t) or (1, t) says where each token stands, for relative positions; `at` (b, m) who asks."""
        if at is None:
            query, key, value = rearrange(self.qkv(x), "b t (three h k) -> three b h t k", three=3, h=self.heads)
        else:
            ask, answer = self.qkv.weight.split((x.shape[-1], 2 * x.shape[-1]))
            ask_bias, answer_bias = self.qkv.bias.split((len(ask), len(answer)))
            query = rearrange(F.linear(gather(x, at), ask, ask_bias), "b m (h k) -> b h m k", h=self.heads)
            both = F.linear(x, answer, answer_bias)
            key, value = rearrange(both, "b t (two h k) -> two b h t k", two=2, h=self.heads)
        bias = None
        if self.relative is not None:
            asking = places if at is None else places.expand(len(x), -1).gather(1, at)
            bias = self.relative(query, asking, places)
        heads = attend(query, key, value, bias, self.dropout if self.training else 0.0)
        return self.out(rearrange(heads, "b h t k -> b t (h k)"))


class Block(nn.Module):
    """A pre-norm Transformer layer: x = x + attention(norm(x)), then x = x + mlp(norm(x)) (equations 2 and 3)."""

    def __init__(
        self, *, width: int, heads: int, mlp_width: int, dropout: float, drop: float, relative_tokens: int | None
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width=width, heads=heads, dropout=dropout, relative_tokens=relative_tokens)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.expand = nn.Linear(width, mlp_width)
        self.contract = nn.Linear(mlp_width, width)
        self.dropout = nn.Dropout(dropout)
        self.drop = StochasticDepth(drop)

    def forward(self, x: Tensor, places: Tensor | None = None, at: Tensor | None = None) -> Tensor:
        """(b, t, d) -> (b, t, d); with `at` (b, m), only the outputs there, (b, m, d), at the cost of those alone."""
        attended = self.attention(self.norm1(x), places, at)
        x = (x if at is None else gather(x, at)) + self.drop(self.dropout(attended))
        hidden = self.dropout(F.gelu(self.expand(self.norm2(x))))
        return x + self.drop(self.dropout(self.contract(hidden)))


class ViT(nn.Module):
    """A Vision Transformer without a head.

    image_size, patch_size: pixels, one number or [height, width]. mlp_width: 4 * width unless given. pooling: what
    `pool` makes of the outputs, class_token (the paper) or patch_mean. positions: learned_1d (the paper), learned_2d,
    sine_cosine_2d, relative or none, added at the stem (the paper), at every_layer, or at every_layer_shared (Table 8).
    stochastic_depth: the rate at the last layer, growing linearly from 0 at the first. mean, std: of the images'
    channels, in [0, 1]. Initialised as in the authors' code. OptionError names an option that cannot be.
    """

    def __init__(
        self,
        *,
        image_size: int | Sequence[int],
        patch_size: int | Sequence[int],
        width: int,
        depth: int,
        heads: int,
        mlp_width: int | None = None,
        channels: int = 3,
        class_token: bool = True,
        pooling: str = "class_token",
        positions: str = "learned_1d",
        positions_at: str = "stem",
        dropout: float = 0.0,
        stochastic_depth: float = 0.0,
        mean: float | Sequence[float] = 0.5,
        std: float | Sequence[float] = 0.5,
    ) -> None:
        self.arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        rules.encoder(**self.arguments)
        super().__init__()
        self.image_size = pair("image_size", image_size)
        self.patch_size = pair("patch_size", patch_size)
        self.grid = rules.grid(image_size, patch_size)
        self.width, self.channels, self.pooling = width, channels, pooling
        self.special = int(class_token)
        tokens = self.special + self.patches

        self.patch = nn.Linear(channels * math.prod(self.patch_size), width)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width)) if class_token else None
        self.positions, self.layers_with_positions = self._positions(positions, positions_at, depth)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                width=width,
                heads=heads,
                mlp_width=mlp_width or 4 * width,
                dropout=dropout,
                drop=stochastic_depth * layer / max(depth - 1, 1),
                relative_tokens=tokens if positions == "relative" else None,
            )
            for layer in range(depth)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).flatten().expand(channels).clone())
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).flatten().expand(channels).clone())
        self._initialise()

    @property
    def patches(self) -> int:
        """How many patches an image has."""
        return math.prod(self.grid)

    def _positions(self, kind: str, at: str, depth: int) -> tuple[nn.ModuleList, int]:
        """The embeddings, each once, and at the input of how many layers they are added, in turn."""
        if kind not in positions.ADDITIVE:
            return nn.ModuleList(), 0
        count = depth if at == "every_layer" else 1
        modules = [positions.ADDITIVE[kind](self.grid, self.special, self.width) for _ in range(count)]
        return nn.ModuleList(modules), 1 if at == "stem" else depth

    def _initialise(self) -> None:
        """As the authors' JAX code: patches LeCun-normal, other matrices Xavier-uniform, MLP biases N(0, 1e-6)."""
        # Cutting a normal off at two deviations leaves a deviation of 0.8796, which JAX divides out.
        std = self.patch.in_features**-0.5 / 0.87962566
        nn.init.trunc_normal_(self.patch.weight, std=std, a=-2 * std, b=2 * std)
        nn.init.zeros_(self.patch.bias)
        for block in self.blocks:
            for matrix in (*block.attention.qkv.weight.chunk(3), block.attention.out.weight):
                nn.init.xavier_uniform_(matrix)
            nn.init.zeros_(block.attention.qkv.bias)
            nn.init.zeros_(block.attention.out.bias)
            for layer in (block.expand, block.contract):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.normal_(layer.bias, std=1e-6)

    def patchify(self, images: Tensor) -> Tensor:
        """Cut images into patches in raster order: (b, c, h, w) -> (b, n, c * p * q). OptionError for another shape."""
        if tuple(images.shape[1:]) != (self.channels, *self.image_size):
            found, right = "x".join(map(str, images.shape[1:])), "x".join(map(str, (self.channels, *self.image_size)))
            raise OptionError("images", found, f"this encoder takes images of {right} (channels, height, width)")
        p, q = self.patch_size
        return rearrange(images, "b c (y p) (x q) -> b (y x) (c p q)", p=p, q=q)

    def embed(self, images: Tensor) -> Tensor:
        """Normalise and project each patch, without positions: (b, c, h, w), [0, 1] or uint8, -> (b, n, d).

        The normalisation is folded into the projection: x W / std + (bias - mean / std W), so that no normalised
        copy of the images is made. The shift takes the weight as rounded for the product, so that it cancels exactly.
        """
        patches = self.patchify(images)
        area = math.prod(self.patch_size)
        unit = 255.0 if images.dtype == torch.uint8 else 1.0
        weight = self.patch.weight / (self.std * unit).repeat_interleave(area)
        kind = images.device.type
        if torch.is_autocast_enabled(kind):
            weight = weight.to(torch.get_autocast_dtype(kind))
        # A sum of products, since autocast would make a matrix product round the mean to half precision.
        shift = (weight * (self.mean * unit).repeat_interleave(area)).sum(1)
        return F.linear(patches.to(weight.dtype), weight, (self.patch.bias - shift).to(weight.dtype))

    def encode(self, tokens: Tensor, *, keep: Tensor | None = None, at: Tensor | None = None) -> Tensor:
        """Run the Transformer over patch embeddings: (b, n, d) -> (b, s + n, d), s = 1 with a class token, else 0.

        keep (b, m): encode these patches alone, in this order, as masked autoencoders do -> (b, s + m, d).
        at (b, m): give the outputs of these patches alone, (b, m, d), computing the last layer only there. The two
        go together: `at` then counts in the order of `keep`.
        """
        places = torch.arange(self.special + tokens.shape[1], device=tokens.device)[None]
        if keep is not None:
            tokens = gather(tokens, keep)
            first = places[:, : self.special].expand(len(keep), -1)
            places = torch.cat([first, keep + self.special], dim=1)
        x = tokens
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), -1, -1).to(x.dtype), x], dim=1)
        if at is not None:
            at = at + self.special
        for layer, block in enumerate(self.blocks):
            if layer < self.layers_with_positions:
                rows = self.positions[layer % len(self.positions)]()
                x = x + (rows if keep is None else rows[places]).to(x.dtype)
            if layer == 0:
                x = self.dropout(x)
            x = block(x, places, at if layer == len(self.blocks) - 1 else None)
        return self.norm(x)

    def forward(self, images: Tensor) -> Tensor:
        """(b, c, h, w) -> (b, s + n, d)."""
        return self.encode(self.embed(images))

    def pool(self, outputs: Tensor) -> Tensor:
        """One vector an image: (b, s + n, d) -> (b, d), the class token's (the paper) or the mean of the patches'."""
        return outputs[:, 0] if self.pooling == "class_token" else outputs[:, self.special :].mean(1)
