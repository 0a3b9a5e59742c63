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
from torch.fx.experimental.symbolic_shapes import statically_known_true

# How a table is laid over another grid, by the names in `options.RESIZE`: as the authors' code does (scipy's zoom of
# order 1), and as timm does.
RESIZE = {
    "paper": {"mode": "bilinear", "align_corners": True},
    "timm": {"mode": "bicubic", "align_corners": False, "antialias": True},
}
Grid = tuple[int, int]  # rows and columns of patches


def stretch(line: Tensor, side: int, how: str) -> Tensor:
    """What stands along one line, laid along another: (y, ...) -> (side, ...)."""
    # As an image one pixel high, never one wide: torch's antialiased CPU kernel makes all rows of those the first.
    image = rearrange(line, "y ... -> 1 (...) 1 y")
    return F.interpolate(image, (1, side), **RESIZE[how])[0, :, 0].T.reshape(side, *line.shape[1:])


def resample(table: Tensor, grid: Grid, how: str) -> Tensor:
    """A table of one grid laid over another, one axis after the other: (y, x, d) -> (*grid, d)."""
    return stretch(stretch(table, grid[0], how).transpose(0, 1), grid[1], how).transpose(0, 1)


class Positions(nn.Module):
    """Embeddings of the tokens of one grid, which can be laid over another."""

    def __init__(self, grid: Grid, num_prefix_tokens: int) -> None:
        super().__init__()
        self.grid, self.num_prefix_tokens = grid, num_prefix_tokens

    def covers(self, grid: Grid | None) -> bool:
        """Whether a grid is the module's own, or None; of the sizes of an exported graph no two are taken for one."""
        return grid is None or all(statically_known_true(a == b) for a, b in zip(grid, self.grid, strict=True))

    def resampled(self, grid: Grid, how: str) -> dict[str, Tensor]:
        """What changes of the state on another grid, by name; `how` is a key of RESIZE."""
        raise NotImplementedError


class Learned1D(Positions):
    """One learned vector for each token, the class token included (section 3.1): the paper's default."""

    def __init__(self, grid: Grid, num_prefix_tokens: int, width: int) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.embedding = nn.Parameter(torch.randn(num_prefix_tokens + grid[0] * grid[1], width) * 0.02)

    def forward(self, grid: Grid | None = None, how: str = "paper") -> Tensor:
        return self.embedding if self.covers(grid) else self.resampled(grid, how)["embedding"]

    def resampled(self, grid: Grid, how: str) -> dict[str, Tensor]:
        prefix, patches = self.embedding.tensor_split([self.num_prefix_tokens])
        table = resample(patches.unflatten(0, self.grid), grid, how)
        return {"embedding": torch.cat([prefix, table.flatten(0, 1)])}


class RowsAndColumns(Positions):
    """Embeddings of the rows and of the columns of a grid, apart: `rows` (y, ...) and `columns` (x, ...)."""

    def on(self, grid: Grid | None, how: str) -> tuple[Tensor, Tensor]:
        """Rows and columns of a grid, the module's own where it is None."""
        return (self.rows, self.columns) if self.covers(grid) else tuple(self.resampled(grid, how).values())

    def resampled(self, grid: Grid, how: str) -> dict[str, Tensor]:
        return {"rows": stretch(self.rows, grid[0], how), "columns": stretch(self.columns, grid[1], how)}


class Learned2D(RowsAndColumns):
    """Half of the width tells the column, the other half the row (Appendix D.4); prefix tokens have their own."""

    def __init__(self, grid: Grid, num_prefix_tokens: int, width: int) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.rows = nn.Parameter(torch.randn(grid[0], width // 2) * 0.02)
        self.columns = nn.Parameter(torch.randn(grid[1], width // 2) * 0.02)
        self.special = nn.Parameter(torch.randn(num_prefix_tokens, width) * 0.02)

    def forward(self, grid: Grid | None = None, how: str = "paper") -> Tensor:
        rows, columns = self.on(grid, how)
        across = repeat(columns, "x d -> (y x) d", y=rows.shape[0])
        down = repeat(rows, "y d -> (y x) d", x=columns.shape[0])
        return torch.cat([self.special, torch.cat([across, down], dim=1)])


class SineCosine2D(RowsAndColumns):
    """Fixed waves of geometrically spaced lengths over columns and rows; nothing for the prefix tokens (MoCo v3).

    Where the rows and columns lie is part of the state: on another grid they lie between those of the first, and the
    waves over them stay exact.
    """

    def __init__(self, grid: Grid, num_prefix_tokens: int, width: int) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.width = width
        self.register_buffer("rows", torch.arange(grid[0], dtype=torch.float32))
        self.register_buffer("columns", torch.arange(grid[1], dtype=torch.float32))

    def forward(self, grid: Grid | None = None, how: str = "paper") -> Tensor:
        rows, columns = self.on(grid, how)
        count = self.width // 4
        frequency = 10_000.0 ** -(torch.arange(count, dtype=torch.float64, device=rows.device) / count)
        across, down = (place.double()[:, None] * frequency for place in (columns, rows))
        across = repeat(torch.cat([across.sin(), across.cos()], dim=1), "x d -> (y x) d", y=rows.shape[0])
        down = repeat(torch.cat([down.sin(), down.cos()], dim=1), "y d -> (y x) d", x=columns.shape[0])
        return F.pad(torch.cat([across, down], dim=1).to(rows.dtype), (0, 0, self.num_prefix_tokens, 0))


class Relative(Positions):
    """A learned key for each offset between two tokens in the sequence (Appendix D.4): one such module a layer.

    The query's product with the key of its offset to a token is added to that token's logit before the softmax.
    """

    def __init__(self, grid: Grid, num_prefix_tokens: int, head_width: int) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.keys = nn.Parameter(torch.randn(2 * (num_prefix_tokens + grid[0] * grid[1]) - 1, head_width) * 0.02)

    def forward(
        self, queries: Tensor, tokens: int, position_ids: Tensor | None = None, output_ids: Tensor | None = None
    ) -> Tensor:
        """queries (b, h, q, k) -> logits (b, h, q, t).

        tokens: t. position_ids (b, t): where they stand on the module's own grid; None for in order, and for all tokens
        of whatever grid. output_ids (b, q): which of them ask, None for all.
        """
        keys = self.keys if position_ids is not None else self._stretched(tokens)
        if position_ids is None:
            position_ids = torch.arange(tokens, device=queries.device)[None]
        asking = position_ids if output_ids is None else position_ids.expand(queries.shape[0], -1).gather(1, output_ids)
        logits = queries @ keys.to(queries.dtype).T
        offset = asking[:, :, None] - position_ids[:, None, :] + len(keys) // 2
        return logits.gather(-1, offset[:, None].expand(*queries.shape[:2], -1, -1))

    def resampled(self, grid: Grid, how: str) -> dict[str, Tensor]:
        """An offset in the sequence has no place in the image, so that `how` is not asked."""
        return {"keys": self._stretched(self.num_prefix_tokens + grid[0] * grid[1])}

    def _stretched(self, tokens: int) -> Tensor:
        """The keys of a sequence of another length, stretched linearly from the longest offsets to the longest around
        the key of no offset, which stays.
        """
        middle, last = len(self.keys) // 2, tokens - 1
        if last == middle:
            return self.keys
        keys = stretch(self.keys, 2 * last + 1, "paper")
        return torch.cat([keys[:last], self.keys[middle, None], keys[last + 1 :]])


ADDITIVE = {"learned_1d": Learned1D, "learned_2d": Learned2D, "sine_cosine_2d": SineCosine2D}
