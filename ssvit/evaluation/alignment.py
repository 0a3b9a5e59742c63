"""Align pairs of pictures by shift and scale, and correlate their details.

A pair is aligned first by template matching at half the resolution, then by least squares (Gauss and Newton) over
scale, shift, contrast and brightness. Details are the grey values minus their blurred version.

Shapes use p pairs, n = 64 rows and columns, k further pictures of each pair.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 64  # rows and columns of the pictures
_BLUR = 2.0  # standard deviation of the blur, in pixels
_SCALES = (1.0, 0.95, 0.9, 0.85, 0.8)  # of the first picture within the second
_UNSCALED = 0.9  # side of the template, for scale 1
_SIMILAR = 0.3  # minimum correlation after template matching; other pairs are not refined
_ROUNDS = 5  # steps of the least squares
_MARGIN = 0.94  # part of the picture that is compared, which excludes frames
_OVERLAP = 0.35  # minimum area that two pictures share
_NEVER = 1e-10  # variance below which pictures have no details


class Aligned(NamedTuple):
    """Store pictures that are warped to the frame of others.

    Attributes:
        values: Details of the warped pictures, (p, n, n).
        inside: 1 where both pictures have values, else 0, (p, n, n).
        correlation: Correlation of the details, (p,).
    """

    values: Tensor
    inside: Tensor
    correlation: Tensor


def details(pictures: Tensor) -> Tensor:
    """Return grey values minus their blurred version, (p, n, n) float32 of any range."""
    radius = round(3 * _BLUR)
    kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1) / _BLUR) ** 2)
    kernel /= kernel.sum()
    padded = F.pad(pictures[:, None], (radius,) * 4, mode="reflect")
    return pictures - F.conv2d(F.conv2d(padded, kernel[None, None, None]), kernel[None, None, :, None])[:, 0]


def align(fixed: Tensor, moving: Tensor) -> Aligned:
    """Warp pictures to the frame of others; the result of pairs that do not match is 0.

    Args:
        fixed: Details of the pictures that define the frame, (p, n, n).
        moving: Details of the pictures that are warped, (p, n, n).
    """
    aligned = Aligned(torch.zeros_like(fixed), torch.zeros_like(fixed), torch.zeros(len(fixed)))
    if not len(fixed):  # the Fourier transform of torch 2.10 fails for no pictures
        return aligned
    coarse = [F.avg_pool2d(pictures[:, None], 2)[:, 0] for pictures in (fixed, moving)]
    (score, transform), (inverse_score, inverse) = _matched(*coarse), _matched(*reversed(coarse))
    inverse = torch.cat([torch.ones_like(inverse[:, :1]), -inverse[:, 1:]], 1) / inverse[:, :1]
    transform = torch.where((score >= inverse_score)[:, None], transform, inverse)
    rows = (torch.maximum(score, inverse_score) > _SIMILAR).nonzero()[:, 0]
    if len(rows):
        for values, refined in zip(aligned, _refined(fixed[rows], moving[rows], transform[rows]), strict=True):
            values[rows] = refined
    return aligned


def partial_correlation(fixed: Tensor, moving: Aligned, others: list[Aligned]) -> Tensor:
    """Return the partial correlation of the details of pairs given further pictures, (p,).

    Both pictures are regressed on the further pictures, and the residuals are correlated (Fisher 1924). The regression
    removes the details that are common to pictures of one kind. The residuals of a copy are still correlated.

    Args:
        fixed: Details of the first pictures, (p, n, n).
        moving: The second pictures, aligned with the first ones.
        others: The k further pictures, aligned with the first ones. A picture that overlaps too little is ignored.
    """
    inside, columns = moving.inside, [torch.ones_like(fixed)]
    for other in others:
        both = inside * other.inside
        used = (both.mean((1, 2)) > _OVERLAP)[:, None, None]
        inside = torch.where(used, both, inside)
        columns.append(other.values * used)
    known = (torch.stack(columns, -1) * inside[..., None]).flatten(1, 2).double()
    pair = (torch.stack([fixed, moving.values], -1) * inside[..., None]).flatten(1, 2).double()
    gram = known.mT @ known + 1e-6 * torch.eye(known.shape[-1], dtype=torch.float64)
    rest = pair - known @ torch.linalg.solve(gram, known.mT @ pair)
    variances = rest.square().mean(1)
    correlation = rest.prod(-1).mean(1) / variances.prod(-1).clamp_min(_NEVER**2).sqrt()
    return (correlation * (variances > _NEVER).all(-1)).float()


def _matched(part: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Find each scaled picture `part` in the picture `whole` by normalised cross-correlation.

    Args:
        part: Pictures, (p, m, m).
        whole: Pictures, (p, m, m).

    Returns:
        The highest correlation, (p,), and (scale, y, x), (p, 3), which maps coordinates of the part in [-1, 1] to
        coordinates of the whole.
    """
    count, m, _ = part.shape
    spectrum = torch.fft.rfft2(whole)
    sums = [F.pad(values.cumsum(1).cumsum(2), (1, 0, 1, 0)) for values in (whole, whole * whole)]
    best, found = torch.full((count,), -1.0), torch.ones(count, 3)
    for scale in _SCALES:
        side = round(m * (_UNSCALED if scale == 1 else scale) / 2) * 2
        border = (m - side) // 2
        if scale == 1:
            template = part[:, border : border + side, border : border + side]
        else:
            template = F.interpolate(part[:, None], (side, side), mode="bilinear", antialias=True)[:, 0]
        template = template - template.mean((1, 2), keepdim=True)
        products = torch.fft.irfft2(spectrum * torch.fft.rfft2(template, s=(m, m)).conj(), s=(m, m))
        total, squares = (
            s[:, side:, side:] - s[:, :-side, side:] - s[:, side:, :-side] + s[:, :-side, :-side] for s in sums
        )
        energy = (squares - total * total / side**2).clamp_min(1e-6) * template.square().sum((1, 2))[:, None, None]
        places = m - side + 1
        scores = products[:, :places, :places] / energy.clamp_min(1e-9).sqrt()
        score, place = scores.flatten(1).max(1)
        centre = torch.stack([place // places, place % places], 1) + side / 2
        factor = torch.full((count, 1), 1.0 if scale == 1 else side / m)
        better = score > best
        found = torch.where(better[:, None], torch.cat([factor, centre / m * 2 - 1], 1), found)
        best = torch.where(better, score, best)
    return best, found


def _refined(fixed: Tensor, moving: Tensor, transform: Tensor) -> Aligned:
    """Refine transforms (scale, y, x), (p, 3), of the frame of `fixed` to coordinates of `moving`; keep the best."""
    n = fixed.shape[-1]
    x = _centres(n)
    y = x[:, None]
    gradients = F.pad(moving[:, 2:] - moving[:, :-2], (0, 0, 1, 1)), F.pad(moving[..., 2:] - moving[..., :-2], (1, 1))
    stack = torch.stack([moving, *(gradient * n / 4 for gradient in gradients)], 1)
    current, warped = _warped(fixed, stack, transform)
    best = current
    for _ in range(_ROUNDS):
        (values, down, right), inside = warped.unbind(1), current.inside[..., None]
        system = torch.stack([down * y + right * x, down, right, values, torch.ones_like(values)], -1) * inside
        system = system.flatten(1, 2)
        gram = system.mT @ system + 1e-4 * torch.eye(5)
        solution = torch.linalg.solve(gram, system.mT @ (fixed[..., None] * inside).flatten(1, 2))[..., 0]
        change = solution[:, :3] / solution[:, 3:4].clamp_min(0.01)  # divided by the contrast
        transform = transform + change.clamp(-0.06, 0.06)
        current, warped = _warped(fixed, stack, transform)
        better = current.correlation > best.correlation
        for values, new in zip(best, current, strict=True):
            values[better] = new[better]
    return best


def _centres(n: int) -> Tensor:
    """Return the coordinates of the centres of n pixels, where the borders of the picture are -1 and 1."""
    return (torch.arange(n) + 0.5) / n * 2 - 1


def _warped(fixed: Tensor, stack: Tensor, transform: Tensor) -> tuple[Aligned, Tensor]:
    """Warp pictures and their gradients, (p, 3, n, n), by transforms (scale, y, x)."""
    scale, y, x = transform.unbind(1)
    zero = torch.zeros_like(scale)
    matrix = torch.stack([torch.stack([scale, zero, x], 1), torch.stack([zero, scale, y], 1)], 1)
    grid = F.affine_grid(matrix, list(stack.shape), align_corners=False)
    warped = F.grid_sample(stack, grid, align_corners=False)
    inner = _centres(stack.shape[-1]).abs() < _MARGIN
    inside = ((grid.abs() < _MARGIN).all(-1) & inner & inner[:, None]).float()
    values, area = warped[:, 0], inside.sum((1, 2)).clamp_min(1)
    first, second = (
        (pictures - ((pictures * inside).sum((1, 2)) / area)[:, None, None]) * inside for pictures in (fixed, values)
    )
    energies = first.square().sum((1, 2)) * second.square().sum((1, 2))
    correlation = (first * second).sum((1, 2)) / energies.clamp_min(1e-10).sqrt()
    enough = inside.mean((1, 2)) > _OVERLAP
    return Aligned(values, inside, torch.where(enough, correlation, -1.0)), warped
