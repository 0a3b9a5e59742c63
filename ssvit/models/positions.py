"""Where a token stands: the position embeddings of the paper's Table 8, each a module of one grid.

An additive embedding gives (t, d), one row for each of the t = s + n tokens, of which the first s (0 to 2) are the
prefix tokens and the rest are the n patches in raster order. A relative one gives logits to add before the softmax.
Another grid of the same image keeps the embeddings by their place in the image (section 3.2).

Letters: b images, h heads, t tokens, n patches, d width, k width of a head, q tokens that ask, y, x rows and columns.
"""

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

# How a table is laid over another grid, by the names in `options.RESIZE`: as the authors' code does (scipy's zoom of
# order 1), and as timm does.
RESIZE = {
    "paper": {"mode": "bilinear", "align_corners": True},
    "timm": {"mode": "bicubic", "align_corners": False, "antialias": True},
}


def stretch(line: Tensor, side: int, how: str) -> Tensor:
    """What stands along one line, laid along another: (y, ...) -> (side, ...)."""
    # As an image one pixel high, never one wide: torch's antialiased CPU kernel makes all rows of those the first.
    image = rearrange(line, "y ... -> 1 (...) 1 y")
    return F.interpolate(image, (1, side), **RESIZE[how])[0, :, 0].T.reshape(side, *line.shape[1:])


def resample(table: Tensor, grid: tuple[int, int], how: str) -> Tensor:
    """A table of one grid laid over another, one axis after the other: (y, x, d) -> (*grid, d)."""
    return stretch(stretch(table, grid[0], how).transpose(0, 1), grid[1], how).transpose(0, 1)


class Positions(nn.Module):
    """Embeddings of the tokens of one grid."""

    def __init__(self, grid: tuple[int, int], num_prefix_tokens: int) -> None:
        super().__init__()
        self.grid, self.num_prefix_tokens = grid, num_prefix_tokens

    def resized(self, other: "Positions", how: str) -> dict[str, Tensor]:
        """What the state of `other`, of the same kind and another grid, is on this grid; `how` is a key of RESIZE."""
        raise NotImplementedError


class Learned1D(Positions):
    """One learned vector for each token, the class token included (section 3.1): the paper's default."""

    def __init__(self, grid: tuple[int, int], num_prefix_tokens: int, width: int) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.embedding = nn.Parameter(torch.randn(num_prefix_tokens + grid[0] * grid[1], width) * 0.02)

    def forward(self) -> Tensor:
        return self.embedding

    def resized(self, other: "Learned1D", how: str) -> dict[str, Tensor]:
        prefix, patches = other.embedding.tensor_split([other.num_prefix_tokens])
        table = resample(patches.unflatten(0, other.grid), self.grid, how)
        return {"embedding": torch.cat([prefix, table.flatten(0, 1)])}


class Learned2D(Positions):
    """Half of the width tells the column, the other half the row (Appendix D.4); prefix tokens have their own."""

    def __init__(self, grid: tuple[int, int], num_prefix_tokens: int, width: int) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.rows = nn.Parameter(torch.randn(grid[0], width // 2) * 0.02)
        self.columns = nn.Parameter(torch.randn(grid[1], width // 2) * 0.02)
        self.special = nn.Parameter(torch.randn(num_prefix_tokens, width) * 0.02)

    def forward(self) -> Tensor:
        across = repeat(self.columns, "x d -> (y x) d", y=self.rows.shape[0])
        down = repeat(self.rows, "y d -> (y x) d", x=self.columns.shape[0])
        return torch.cat([self.special, torch.cat([across, down], dim=1)])

    def resized(self, other: "Learned2D", how: str) -> dict[str, Tensor]:
        rows, columns = stretch(other.rows, self.grid[0], how), stretch(other.columns, self.grid[1], how)
        return {"rows": rows, "columns": columns, "special": other.special}


class SineCosine2D(Positions):
    """Fixed waves of geometrically spaced lengths over columns and rows; nothing for the prefix tokens (MoCo v3).

    Where the rows and columns lie is part of the state: on another grid they lie between those of the first, and the
    waves over them stay exact.
    """

    def __init__(self, grid: tuple[int, int], num_prefix_tokens: int, width: int) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.width = width
        self.register_buffer("rows", torch.arange(grid[0], dtype=torch.float32))
        self.register_buffer("columns", torch.arange(grid[1], dtype=torch.float32))

    def forward(self) -> Tensor:
        count = self.width // 4
        frequency = 10_000.0 ** -(torch.arange(count, dtype=torch.float64, device=self.rows.device) / count)
        across, down = (place.double()[:, None] * frequency for place in (self.columns, self.rows))
        across = repeat(torch.cat([across.sin(), across.cos()], dim=1), "x d -> (y x) d", y=self.rows.shape[0])
        down = repeat(torch.cat([down.sin(), down.cos()], dim=1), "y d -> (y x) d", x=self.columns.shape[0])
        return F.pad(torch.cat([across, down], dim=1).to(self.rows.dtype), (0, 0, self.num_prefix_tokens, 0))

    def resized(self, other: "SineCosine2D", how: str) -> dict[str, Tensor]:
        rows, columns = stretch(other.rows, self.grid[0], how), stretch(other.columns, self.grid[1], how)
        return {"rows": rows, "columns": columns}


class Relative(Positions):
    """A learned key for each offset between two tokens in the sequence (Appendix D.4): one such module a layer.

    The query's product with the key of its offset to a token is added to that token's logit before the softmax.
    """

    def __init__(self, grid: tuple[int, int], num_prefix_tokens: int, head_width: int) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.keys = nn.Parameter(torch.randn(2 * (num_prefix_tokens + grid[0] * grid[1]) - 1, head_width) * 0.02)

    def forward(self, queries: Tensor, query_ids: Tensor, position_ids: Tensor) -> Tensor:
        """queries (b, h, q, k), their positions (b, q) and those of all tokens (b, t) -> logits (b, h, q, t)."""
        logits = queries @ self.keys.to(queries.dtype).T
        offset = query_ids[:, :, None] - position_ids[:, None, :] + len(self.keys) // 2
        return logits.gather(-1, offset[:, None].expand(*queries.shape[:2], -1, -1))

    def resized(self, other: "Relative", how: str) -> dict[str, Tensor]:
        """An offset in the sequence has no place in the image: whatever `how`, the keys are stretched linearly from
        the longest offsets to the longest, around the key of no offset, which stays."""
        keys = stretch(other.keys, len(self.keys), "paper")
        keys[len(keys) // 2] = other.keys[len(other.keys) // 2]
        return {"keys": keys}


ADDITIVE = {"learned_1d": Learned1D, "learned_2d": Learned2D, "sine_cosine_2d": SineCosine2D}
