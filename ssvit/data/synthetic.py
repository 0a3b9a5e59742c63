"""The embedded data set: scenes of overlapping leaves behind one labelled shape, drawn from (seed, index) alone.

The dead-leaves model gives the scale-free statistics of natural images: opaque leaves with radii distributed as
r^-3, painted over one another (Lee, Mumford, Huang 2001). Light, texture and a small palette of each scene make hidden
patches predictable from visible ones. The shape is the class; its pose, colour and texture say nothing of it.

Every number comes from sums, products, minima, square roots and tables. Those are rounded alike wherever they stand
in a batch, which torch does not promise of its powers and angles (a vector and its remainder differ in the last bit):
so an image has the same bits in any batch and for any number of threads.

Letters: b images, k leaves, p pixels = h * w. Lengths are in units of sqrt(h * w).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ssvit.options import pair, whole
from ssvit.randomness import uniform

_LEAVES = 16
_RADII = (0.15, 0.7)  # least and most
_OCTAVES = ((3, 1.0), (6, 0.6), (12, 0.35))  # cells of the noise along each side, and its weight
_CHUNK = 1 << 17  # pixels drawn at a time: enough to pay for the calls, few enough for the cache
_TURN = 1 << 12  # entries of the table of cosines
_COSINE = torch.tensor([math.cos(2 * math.pi * i / _TURN) for i in range(_TURN)])


def _disc(x: Tensor, y: Tensor) -> Tensor:
    return (x * x + y * y).sqrt() - 1


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
    return ((x * x + y * y).sqrt() - 1).abs() - 0.25


def _cross(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y.abs()
    return torch.maximum(torch.maximum(x, y) - 1.154, torch.minimum(x, y) - 0.415)


def _crescent(x: Tensor, y: Tensor) -> Tensor:
    x = x - 0.47
    bite = (x - 0.935) * (x - 0.935) + y * y
    return torch.maximum((x * x + y * y).sqrt() - 1.35, 1.14 - bite.sqrt())


def _heart(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y - 0.29
    lobe = (x - 0.469) * (x - 0.469) + (y + 0.469) * (y + 0.469)
    return torch.minimum((x + y.abs()) * 0.707 - 0.663, lobe.sqrt() - 0.663)


def _arrow(x: Tensor, y: Tensor) -> Tensor:
    x = x.abs()
    head = torch.maximum(y + 0.05, x * 0.75 - y * 0.66 - 0.97)
    return torch.minimum(head, torch.maximum(x - 0.45, (y - 0.6).abs() - 0.84))


def _hourglass(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.abs(), y.abs()
    return torch.maximum(y - 1.19, x * 0.75 - y * 0.66 - 0.1)


SHAPES = {
    "disc": _disc,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "ring": _ring,
    "cross": _cross,
    "crescent": _crescent,
    "heart": _heart,
    "arrow": _arrow,
    "hourglass": _hourglass,
}
CLASSES = tuple(SHAPES)


def render(indices: Tensor, *, seed: int, size: int | tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Draw images and tell their classes.

    indices (b,) int64, size a side or (height, width) in pixels -> images (b, 3, h, w) uint8, labels (b,) int64 into
    `CLASSES`. Image i is a pure function of (seed, i, size), and its label of (seed, i); each aligned run of ten
    indices holds every class once. The sizes of one aspect show one scene. OptionError if a side is no positive whole
    number or the seed is negative.
    """
    height, width = pair("size", size)
    whole("seed", seed, 0)
    grid = _grid(height, width, indices.device)
    labels = _label(indices, seed)
    images = torch.empty(len(indices), 3, height, width, dtype=torch.uint8, device=indices.device)
    rows = max(1, _CHUNK // (height * width))
    for start in range(0, len(indices), rows):
        part = slice(start, start + rows)
        images[part] = _draw(indices[part], labels[part], seed, grid).view(-1, 3, height, width)
    return images, labels


def masks(indices: Tensor, *, seed: int, size: int | tuple[int, int]) -> Tensor:
    """Where the labelled shapes lie in the images that `render` draws of the same arguments.

    indices (b,) int64 -> (b, h, w) uint8: 1 + label for a pixel whose centre lies in the shape, 0 for the background.
    """
    height, width = pair("size", size)
    grid, labels = _grid(height, width, indices.device), _label(indices, seed)
    found = torch.empty(len(indices), height, width, dtype=torch.uint8, device=indices.device)
    rows = max(1, _CHUNK // (height * width))
    for start in range(0, len(indices), rows):
        part = slice(start, start + rows)
        shape = _place(labels[part], _drawn(indices[part], seed)[3], grid)
        found[part] = ((shape.depth > 0) * (labels[part, None] + 1)).view(-1, height, width)
    return found


def _label(indices: Tensor, seed: int) -> Tensor:
    """The class of each image, from a random order of all classes for every aligned run: (b,) -> (b,) int64."""
    count = len(CLASSES)
    order = uniform(seed, "synthetic label", indices.div(count, rounding_mode="floor"), count).argsort(dim=1)
    return order.gather(1, indices.remainder(count)[:, None])[:, 0]


class _Grid(NamedTuple):
    """Pixel centres with the origin in the middle of the image, its extent, and the pixels in a unit of length."""

    x: Tensor  # (p,)
    y: Tensor  # (p,)
    columns: int
    rows: int
    density: float

    @property
    def extent(self) -> tuple[float, float]:
        return self.columns / self.density, self.rows / self.density


def _grid(height: int, width: int, device: torch.device) -> _Grid:
    density = math.sqrt(height * width)
    x = (torch.arange(width, device=device) - (width - 1) / 2) / density
    y = (torch.arange(height, device=device) - (height - 1) / 2) / density
    return _Grid(x.repeat(height), y.repeat_interleave(width), width, height, density)


def _draw(indices: Tensor, labels: Tensor, seed: int, grid: _Grid) -> Tensor:
    """One chunk of images: (b,) indices and labels -> (b, 3, p) uint8."""
    light, tints, bands, shape, leaves, *lattices = _drawn(indices, seed)
    light, palette = _direction(light * 0.4 + 0.55), _palette(tints)
    grain, clouds = _noise(lattices, grid).unbind(1)
    x, y = grid.x + grain * 0.04, grid.y + clouds * 0.04
    canvas = _background(grid, clouds, palette)
    _paint_leaves(canvas, x, y, (_stripes(x, y, bands), grain), _leaves(leaves, palette, light, grid))
    _paint_shape(canvas, labels, shape, light, grid)
    return canvas.clamp_(0, 1).mul_(255).add_(0.5).to(torch.uint8)


def _drawn(indices: Tensor, seed: int) -> tuple[Tensor, ...]:
    """The numbers of the light, the tints, the bands, the shape, the leaves and each octave of noise: (b, count)."""
    counts = [1, 12, 3, 11, 10 * _LEAVES, *(2 * (cells + 1) ** 2 for cells, _ in _OCTAVES)]
    return _numbers(indices, seed, sum(counts)).split(counts, dim=1)


def _numbers(indices: Tensor, seed: int, count: int) -> Tensor:
    """Uniform in [0, 1): (b,) -> (b, count). Each of 53 bits makes two of the 24 that a float32 holds."""
    wide = uniform(seed, "synthetic", indices, (count + 1) // 2) * 2.0**24
    high = wide.floor()
    low = ((wide - high) * 2.0**24).floor()
    return (torch.cat([high, low], dim=1) * 2.0**-24).float()[:, :count]


def _direction(turn: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of an angle in turns, from a table."""
    place = (turn * _TURN).long()
    table = _COSINE.to(turn.device)
    return table[place.remainder(_TURN)], table[(place - _TURN // 4).remainder(_TURN)]


def _wave(t: Tensor) -> Tensor:
    """Nearly sin(2 pi t), from two parabolas."""
    t = t - t.round()
    return (1 - t.abs() * 2) * t * 8


def _noise(lattices: list[Tensor], grid: _Grid) -> Tensor:
    """Two fields of smooth noise around 0 from lattices, one an octave: (b, 2 (cells + 1)^2) uniform -> (b, 2, p)."""
    octaves = []
    for (cells, weight), lattice in zip(_OCTAVES, lattices, strict=True):
        values = ((lattice - 0.5) * (2 * weight)).view(-1, 2, cells + 1, cells + 1)
        # Columns before rows: the lattice is small while single numbers are picked, and whole rows are picked fast.
        for axis, pixels in ((3, grid.columns), (2, grid.rows)):
            place = (torch.arange(pixels, device=lattice.device) + 0.5) * (cells / pixels)
            cell = place.floor().long()
            part = place - cell
            ease = part * part * (3 - part * 2)
            low, high = values.index_select(axis, cell), values.index_select(axis, cell + 1)
            values = high.sub_(low).mul_(ease if axis == 3 else ease[:, None]).add_(low)
        octaves.append(values)
    coarse, *finer = octaves
    for octave in finer:
        coarse += octave
    return coarse.flatten(2)


def _color(bright: Tensor, warm: Tensor, green: Tensor) -> Tensor:
    """Colours from brightness and two opponent axes: three (...,) -> (..., 3)."""
    return torch.stack(
        [bright + warm * 0.6, bright + warm * 0.15 + green * 0.5, bright - warm * 0.75 - green * 0.2], -1
    )


def _palette(numbers: Tensor) -> Tensor:
    """Four tints that the leaves of a scene share: (b, 12) -> (b, 4, 3) of brightness, warmth and greenness."""
    return (numbers.view(-1, 4, 3) - 0.5) * torch.tensor([0.5, 0.6, 0.45], device=numbers.device)


def _stripes(x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:
    """Bands of one direction and period a scene: (b, p) in [-1, 1]."""
    cos, sin = _direction(numbers[:, :1])
    period = 0.1 + numbers[:, 1:2] * 0.15
    return _wave(x * (cos / period) + y * (sin / period) + numbers[:, 2:])


def _background(grid: _Grid, clouds: Tensor, palette: Tensor) -> Tensor:
    """A sky that darkens downwards, with clouds: (b, 3, p)."""
    bright, warm, green = palette[:, 0].unbind(1)
    top = _color(bright * 0.4 + 0.75, warm, green)[:, :, None]
    low = _color(bright * 0.4 + 0.35, warm, green)[:, :, None]
    return ((grid.y + 0.5) + clouds * 0.2)[:, None] * (low - top) + top


class _Leaves(NamedTuple):
    """Leaves from the farthest to the nearest, each field (k, b, 1) but the colour.

    A leaf's own coordinates are u = ux * x + uy * y + u0 and v alike; its edge lies where their norm is 1.
    """

    ux: Tensor
    uy: Tensor
    u0: Tensor
    vx: Tensor
    vy: Tensor
    v0: Tensor
    light_u: Tensor  # gain of brightness along u
    light_v: Tensor
    texture: Tensor  # contrast of its texture
    ambient: Tensor
    sharpness: Tensor  # slope of its edge over the squared norm, and what to add
    blur: Tensor
    reach: Tensor  # the same of the shadow that it casts around itself
    gloom: Tensor
    color: Tensor  # (k, b, 3, 1)


def _leaves(numbers: Tensor, palette: Tensor, light: tuple[Tensor, Tensor], grid: _Grid) -> _Leaves:
    """Sizes, poses and looks of the leaves of each scene, (b, 10 k) uniform numbers."""
    size, aspect, x, y, turn, bright, warm, green, texture, tint = numbers.view(-1, 10, _LEAVES).permute(1, 2, 0)
    least, most = (r**-2 for r in _RADII)
    radius = 1 / (least - size * (least - most)).sqrt()
    stretch = (1 + aspect * aspect * 2).sqrt()
    u_radius, v_radius = radius * stretch, radius / stretch
    cos, sin = _direction(turn)
    ux, uy, vx, vy = cos / u_radius, sin / u_radius, -sin / v_radius, cos / v_radius
    x, y = ((place - 0.5) * (side * 1.1) for place, side in zip((x, y), grid.extent, strict=True))
    lx, ly = (part[:, 0] * 0.22 for part in light)
    sharpness = radius * (grid.density * 0.65)
    reach = (v_radius * 4).clamp_(max=0.6)
    bases = palette.gather(1, (tint.T * 4).long()[:, :, None].expand(-1, -1, 3)).permute(2, 1, 0)
    color = _color(
        bases[0] + bright * 0.45 + 0.25, bases[1] + (warm - 0.5) * 0.2, bases[2] + (green - 0.5) * 0.2
    ).clamp_(0.03, 1)
    fields = (
        *(ux, uy, -(ux * x + uy * y), vx, vy, -(vx * x + vy * y)),
        *(lx * cos + ly * sin, ly * cos - lx * sin),
        *((texture * 0.5 - 0.2).clamp_(min=0), torch.full_like(size, 1.05)),
        *(sharpness, 0.5 - sharpness, reach, 0.6 - reach),
    )
    return _Leaves(*(field[:, :, None].contiguous() for field in fields), color[..., None])


def _paint_leaves(canvas: Tensor, x: Tensor, y: Tensor, fields: tuple[Tensor, ...], leaves: _Leaves) -> None:
    """Paint ellipses, and boxes for every fourth, over one another: canvas (b, 3, p), x, y and fields (b, p)."""
    # Written into the same few buffers leaf after leaf: fresh ones would cost more in page faults than the arithmetic.
    one, roundness = torch.tensor([1.0, 0.15], device=x.device)
    u, v, shade, spare = torch.empty(4, *x.shape, device=x.device)
    layer = torch.empty_like(canvas)
    for k, leaf in enumerate(map(_Leaves._make, zip(*leaves, strict=True))):
        torch.mul(x, leaf.ux, out=u).add_(torch.mul(y, leaf.uy, out=spare)).add_(leaf.u0)
        torch.mul(x, leaf.vx, out=v).add_(torch.mul(y, leaf.vy, out=spare)).add_(leaf.v0)
        torch.mul(u, leaf.light_u, out=shade).add_(torch.mul(v, leaf.light_v, out=spare))
        shade.add_(torch.mul(fields[k % len(fields)], leaf.texture, out=spare))
        # The squared norm is 1 at the edge of the leaf and grows there by 2 over the shorter radius.
        u.mul_(u), v.mul_(v)
        norm = torch.maximum(u, v, out=u) if k % 4 == 0 else u.add_(v)
        outside = torch.mul(norm, leaf.sharpness, out=v).add_(leaf.blur).clamp_(0, 1)
        shade.sub_(torch.mul(norm, roundness, out=spare)).add_(leaf.ambient).mul_(torch.sub(one, outside, out=spare))
        lit = torch.mul(norm, leaf.reach, out=u).add_(leaf.gloom).clamp_(max=1)
        canvas.mul_(lit.mul_(outside)[:, None])
        canvas.add_(torch.mul(leaf.color, shade[:, None], out=layer))


class _Shape(NamedTuple):
    """Where the labelled shapes lie."""

    depth: Tensor  # (b, p): above 0 inside, 0 at the edge
    dx: Tensor  # (b, p): from the middle of the shape
    dy: Tensor
    u: Tensor  # (b, p): along its first axis, in radii
    radius: Tensor  # (b, 1)


def _place(labels: Tensor, numbers: Tensor, grid: _Grid) -> _Shape:
    """The shapes of some labels (b,) at the size and pose that the first of (b, 11) uniform numbers tell."""
    size, x, y, turn, aspect = numbers[:, :5, None].unbind(1)
    side = min(grid.extent)
    radius = (0.17 + size * 0.07) * side
    room = (side - radius * 3.2).clamp_(min=0)
    dx, dy = grid.x - (x - 0.5) * room, grid.y - (y - 0.5) * room
    cos, sin = _direction(turn)
    stretch = (aspect * 0.7 + 0.7).sqrt()
    u = (dx * cos + dy * sin) * (stretch / radius)
    v = (dy * cos - dx * sin) / (stretch * radius)
    depth = torch.empty_like(u)
    for label, shape in enumerate(SHAPES.values()):
        rows = (labels == label).nonzero()[:, 0]
        depth[rows] = -shape(u[rows], v[rows])
    return _Shape(depth, dx, dy, u, radius)


def _paint_shape(canvas: Tensor, labels: Tensor, numbers: Tensor, light: tuple[Tensor, Tensor], grid: _Grid) -> None:
    """Paint the labelled shape over everything else: canvas (b, 3, p), (b, 11) uniform numbers."""
    period, phase, contrast, hue, bright, chroma = numbers[:, 5:, None].unbind(1)
    depth, dx, dy, u, radius = _place(labels, numbers, grid)
    lx, ly = light
    stripes = _wave(u * (period + 0.8) + phase) * (contrast * 0.5 - 0.25).clamp_(min=0)
    shade = (dx * lx + dy * ly) * (0.25 / radius) + stripes + (depth * 3).clamp_(0, 1) * 0.25 + 0.85
    cover = (depth * (radius * grid.density) + 0.5).clamp_(0, 1)
    lit = (0.4 - depth * (radius * 8)).clamp_(0.4, 1)
    rainbow = torch.cat([_direction(hue + third / 3)[0] for third in range(3)], dim=1)
    color = (rainbow * (chroma * 0.3 + 0.1) + (bright * 0.5 + 0.25)).clamp_(0.03, 1)
    canvas *= ((1 - cover) * lit)[:, None]
    canvas += color[:, :, None] * (shade * cover)[:, None]
