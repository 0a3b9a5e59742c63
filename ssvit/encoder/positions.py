"""Where a token stands: the position embeddings of the paper's Table 8, each a module of one grid.

An additive embedding gives (t, d), one row for each of the t = s + n tokens, of which the first s (0 or 1) is the
class token and the rest are the n patches in raster order. A relative one gives logits to add before the softmax.

Letters: b images, h heads, t tokens, n patches, d width, k width of a head, q tokens that ask.
"""

import torch
from einops import repeat
from torch import Tensor, nn


class Learned1D(nn.Module):
    """One learned vector for each token, the class token included (section 3.1): the paper's default."""

    def __init__(self, grid: tuple[int, int], special: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(special + grid[0] * grid[1], width) * 0.02)

    def forward(self) -> Tensor:
        return self.embedding


class Learned2D(nn.Module):
    """Half of the width tells the column, the other half the row (Appendix D.4); the class token has its own."""

    def __init__(self, grid: tuple[int, int], special: int, width: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(grid[0], width // 2) * 0.02)
        self.columns = nn.Parameter(torch.randn(grid[1], width // 2) * 0.02)
        self.special = nn.Parameter(torch.randn(special, width) * 0.02)

    def forward(self) -> Tensor:
        across = repeat(self.columns, "x d -> (y x) d", y=len(self.rows))
        down = repeat(self.rows, "y d -> (y x) d", x=len(self.columns))
        return torch.cat([self.special, torch.cat([across, down], dim=1)])


class SineCosine2D(nn.Module):
    """Fixed waves of geometrically spaced lengths over columns and rows; nothing for the class token (MoCo v3)."""

    def __init__(self, grid: tuple[int, int], special: int, width: int) -> None:
        super().__init__()
        frequency = 10_000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
        rows, columns = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij")
        angles = [place.flatten()[:, None] * frequency for place in (columns, rows)]
        waves = torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1)
        self.register_buffer("embedding", torch.cat([torch.zeros(special, width), waves.float()]), persistent=False)

    def forward(self) -> Tensor:
        return self.embedding


class Relative(nn.Module):
    """A learned key for each offset between two tokens in the sequence (Appendix D.4): one such module a layer.

    The query's product with the key of its offset to a token is added to that token's logit before the softmax.
    """

    def __init__(self, tokens: int, head_width: int) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(2 * tokens - 1, head_width) * 0.02)

    def forward(self, queries: Tensor, asking: Tensor, places: Tensor) -> Tensor:
        """queries (b, h, q, k), their places (b, q) and the places of all tokens (b, t) -> logits (b, h, q, t)."""
        logits = queries @ self.keys.to(queries.dtype).T
        offset = asking[:, :, None] - places[:, None, :] + len(self.keys) // 2
        return logits.gather(-1, offset[:, None].expand(*queries.shape[:2], -1, -1))


ADDITIVE = {"learned_1d": Learned1D, "learned_2d": Learned2D, "sine_cosine_2d": SineCosine2D}
