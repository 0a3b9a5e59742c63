"""Rendered shapes (data=shapes): dead-leaves scenes with one labelled shape, pure functions of (seed, index).

The dead-leaves model reproduces the scale-free statistics of natural images: opaque leaves with radii distributed as
r^-3, painted over one another (Lee, Mumford, Huang 2001). Light, texture and a small palette per scene make masked
patches predictable from visible ones. The shape is the class; its pose, colour and texture are independent of it. It is
large and nearly upright, similar to objects in photographs.

All values are computed by sums, products, minima, square roots and tables. Unlike powers and angles, these are rounded
independently of the processor and of the position in a batch: an image has the same bits on every machine, in any batch
and for any number of threads.

Letters: b images, k leaves, p pixels = h * w. Lengths are in units of sqrt(h * w).
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ssvit.data.sources import shapes_options
from ssvit.data.sources.base import Data
from ssvit.data.sources.memory import Memory
from ssvit.engine.randomness import uniform
from ssvit.errors import pair

_LEAVES = 16
_RADII = (0.15, 0.7)  # minimum and maximum
_OCTAVES = ((3, 1.0), (6, 0.6), (12, 0.35))  # cells of the noise along each side, and its weight
_SHAPE_RADIUS = (0.26, 0.12)  # minimum and range, as fractions of the shorter side
_SHAPE_TURN = (-0.075, 0.15)  # minimum angle and range, in turns
_SHAPE_SHIFT = 0.2  # the range of positions exceeds full visibility by this fraction of the shorter side
_TEXTURE = (7.5, 0.35)  # periods along the shorter side, and contrast, of the texture of a class
_CONFLICTS = 10**12  # index of the first image with conflicting cues, beyond those of all data sets
_CHUNK = 1 << 17  # pixels per chunk: large enough to amortise calls, small enough for the cache
_TURN = 1 << 12  # entries of the table of cosines
_COSINE = torch.tensor([math.cos(2 * math.pi * i / _TURN) for i in range(_TURN)])


def _root(x: Tensor) -> Tensor:
    """Return the correctly rounded square root; that of torch in float32 (MKL's) depends on the vendor of the CPU."""
    return x.double().sqrt().float()


def _disc(x: Tensor, y: Tensor) -> Tensor:
    return _root(x * x + y * y) - 1


def _square(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.886


def _triangle(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs() * 0.866 - y * 0.5, y) - 0.778


def _star(x: Tensor, y: Tensor) -> Tensor:
    # Two reflections fold the five points onto one edge, which runs from the tip (0, -1.54) to a notch.
    x = x.abs()
    for nx, ny in ((0.809, -0.588), (-0.809, -0.588)):
        fold = (x * nx + y * -ny).clamp(min=0) * 2
        x, y = x - fold * nx, y + fold * ny
    return x.abs() * 0.923 - y * 0.384 - 0.592


def _ring(x: Tensor, y: Tensor) -> Tensor:
    return (_root(x * x + y * y) - 1).abs() - 0.25


def _cross(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y.abs()
    return torch.maximum(torch.maximum(x, y) - 1.154, torch.minimum(x, y) - 0.415)


def _crescent(x: Tensor, y: Tensor) -> Tensor:
    x = x - 0.47
    bite = (x - 0.935) * (x - 0.935) + y * y
    return torch.maximum(_root(x * x + y * y) - 1.35, 1.14 - _root(bite))


def _heart(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y - 0.29
    lobe = (x - 0.469) * (x - 0.469) + (y + 0.469) * (y + 0.469)
    return torch.minimum((x + y.abs()) * 0.707 - 0.663, _root(lobe) - 0.663)


def _arrow(x: Tensor, y: Tensor) -> Tensor:
    x = x.abs()
    head = torch.maximum(y + 0.05, x * 0.75 - y * 0.66 - 0.97)
    return torch.minimum(head, torch.maximum(x - 0.45, (y - 0.6).abs() - 0.84))


def _hourglass(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y.abs()
    return torch.maximum(y - 1.19, x * 0.75 - y * 0.66 - 0.1)


_FUNCTIONS = (_disc, _square, _triangle, _star, _ring, _cross, _crescent, _heart, _arrow, _hourglass)
# Textures of the classes, from coordinates in periods. None is the mirror image of another one, or its rotation by the
# angles of the shapes.
_TEXTURES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: torch.zeros_like(x), lambda x, y: _wave(x), lambda x, y: _wave(y), lambda x, y: _wave(x * 0.4),
    lambda x, y: _wave(y * 0.4), lambda x, y: _wave((x + y) * 0.7), lambda x, y: _wave(x) * _wave(y),
    lambda x, y: _wave((x + y) * 0.7) * _wave((x - y) * 0.7), lambda x, y: torch.minimum(_wave(x), _wave(y)),
    lambda x, y: _wave(x * 0.4) * _wave(y * 0.4),
)  # fmt: skip
SHAPES = {function.__name__[1:]: function for function in _FUNCTIONS}
CLASSES = tuple(SHAPES)


class Scenes(NamedTuple):
    """Rendered scenes.

    Attributes:
        images: (b, 3, h, w) uint8.
        labels: (b,) int64, indices into `CLASSES`.
        masks: (b, h, w) uint8: 1 + label for a pixel whose centre is inside the shape, 0 for the background.
    """

    images: Tensor
    labels: Tensor
    masks: Tensor


def shapes(options: shapes_options.Shapes) -> Data:
    """Return the data set of rendered shapes; every start renders it again, without files or downloads."""
    counts = options.images, options.held_out_images
    indices = torch.arange(sum(counts))
    textures = _label(indices, options.seed) if options.textures else None
    scenes = render(indices, seed=options.seed, size=pair("image_size", options.image_size), textures=textures)
    parts = map(Scenes._make, zip(*(column.split(counts) for column in scenes), strict=True))
    mask_classes = ("background", *CLASSES)
    train, test = (
        Memory(part.images, part.labels, CLASSES, masks=part.masks, mask_classes=mask_classes) for part in parts
    )
    return Data(train, None, test, CLASSES)


def conflicts(count: int, *, seed: int, size: int | tuple[int, int]) -> tuple[Scenes, Tensor]:
    """Render images whose shape has the texture of another class, each with equal probability (Geirhos et al. 2019).

    The scenes are in no data set.

    Args:
        count: Number of images, n.
        seed: Seed of all scenes.
        size: Side or (height, width) in pixels.

    Returns:
        The scenes, whose labels are the classes of the shapes, and the classes of the textures, (n,) int64.
    """
    indices = torch.arange(_CONFLICTS, _CONFLICTS + count)
    others = (uniform(seed, "conflicting texture", indices, 1)[:, 0] * (len(CLASSES) - 1)).long()
    textures = (_label(indices, seed) + 1 + others) % len(CLASSES)
    return render(indices, seed=seed, size=size, textures=textures), textures


def render(indices: Tensor, *, seed: int, size: int | tuple[int, int], textures: Tensor | None = None) -> Scenes:
    """Render images, their classes and their segmentation masks.

    Scene i is a pure function of (seed, i, size), its label of (seed, i). Each aligned run of ten indices contains each
    class once. Sizes of one aspect ratio show the same scene.

    Args:
        indices: (b,) int64.
        seed: Seed of all scenes.
        size: Side or (height, width) in pixels.
        textures: Class of each shape's texture, (b,); None for stripes that are independent of the class.

    Raises:
        OptionError: Invalid size.
    """
    height, width = pair("size", size)
    grid, labels = _Grid(height, width, indices.device), _label(indices, seed)
    images = torch.empty(len(indices), 3, height, width, dtype=torch.uint8, device=indices.device)
    masks = torch.empty_like(images[:, 0])
    rows = max(1, _CHUNK // (height * width))
    for start in range(0, len(indices), rows):
        part = slice(start, start + rows)
        canvas, depth = _paint(indices[part], labels[part], None if textures is None else textures[part], seed, grid)
        images[part] = canvas.clamp_(0, 1).mul_(255).add_(0.5).view(-1, 3, height, width)
        masks[part] = ((depth > 0) * (labels[part, None] + 1)).view(-1, height, width)
    return Scenes(images, labels, masks)


def _label(indices: Tensor, seed: int) -> Tensor:
    """Return the class of each image, (b,) -> (b,) int64, from a random order of all classes per aligned run."""
    count = len(CLASSES)
    order = uniform(seed, "synthetic label", indices.div(count, rounding_mode="floor"), count).argsort(dim=1)
    return order.gather(1, indices.remainder(count)[:, None])[:, 0]


class _Grid:
    """Pixel centres x, y (p,) relative to the image's centre; `density` is the number of pixels per unit length."""

    def __init__(self, height: int, width: int, device: torch.device) -> None:
        self.rows, self.columns, self.density = height, width, math.sqrt(height * width)
        self.extent = width / self.density, height / self.density
        x = (torch.arange(width, device=device) - (width - 1) / 2) / self.density
        y = (torch.arange(height, device=device) - (height - 1) / 2) / self.density
        self.x, self.y = x.repeat(height), y.repeat_interleave(width)


def _paint(indices: Tensor, labels: Tensor, textures: Tensor | None, seed: int, grid: _Grid) -> tuple[Tensor, Tensor]:
    """Return images before rounding, (b, 3, p), and the depth of each pixel in its shape, (b, p)."""
    turn, tints, bands, shape, leaves, *lattices = _numbers(indices, seed)
    light = _direction(turn * 0.4 + 0.55)
    # The four tints of a scene's leaves: (b, 4, 3) of brightness, warmth and greenness.
    palette = (tints.view(-1, 4, 3) - 0.5) * torch.tensor([0.5, 0.6, 0.45], device=tints.device)
    grain, clouds = _noise(lattices, grid).unbind(1)
    x, y = grid.x + grain * 0.04, grid.y + clouds * 0.04
    # Stripes of one direction and period.
    cos, sin = _direction(bands[:, :1])
    period = 0.1 + bands[:, 1:2] * 0.15
    stripes = _wave(x * (cos / period) + y * (sin / period) + bands[:, 2:])
    canvas = _background(grid, clouds, palette)
    _paint_leaves(canvas, x, y, (stripes, grain), _leaves(leaves, palette, light, grid))
    return canvas, _paint_shape(canvas, labels, textures, shape, light, grid)


def _numbers(indices: Tensor, seed: int) -> tuple[Tensor, ...]:
    """Sample uniform numbers in [0, 1) for light, tints, bands, shape, leaves and each octave: (b, count) each."""
    counts = [1, 12, 3, 11, 10 * _LEAVES, *(2 * (cells + 1) ** 2 for cells, _ in _OCTAVES)]
    # Each 53-bit number is split into two numbers of 24 bits, the precision of float32.
    wide = uniform(seed, "synthetic", indices, (sum(counts) + 1) // 2) * 2.0**24
    high = wide.floor()
    low = ((wide - high) * 2.0**24).floor()
    return (torch.cat([high, low], dim=1) * 2.0**-24).float()[:, : sum(counts)].split(counts, dim=1)


def _direction(turn: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of an angle in turns, from a table."""
    entry = (turn * _TURN).long()
    table = _COSINE.to(turn.device)
    return table[entry.remainder(_TURN)], table[(entry - _TURN // 4).remainder(_TURN)]


def _wave(t: Tensor) -> Tensor:
    """Approximate sin(2 pi t) by two parabolas."""
    t = t - t.round()
    return (1 - t.abs() * 2) * t * 8


def _noise(lattices: list[Tensor], grid: _Grid) -> Tensor:
    """Interpolate two zero-mean noise fields from one lattice per octave: (b, 2 (cells + 1)^2) uniform -> (b, 2, p)."""
    noise = None
    for (cells, weight), lattice in zip(_OCTAVES, lattices, strict=True):
        values = ((lattice - 0.5) * (2 * weight)).view(-1, 2, cells + 1, cells + 1)
        # Columns before rows: picking single numbers is slow, so it is done on the small lattice; picking rows is fast.
        for axis, pixels in ((3, grid.columns), (2, grid.rows)):
            position = (torch.arange(pixels, device=lattice.device) + 0.5) * (cells / pixels)
            cell = position.floor().long()
            part = position - cell
            ease = part * part * (3 - part * 2)
            low, high = values.index_select(axis, cell), values.index_select(axis, cell + 1)
            values = high.sub_(low).mul_(ease if axis == 3 else ease[:, None]).add_(low)
        noise = values if noise is None else noise.add_(values)
    assert noise is not None
    return noise.flatten(2)


def _color(bright: Tensor, warm: Tensor, green: Tensor) -> Tensor:
    """Convert brightness and two opponent-colour axes to RGB: three (...,) -> (..., 3)."""
    return torch.stack(
        [bright + warm * 0.6, bright + warm * 0.15 + green * 0.5, bright - warm * 0.75 - green * 0.2], -1
    )


def _background(grid: _Grid, clouds: Tensor, palette: Tensor) -> Tensor:
    """Render a sky with clouds that darkens downwards: (b, 3, p)."""
    bright, warm, green = palette[:, 0].unbind(1)
    top = _color(bright * 0.4 + 0.75, warm, green)[:, :, None]
    low = _color(bright * 0.4 + 0.35, warm, green)[:, :, None]
    return ((grid.y + 0.5) + clouds * 0.2)[:, None] * (low - top) + top


def _leaves(
    numbers: Tensor, palette: Tensor, light: tuple[Tensor, Tensor], grid: _Grid
) -> Iterable[tuple[Tensor, ...]]:
    """Yield the parameters of each scene's leaves from farthest to nearest, from (b, 10 k) uniform numbers.

    The parameters, (b, 1) each, are ux, uy, u0, vx, vy, v0 of the leaf's coordinates u = ux * x + uy * y + u0 and v
    likewise, in which the edge has norm 1; the gradient of brightness along u and v; the contrast of the texture; slope
    and offset, as functions of the squared norm, of the edge and of the shadow around the leaf. The last one is the
    colour, (b, 3, 1).
    """
    size, aspect, x, y, turn, bright, warm, green, texture, tint = numbers.view(-1, 10, _LEAVES).permute(1, 2, 0)
    low, high = (r**-2 for r in _RADII)
    radius = 1 / _root(low - size * (low - high))
    stretch = _root(1 + aspect * aspect * 2)
    u_radius, v_radius = radius * stretch, radius / stretch
    cos, sin = _direction(turn)
    ux, uy, vx, vy = cos / u_radius, sin / u_radius, -sin / v_radius, cos / v_radius
    x, y = ((axis_position - 0.5) * (side * 1.1) for axis_position, side in zip((x, y), grid.extent, strict=True))
    lx, ly = (part[:, 0] * 0.22 for part in light)
    bases = palette.gather(1, (tint.T * 4).long()[:, :, None].expand(-1, -1, 3)).permute(2, 1, 0)
    color = _color(
        bases[0] + bright * 0.45 + 0.25, bases[1] + (warm - 0.5) * 0.2, bases[2] + (green - 0.5) * 0.2
    ).clamp_(0.03, 1)
    edge, shadow = radius * (grid.density * 0.65), (v_radius * 4).clamp_(max=0.6)
    fields = (
        *(ux, uy, -(ux * x + uy * y), vx, vy, -(vx * x + vy * y)),
        *(lx * cos + ly * sin, ly * cos - lx * sin),
        *((texture * 0.5 - 0.2).clamp_(min=0), edge, 0.5 - edge, shadow, 0.6 - shadow),
    )
    return zip(*(field[:, :, None].contiguous() for field in fields), color[..., None], strict=True)


def _paint_leaves(
    canvas: Tensor, x: Tensor, y: Tensor, textures: tuple[Tensor, ...], leaves: Iterable[tuple[Tensor, ...]]
) -> None:
    """Paint ellipses, and a box for every fourth leaf, over one another: canvas (b, 3, p), x, y and textures (b, p)."""
    # All leaves use the same few buffers: page faults of new ones would take longer than the arithmetic.
    unity, roundness, ambient = torch.tensor([1.0, 0.15, 1.05], device=x.device)
    u, v, shade, spare = torch.empty(4, *x.shape, device=x.device)
    layer = torch.empty_like(canvas)
    for k, leaf in enumerate(leaves):
        ux, uy, u0, vx, vy, v0, light_u, light_v, contrast, edge, edge_0, shadow, shadow_0, color = leaf
        torch.mul(x, ux, out=u).add_(torch.mul(y, uy, out=spare)).add_(u0)
        torch.mul(x, vx, out=v).add_(torch.mul(y, vy, out=spare)).add_(v0)
        torch.mul(u, light_u, out=shade).add_(torch.mul(v, light_v, out=spare))
        shade.add_(torch.mul(textures[k % len(textures)], contrast, out=spare))
        # The squared norm is 1 at the edge of the leaf and grows there by 2 over the shorter radius.
        u.mul_(u), v.mul_(v)
        norm = torch.maximum(u, v, out=u) if k % 4 == 0 else u.add_(v)
        outside = torch.mul(norm, edge, out=v).add_(edge_0).clamp_(0, 1)
        shade.sub_(torch.mul(norm, roundness, out=spare)).add_(ambient).mul_(torch.sub(unity, outside, out=spare))
        lit = torch.mul(norm, shadow, out=u).add_(shadow_0).clamp_(max=1)
        canvas.mul_(lit.mul_(outside)[:, None])
        canvas.add_(torch.mul(color, shade[:, None], out=layer))


def _paint_shape(
    canvas: Tensor, labels: Tensor, textures: Tensor | None, numbers: Tensor, light: tuple[Tensor, Tensor], grid: _Grid
) -> Tensor:
    """Paint labelled shapes over the scenes.

    Args:
        canvas: (b, 3, p), which is modified.
        labels: (b,) indices into `CLASSES`.
        textures: (b,) indices into `CLASSES`, or None for stripes.
        numbers: (b, 11) uniform numbers, which determine pose and colour.
        light: Cosine and sine of the direction of light, (b, 1) each.
        grid: Pixel centres.

    Returns:
        Signed distance of each pixel to the edge in radii, positive inside: (b, p).
    """
    size, x, y, turn, aspect, period, phase, contrast, hue, bright, chroma = numbers[:, :, None].unbind(1)
    side = min(grid.extent)
    radius = (_SHAPE_RADIUS[0] + size * _SHAPE_RADIUS[1]) * side
    room = (side - radius * 3.2).clamp_(min=0) + _SHAPE_SHIFT * side
    dx, dy = grid.x - (x - 0.5) * room, grid.y - (y - 0.5) * room
    cos, sin = _direction(turn * _SHAPE_TURN[1] + _SHAPE_TURN[0])
    stretch = _root(aspect * 0.7 + 0.7)
    u = (dx * cos + dy * sin) * (stretch / radius)
    v = (dy * cos - dx * sin) / (stretch * radius)
    depth = torch.empty_like(u)
    for label, shape in enumerate(SHAPES.values()):
        rows = (labels == label).nonzero()[:, 0]
        depth[rows] = -shape(u[rows], v[rows])
    lx, ly = light
    if textures is None:
        pattern = _wave(u * (period + 0.8) + phase) * (contrast * 0.5 - 0.25).clamp_(min=0)
    else:
        (periods, strength), pattern = _TEXTURE, torch.empty_like(u)
        for label, texture in enumerate(_TEXTURES):
            rows = (textures == label).nonzero()[:, 0]
            columns, lines = (offset[rows] * (periods / side) for offset in (dx, dy))
            pattern[rows] = texture(columns + phase[rows], lines + period[rows]) * strength
    shade = (dx * lx + dy * ly) * (0.25 / radius) + pattern + (depth * 3).clamp_(0, 1) * 0.25 + 0.85
    cover = (depth * (radius * grid.density) + 0.5).clamp_(0, 1)
    lit = (0.4 - depth * (radius * 8)).clamp_(0.4, 1)
    rainbow = torch.cat([_direction(hue + third / 3)[0] for third in range(3)], dim=1)
    color = (rainbow * (chroma * 0.3 + 0.1) + (bright * 0.5 + 0.25)).clamp_(0.03, 1)
    canvas *= ((1 - cover) * lit)[:, None]
    canvas += color[:, :, None] * (shade * cover)[:, None]
    return depth
