"""The position embeddings of the paper's Table 8, each a module of one grid, and rotary ones, of any grid.

An additive embedding gives (t, d), a row for each prefix token and then for each patch in raster order; a relative one
gives logits to add before the softmax; a rotary one rotates queries and keys. On another grid, an embedding is
resampled so that it keeps its position in the image (section 3.2).

Letters: b images, h heads, t tokens, q queries, d width, k width of a head, y, x rows and columns.
"""

import math
from typing import TypedDict

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true


class Interpolation(TypedDict):
    """Arguments of torch's `interpolate`."""

    mode: str
    align_corners: bool
    antialias: bool


# By the names in `vit_options.RESIZE`; the authors' are those of scipy's zoom of order 1.
RESIZE: dict[str, Interpolation] = {
    "paper": {"mode": "bilinear", "align_corners": True, "antialias": False},
    "timm": {"mode": "bicubic", "align_corners": False, "antialias": True},
}
Grid = tuple[int, int]  # rows and columns of patches


def stretch(line: Tensor, side: int, how: str) -> Tensor:
    """Resample along the first dimension: (y, ...) -> (side, ...)."""
    # An image one pixel high: of one a pixel wide, torch's antialiased CPU kernel repeats the first row.
    image = rearrange(line, "y ... -> 1 (...) 1 y")
    return F.interpolate(image, (1, side), **RESIZE[how])[0, :, 0].T.reshape(side, *line.shape[1:])


def resample(table: Tensor, grid: Grid, how: str) -> Tensor:
    """Resample along both dimensions: (y, x, d) -> (*grid, d)."""
    return stretch(stretch(table, grid[0], how).transpose(0, 1), grid[1], how).transpose(0, 1)


class Positions(nn.Module):
    """Embeddings of the tokens of one grid, which can be resampled to another."""

    def __init__(self, grid: Grid, num_prefix_tokens: int) -> None:
        super().__init__()
        self.grid, self.num_prefix_tokens = grid, num_prefix_tokens

    def covers(self, grid: Grid) -> bool:
        """Whether a grid is the module's own; sizes unknown to an exported graph are not."""
        return all(statically_known_true(a == b) for a, b in zip(grid, self.grid, strict=True))

    def resampled(self, grid: Grid, how: str) -> dict[str, Tensor]:
        """The state that changes on another grid, by name; `how` is a key of RESIZE."""
        raise NotImplementedError


class Learned1D(Positions):
    """One learned vector for each token, the class token included (section 3.1): the paper's default."""

    def __init__(self, grid: Grid, num_prefix_tokens: int, width: int) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.embedding = nn.Parameter(torch.randn(num_prefix_tokens + grid[0] * grid[1], width) * 0.02)

    def forward(self, grid: Grid | None = None, how: str = "paper") -> Tensor:
        return self.embedding if grid is None or self.covers(grid) else self.resampled(grid, how)["embedding"]

    def resampled(self, grid: Grid, how: str) -> dict[str, Tensor]:
        prefix, patches = self.embedding.tensor_split([self.num_prefix_tokens])
        table = resample(patches.unflatten(0, self.grid), grid, how)
        return {"embedding": torch.cat([prefix, table.flatten(0, 1)])}


class RowsAndColumns(Positions):
    """Embeddings of the `rows` (y, ...) and of the `columns` (x, ...) of a grid."""

    rows: Tensor
    columns: Tensor

    def on(self, grid: Grid | None, how: str) -> tuple[Tensor, Tensor]:
        """The rows and columns of a grid."""
        if grid is None or self.covers(grid):
            return self.rows, self.columns
        state = self.resampled(grid, how)
        return state["rows"], state["columns"]

    def resampled(self, grid: Grid, how: str) -> dict[str, Tensor]:
        return {"rows": stretch(self.rows, grid[0], how), "columns": stretch(self.columns, grid[1], how)}


def over_grid(rows: Tensor, columns: Tensor) -> Tensor:
    """The embedding of each patch's column, then of its row: (y, d) and (x, d) -> (y * x, 2 * d)."""
    across = repeat(columns, "x d -> (y x) d", y=rows.shape[0])
    down = repeat(rows, "y d -> (y x) d", x=columns.shape[0])
    return torch.cat([across, down], dim=1)


class Learned2D(RowsAndColumns):
    """Half of the width for the column, the other half for the row (Appendix D.4); prefix tokens have their own."""

    def __init__(self, grid: Grid, num_prefix_tokens: int, width: int) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.rows = nn.Parameter(torch.randn(grid[0], width // 2) * 0.02)
        self.columns = nn.Parameter(torch.randn(grid[1], width // 2) * 0.02)
        self.special = nn.Parameter(torch.randn(num_prefix_tokens, width) * 0.02)

    def forward(self, grid: Grid | None = None, how: str = "paper") -> Tensor:
        return torch.cat([self.special, over_grid(*self.on(grid, how))])


class SineCosine2D(RowsAndColumns):
    """Fixed waves of geometrically spaced lengths over columns and rows; nothing for the prefix tokens (MoCo v3).

    The coordinates of rows and columns are buffers: on another grid they are resampled, and the waves stay exact.
    """

    def __init__(self, grid: Grid, num_prefix_tokens: int, width: int) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.width = width
        self.register_buffer("rows", torch.arange(grid[0], dtype=torch.float32))
        self.register_buffer("columns", torch.arange(grid[1], dtype=torch.float32))

    def forward(self, grid: Grid | None = None, how: str = "paper") -> Tensor:
        count = self.width // 4
        frequency = 10_000.0 ** -(torch.arange(count, dtype=torch.float64, device=self.rows.device) / count)
        angles = (coordinates.double()[:, None] * frequency for coordinates in self.on(grid, how))
        waves = over_grid(*(torch.cat([angle.sin(), angle.cos()], dim=1) for angle in angles))
        return F.pad(waves.to(self.rows.dtype), (0, 0, self.num_prefix_tokens, 0))


class Relative(Positions):
    """A learned key for each offset between two tokens in the sequence (Appendix D.4): one such module a layer.

    A query's product with the key of its offset to a token is added to that token's logit.
    """

    def __init__(self, grid: Grid, num_prefix_tokens: int, head_width: int) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.keys = nn.Parameter(torch.randn(2 * (num_prefix_tokens + grid[0] * grid[1]) - 1, head_width) * 0.02)

    def forward(
        self, queries: Tensor, tokens: int, position_ids: Tensor | None = None, output_ids: Tensor | None = None
    ) -> Tensor:
        """queries (b, h, q, k) -> logits (b, h, q, t).

        tokens: t. position_ids (b, t): of some tokens of the module's own grid; None for all tokens of any grid, in
        order. output_ids (b, q): of which tokens the queries are, None for all.
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
        """`how` has no meaning for offsets in the sequence."""
        return {"keys": self._stretched(self.num_prefix_tokens + grid[0] * grid[1])}

    def _stretched(self, tokens: int) -> Tensor:
        """The keys of a sequence of another length, stretched linearly around the key of offset 0, which stays."""
        middle, last = len(self.keys) // 2, tokens - 1
        if last == middle:
            return self.keys
        keys = stretch(self.keys, 2 * last + 1, "paper")
        return torch.cat([keys[:last], self.keys[middle, None], keys[last + 1 :]])


class Rotary(nn.Module):
    """Turns of queries and keys by angles that grow with a patch's row and column, so that their products tell offsets
    (RoFormer, Su et al. 2021; along two axes as in facebookresearch/dinov3: rope_position_encoding.py).

    Rows and columns lie in [-1, 1] each, whatever their number. DINOv3 scales them at random in training, which is left
    out here. The periods are a buffer, since DINOv3's files have their own: these, rounded.
    """

    periods: Tensor

    def __init__(self, head_width: int, base: float = 100.0) -> None:
        super().__init__()
        count = head_width // 4
        self.register_buffer("periods", base ** (torch.arange(count) / count))

    def forward(self, grid: Grid, num_prefix_tokens: int, position_ids: Tensor | None = None) -> Tensor:
        """Cosines and sines for `rotate`: (2, 1, 1, t, k / 2), or of position_ids (b, t), (2, b, 1, t, k / 2)."""
        dtype, device = self.periods.dtype, self.periods.device
        sides = ((torch.arange(side, dtype=dtype, device=device) + 0.5) / side for side in grid)  # centres, in [0, 1]
        rows, columns = (2 * math.pi * (2 * side - 1)[:, None] / self.periods for side in sides)
        angles = torch.cat([repeat(rows, "y k -> (y x) k", x=grid[1]), repeat(columns, "x k -> (y x) k", y=grid[0])], 1)
        angles = F.pad(angles, (0, 0, num_prefix_tokens, 0))[None]  # an angle of 0 turns nothing
        if position_ids is not None:
            angles = angles[0, position_ids]
        return torch.stack([angles.cos(), angles.sin()])[:, :, None]


def rotate(x: Tensor, rotation: Tensor, ids: Tensor | None = None) -> Tensor:
    """Turn each pair of numbers i and k / 2 + i: (b, h, t, k) -> (b, h, t, k).

    rotation: of `Rotary`. ids (b, t): which of its tokens these are, None for all.
    """
    if ids is not None:
        rotation = rotation.take_along_dim(ids[None, :, None, :, None], dim=3)
    (cosine, sine), (first, second) = rotation, x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


ADDITIVE = {"learned_1d": Learned1D, "learned_2d": Learned2D, "sine_cosine_2d": SineCosine2D}
