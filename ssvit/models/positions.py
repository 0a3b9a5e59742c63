"""Implement the position embeddings of the paper's Table 8, each a module for one patch grid, and rotary positions.

An additive embedding returns (t, d), a row for each prefix token and then for each patch in raster order; a relative
embedding returns logits to add before the softmax; rotary positions rotate queries and keys. For another grid, an
embedding is resampled so that each vector keeps its relative position in the image (section 3.2).

Letters: b images, h heads, t tokens, q queries, d width, k width of a head, y, x rows and columns.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

# Arguments of torch's `interpolate` by the choices of `vit_options.RESIZE`; "paper" matches scipy's zoom of order 1,
# which the authors use.
RESIZE: dict[str, dict[str, Any]] = {
    "paper": {"mode": "bilinear", "align_corners": True, "antialias": False},
    "timm": {"mode": "bicubic", "align_corners": False, "antialias": True},
}
Grid = tuple[int, int]  # rows and columns of patches


def stretch(line: Tensor, side: int, how: str) -> Tensor:
    """Resample along the first dimension, (y, ...) -> (side, ...).

    Args:
        line: Values, (y, ...).
        side: New size of the first dimension.
        how: A key of `RESIZE`.

    Returns:
        Resampled values, (side, ...).
    """
    # The image is one pixel high, since torch's antialiased CPU kernel is wrong for images one pixel wide.
    image = rearrange(line, "y ... -> 1 (...) 1 y")
    return F.interpolate(image, (1, side), **RESIZE[how])[0, :, 0].T.reshape(side, *line.shape[1:])


class Positions(nn.Module):
    """Define the base class of position embeddings for one grid, which can be resampled to another."""

    def __init__(self, grid: Grid, num_prefix_tokens: int) -> None:
        super().__init__()
        self.grid, self.num_prefix_tokens = grid, num_prefix_tokens

    def covers(self, grid: Grid) -> bool:
        """Return whether a grid is the module's grid; symbolic sizes of an exported graph never are."""
        if not torch.compiler.is_compiling():
            return grid == self.grid
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy

        return all(statically_known_true(a == b) for a, b in zip(grid, self.grid, strict=True))

    def resampled(self, grid: Grid, how: str) -> dict[str, Tensor]:
        """Return the state that depends on the grid, by name, resampled to another grid.

        Args:
            grid: Rows and columns of patches.
            how: A key of `RESIZE`.

        Returns:
            Tensors of the state dict.
        """
        raise NotImplementedError


class Learned1D(Positions):
    """Learn one vector for each token, including the class token (section 3.1), the paper's default.

    Args:
        grid: Rows and columns of patches.
        num_prefix_tokens: Number of prefix tokens.
        width: Width of the tokens.
    """

    def __init__(self, grid: Grid, num_prefix_tokens: int, width: int) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.embedding = nn.Parameter(torch.randn(num_prefix_tokens + grid[0] * grid[1], width) * 0.02)

    def forward(self, grid: Grid | None = None, how: str = "paper") -> Tensor:
        """Return the embeddings of a grid, (t, d); None: the module's grid."""
        return self.embedding if grid is None or self.covers(grid) else self.resampled(grid, how)["embedding"]

    def resampled(self, grid: Grid, how: str) -> dict[str, Tensor]:
        """Return the embeddings, with the patch embeddings resampled to a grid."""
        prefix, patches = self.embedding.tensor_split([self.num_prefix_tokens])
        rows = stretch(patches.unflatten(0, self.grid), grid[0], how)
        table = stretch(rows.transpose(0, 1), grid[1], how).transpose(0, 1)
        return {"embedding": torch.cat([prefix, table.flatten(0, 1)])}


def waves(coordinates: Tensor, width: int) -> Tensor:
    """Return sines and cosines of coordinates (n,), whose wavelengths form a geometric sequence: (n, width)."""
    count = width // 2
    frequency = 10_000.0 ** -(torch.arange(count, dtype=torch.float64, device=coordinates.device) / count)
    angle = coordinates.double()[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class SineCosine1D(Learned1D):
    """Compute fixed sines and cosines of the index of each patch in raster order; the prefix tokens get zeros.

    The indices are a buffer: they are resampled for another grid as learned vectors are.

    Args:
        grid: Rows and columns of patches.
        num_prefix_tokens: Number of prefix tokens.
        width: Width of the tokens, a multiple of 2.
    """

    def __init__(self, grid: Grid, num_prefix_tokens: int, width: int) -> None:
        super().__init__(grid, num_prefix_tokens, 1)
        self.width = width
        del self.embedding
        indices = torch.arange(grid[0] * grid[1], dtype=torch.float32)
        self.register_buffer("embedding", F.pad(indices, (num_prefix_tokens, 0))[:, None])

    def forward(self, grid: Grid | None = None, how: str = "paper") -> Tensor:
        """Return the embeddings of a grid, (t, d); None: the module's grid."""
        indices = super().forward(grid, how)[self.num_prefix_tokens :, 0]
        return F.pad(waves(indices, self.width).to(indices.dtype), (0, 0, self.num_prefix_tokens, 0))


class RowsAndColumns(Positions):
    """Define the base class of embeddings of the `rows` (y, ...) and the `columns` (x, ...) of a grid."""

    rows: Tensor
    columns: Tensor

    def on(self, grid: Grid | None, how: str) -> tuple[Tensor, Tensor]:
        """Return the embeddings of the rows and columns of a grid; None: the module's grid."""
        if grid is None or self.covers(grid):
            return self.rows, self.columns
        state = self.resampled(grid, how)
        return state["rows"], state["columns"]

    def resampled(self, grid: Grid, how: str) -> dict[str, Tensor]:
        """Return the embeddings of rows and columns, resampled to a grid."""
        return {"rows": stretch(self.rows, grid[0], how), "columns": stretch(self.columns, grid[1], how)}


def over_grid(rows: Tensor, columns: Tensor) -> Tensor:
    """Concatenate the embeddings of each patch's column and row: (y, d) and (x, d) -> (y * x, 2 * d)."""
    across = repeat(columns, "x d -> (y x) d", y=rows.shape[0])
    down = repeat(rows, "y d -> (y x) d", x=columns.shape[0])
    return torch.cat([across, down], dim=1)


class Learned2D(RowsAndColumns):
    """Learn embeddings of columns and rows, each of half of the width (Appendix D.4), and one for each prefix token.

    Args:
        grid: Rows and columns of patches.
        num_prefix_tokens: Number of prefix tokens.
        width: Width of the tokens, a multiple of 2.
    """

    def __init__(self, grid: Grid, num_prefix_tokens: int, width: int) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.rows = nn.Parameter(torch.randn(grid[0], width // 2) * 0.02)
        self.columns = nn.Parameter(torch.randn(grid[1], width // 2) * 0.02)
        self.special = nn.Parameter(torch.randn(num_prefix_tokens, width) * 0.02)

    def forward(self, grid: Grid | None = None, how: str = "paper") -> Tensor:
        """Return the embeddings of a grid, (t, d); None: the module's grid."""
        return torch.cat([self.special, over_grid(*self.on(grid, how))])


class SineCosine2D(RowsAndColumns):
    """Compute fixed sines and cosines of columns and rows (MoCo v3); the prefix tokens get zeros.

    The coordinates of rows and columns are buffers: they are resampled for
    another grid, so the sines and cosines stay exact.

    Args:
        grid: Rows and columns of patches.
        num_prefix_tokens: Number of prefix tokens.
        width: Width of the tokens, a multiple of 4.
    """

    def __init__(self, grid: Grid, num_prefix_tokens: int, width: int) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.width = width
        self.register_buffer("rows", torch.arange(grid[0], dtype=torch.float32))
        self.register_buffer("columns", torch.arange(grid[1], dtype=torch.float32))

    def forward(self, grid: Grid | None = None, how: str = "paper") -> Tensor:
        """Return the embeddings of a grid, (t, d); None: the module's grid."""
        table = over_grid(*(waves(coordinates, self.width // 2) for coordinates in self.on(grid, how)))
        return F.pad(table.to(self.rows.dtype), (0, 0, self.num_prefix_tokens, 0))


class Relative(Positions):
    """Learn a key for each offset between two tokens in the sequence (Appendix D.4); each layer has such a module.

    The product of a query with the key of its offset to a token is added to the logit of that token.

    Args:
        grid: Rows and columns of patches.
        num_prefix_tokens: Number of prefix tokens.
        head_width: Width of a head, k.
    """

    def __init__(self, grid: Grid, num_prefix_tokens: int, head_width: int) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.keys = nn.Parameter(torch.randn(2 * (num_prefix_tokens + grid[0] * grid[1]) - 1, head_width) * 0.02)

    def forward(
        self, queries: Tensor, tokens: int, position_ids: Tensor | None = None, output_ids: Tensor | None = None
    ) -> Tensor:
        """Return the logits to add before the softmax.

        Args:
            queries: Queries, (b, h, q, k).
            tokens: Number of tokens, t.
            position_ids: Positions of the tokens in the module's grid, (b, t); None: all tokens of any grid in order.
            output_ids: Indices of the tokens to which the queries belong, (b, q); None: all tokens.

        Returns:
            Logits, (b, h, q, t).
        """
        keys = self.keys if position_ids is not None else self._stretched(tokens)
        if position_ids is None:
            position_ids = torch.arange(tokens, device=queries.device)[None]
        query_ids = position_ids
        if output_ids is not None:
            query_ids = position_ids.expand(queries.shape[0], -1).gather(1, output_ids)
        logits = queries @ keys.to(queries.dtype).T
        offset = query_ids[:, :, None] - position_ids[:, None, :] + len(keys) // 2
        return logits.gather(-1, offset[:, None].expand(*queries.shape[:2], -1, -1))

    def resampled(self, grid: Grid, how: str) -> dict[str, Tensor]:
        """Return the keys, stretched to the sequence length of a grid; `how` does not apply to sequence offsets."""
        return {"keys": self._stretched(self.num_prefix_tokens + grid[0] * grid[1])}

    def _stretched(self, tokens: int) -> Tensor:
        """Return the keys of another sequence length, interpolated on both sides of the unchanged key of offset 0."""
        middle, last = len(self.keys) // 2, tokens - 1
        if last == middle:
            return self.keys
        keys = stretch(self.keys, 2 * last + 1, "paper")
        return torch.cat([keys[:last], self.keys[middle, None], keys[last + 1 :]])


class Rotary(nn.Module):
    """Rotate queries and keys by angles that depend on a patch's row and column, so that logits depend on offsets.

    RoFormer (Su et al. 2021), along two axes as in facebookresearch/dinov3: rope_position_encoding.py. Rows and columns
    are scaled to [-1, 1] for any grid. DINOv3's random rescaling of them in training is not implemented. The periods
    are a buffer, since DINOv3's files contain them, rounded to bfloat16.
    """

    periods: Tensor

    def __init__(self, head_width: int, base: float = 100.0) -> None:
        super().__init__()
        count = head_width // 4
        self.register_buffer("periods", base ** (torch.arange(count) / count))

    def forward(self, grid: Grid, num_prefix_tokens: int, position_ids: Tensor | None = None) -> Tensor:
        """Return the cosines and sines for `rotate`.

        Args:
            grid: Rows and columns of patches.
            num_prefix_tokens: Number of prefix tokens, which are not rotated.
            position_ids: Positions of the tokens, (b, t); None: all tokens in order.

        Returns:
            Cosines and sines, (2, 1, 1, t, k / 2), or (2, b, 1, t, k / 2) with position_ids.
        """
        dtype, device = self.periods.dtype, self.periods.device
        sides = ((torch.arange(side, dtype=dtype, device=device) + 0.5) / side for side in grid)  # centres, in [0, 1]
        rows, columns = (2 * math.pi * (2 * side - 1)[:, None] / self.periods for side in sides)
        angles = torch.cat([repeat(rows, "y k -> (y x) k", x=grid[1]), repeat(columns, "x k -> (y x) k", y=grid[0])], 1)
        angles = F.pad(angles, (0, 0, num_prefix_tokens, 0))[None]  # an angle of 0 leaves the prefix tokens unrotated
        if position_ids is not None:
            angles = angles[0, position_ids]
        return torch.stack([angles.cos(), angles.sin()])[:, :, None]


def angles_of(rotation: Tensor, ids: Tensor | None) -> Tensor:
    """Return the cosines and sines of the tokens with some indices, (b, t), of a result of `Rotary`; None: all."""
    return rotation if ids is None else rotation.take_along_dim(ids[None, :, None, :, None], dim=3)


def rotate(x: Tensor, rotation: Tensor, ids: Tensor | None = None) -> Tensor:
    """Rotate each pair of channels i and k / 2 + i.

    Args:
        x: Queries or keys, (b, h, t, k).
        rotation: Result of `Rotary`.
        ids: Indices in the rotation of the tokens in `x`, (b, t); None: all tokens in order.

    Returns:
        Rotated queries or keys, (b, h, t, k).
    """
    (cosine, sine), (first, second) = angles_of(rotation, ids), x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


ADDITIVE = {
    "learned_1d": Learned1D, "learned_2d": Learned2D, "sine_cosine_1d": SineCosine1D, "sine_cosine_2d": SineCosine2D,
}  # fmt: skip
