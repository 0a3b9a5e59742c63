"""Analyse an encoder on some images: figures, numbers, and lines for the console.

A line reports an analysis that does not apply to the encoder, such as the filters of a hybrid or the embeddings of
relative positions.

Shapes use b images, l layers, h heads, n patches, c channels.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from ssvit.analysis import attention, filters, positions
from ssvit.data.batch import EvalTransform
from ssvit.data.loader import Loading, evaluation_batches
from ssvit.data.sources.base import Source, Unreadable, caption
from ssvit.engine import atomic_io
from ssvit.errors import UserError, print_lines
from ssvit.figures.base import Figure
from ssvit.figures.display import Display
from ssvit.figures.style import evenly_spaced
from ssvit.models.vit import ViT


def device_of(name: str) -> str:
    """Return the device of an analysis: for auto, cuda if it is available and otherwise cpu; or the name."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Pictures:
    """Store transformed images (b, c, h, w) uint8, their names, and their labels, (b,) or (b, classes), or None."""

    images: Tensor
    names: tuple[str, ...]
    labels: Tensor | None = None

    def some(self, count: int) -> "Pictures":
        """Return at most `count` of the images, evenly spaced."""
        places = evenly_spaced(len(self.images), count)
        return Pictures(self.images[places], tuple(self.names[place] for place in places))


def read_pictures(
    source: Source, transform: EvalTransform, count: int, *, batch_size: int, **loading: Unpack[Loading]
) -> Pictures:
    """Read a fixed sample of the images of a source, named by their class or, if it is unknown, by their file.

    Unreadable files are printed and skipped.

    Args:
        source: Images.
        transform: Transform of the evaluation.
        count: Maximum number of images.
        batch_size: Batch size, see `evaluation_batches`.
        **loading: Further options of `evaluation_batches`.

    Raises:
        UserError: If no image is readable.
    """

    def report(opened: int, failures: list[Unreadable]) -> None:
        print_lines(*(f"{failure}; skipped" for failure in failures))

    batches = list(evaluation_batches(source, transform, batch_size=batch_size, limit=count, report=report, **loading))
    if not batches:
        raise UserError("none of the images can be read; name readable pictures after the options")
    places = torch.cat([batch.slots for batch in batches])
    labels = None if source.labels is None else source.labels[places]
    names = tuple(caption(source, place) for place in places.tolist())
    return Pictures(torch.cat([batch.images for batch in batches]), names, labels)


@dataclass
class Report:
    """Collect figures by name, numbers for JSON, and lines for the console."""

    figures: dict[str, Figure] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def save(self, folder: Path) -> list[Path]:
        """Write figures and numbers.json atomically, and return their paths.

        Raises:
            UserError: If the files cannot be written.
        """
        files = {f"{name}.png": figure.png() for name, figure in self.figures.items()}
        return atomic_io.write_files(folder, files | {"numbers.json": (json.dumps(self.numbers) + "\n").encode()})


def analyse(
    encoder: ViT, pictures: Pictures, *, layer: int, pooling: str, shown: int, batch_size: int, display: Display
) -> Report:
    """Analyse an encoder in eval mode on some images.

    Args:
        encoder: The encoder.
        pictures: The images.
        layer: Layer whose heads are plotted, counted from 1.
        pooling: Pooling of the attention maps, see `attention.attention_to_patches`.
        shown: Number of images whose attention is plotted.
        batch_size: Batch size.
        display: Conversion to RGB images.
    """
    grid, sides = encoder.grid, "x".join(map(str, encoder.image_size))
    numbers = {"images": len(pictures.images), "image_size": encoder.image_size, "patch_size": encoder.patch_size}
    report = Report(numbers=numbers | {"grid": grid, "filters": None, "positions": None})
    report.lines.append(f"{len(pictures.images)} images of {sides} pixels, {grid[0]}x{grid[1]} patches")
    try:
        components = filters.components(filters.filters(encoder))
        shares = components.shares
        report.figures["filters"] = filters.plot(components, display)
        report.numbers["filters"] = {"components": len(shares), "shares_of_variance": shares.tolist()}
        variance = f"{100 * shares.sum():.1f} % of their variance"
        report.lines.append(f"filters: the first {len(shares)} principal components have {variance}")
    except UserError as reason:
        report.lines.append(str(reason))
    try:
        cosines = positions.similarity(encoder).cpu()
        report.figures["positions"] = positions.plot(cosines, grid)
        report.numbers["positions"] = {"cosine": cosines.tolist()}
    except UserError as reason:
        report.lines.append(str(reason))
    _add_distances(report, encoder, pictures.images, batch_size)
    _add_maps(report, encoder, pictures.some(shown), layer, pooling, display)
    return report


def _add_distances(report: Report, encoder: ViT, images: Tensor, batch_size: int) -> None:
    """Add the mean attention distance of each head, (l, h) in pixels."""
    distances = attention.mean_distances(encoder, images, batch_size)
    uniform = attention.patch_distances(encoder).mean().item()
    report.figures["attention_distance"] = attention.plot_distances(distances, uniform)
    report.numbers["attention_distance"] = {
        "unit": "pixels between patch centres, without prefix tokens",
        "uniform_attention": uniform,
        "layers_by_heads": distances.tolist(),
    }
    ends = ", ".join(
        f"layer {layer + 1} {heads.mean():.2f} pixels (heads {heads.min():.2f} to {heads.max():.2f})"
        for layer, heads in {end: distances[end] for end in (0, len(distances) - 1)}.items()
    )
    report.lines.append(f"mean attention distance: {ends}; uniform attention {uniform:.2f} pixels")


@torch.no_grad()
def _add_maps(report: Report, encoder: ViT, pictures: Pictures, layer: int, pooling: str, display: Display) -> None:
    rollout: Tensor | None = None
    heads: Tensor | None = None
    tokens = encoder.num_prefix_tokens, pooling, encoder.options.class_tokens

    def add(number: int, weights: Tensor) -> None:
        nonlocal rollout, heads
        rollout = attention.extend_rollout(rollout, weights)
        if number + 1 == layer:
            heads = attention.attention_to_patches(weights, *tokens).cpu()

    with attention.attention_hooks(encoder, add):
        encoder(pictures.images.to(encoder.mean.device))
    assert rollout is not None
    assert heads is not None  # because `layer` is at most the depth
    whole = attention.attention_to_patches(rollout, *tokens).cpu()
    images = display(pictures.images)
    by_head = {f"head {number}": of_head for number, of_head in enumerate(heads.unbind(1), start=1)}
    maps = {"rollout": ({"attention": whole}, ""), "heads": (by_head, f"layer {layer}")}
    for name, (of_images, title) in maps.items():
        report.figures[name] = attention.plot_maps(images, pictures.names, of_images, encoder.grid, title)
    shared = {"pooling": pooling, "images": pictures.names}
    report.numbers["rollout"] = {**shared, "attention": whole.tolist()}
    report.numbers["heads"] = {**shared, "layer": layer, "attention": heads.tolist()}
