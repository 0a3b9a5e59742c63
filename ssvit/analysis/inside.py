"""Analyse one or two encoders on some images: figures, numbers, and lines for the console.

A line reports an analysis that does not apply to the encoder, such as the filters of a hybrid or the embeddings of
relative positions.

Shapes use b images, l layers, h heads, n patches, c channels.
"""

import io
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ssvit import atomic_io
from ssvit.analysis import attention, filters, positions, similarity
from ssvit.data.batch import EvalTransform
from ssvit.data.decode import load
from ssvit.data.decode_options import RGB, PixelFormat
from ssvit.data.loader import Loading, evaluation_batches
from ssvit.data.sources.base import Source, Unreadable, class_text
from ssvit.figures.base import Figure
from ssvit.figures.display import Display
from ssvit.figures.style import evenly_spaced
from ssvit.models.vit import ViT
from ssvit.options import UserError

_DIGITS = 5


@dataclass(frozen=True)
class Pictures:
    """Store transformed images (b, c, h, w) uint8, their names, and a description of the set."""

    images: Tensor
    names: tuple[str, ...]
    description: str

    def some(self, count: int) -> "Pictures":
        """Return at most `count` of the images, evenly spaced."""
        places = evenly_spaced(len(self.images), count)
        return Pictures(self.images[places], tuple(self.names[place] for place in places), self.description)


def held_out(
    source: Source, view: EvalTransform, count: int, *, batch_size: int, **loading: Unpack[Loading]
) -> Pictures:
    """Read a fixed sample of the images of a source, named by their class if it is known.

    Args:
        source: Images.
        view: Transform of the evaluation.
        count: Maximum number of images.
        batch_size: Batch size, see `evaluation_batches`.
        **loading: Further options of `evaluation_batches`.

    Raises:
        UserError: If no image is readable.
    """
    batches = list(evaluation_batches(source, view, batch_size=batch_size, limit=count, **loading))
    if not batches:
        raise UserError("none of the held-out images can be read; name pictures of your own after the options")
    places = torch.cat([batch.slots for batch in batches])
    names = (
        [""] * len(places)
        if source.labels is None
        else [class_text(label, source.classes) for label in source.labels[places]]
    )
    return Pictures(torch.cat([batch.images for batch in batches]), tuple(names), f"{len(places)} held-out images")


def from_files(
    paths: Sequence[str], view: EvalTransform, count: int, say: Callable[[str], None], pixels: PixelFormat = RGB
) -> Pictures:
    """Read at most `count` image files, evenly spaced; unreadable files are replaced by further ones.

    Args:
        paths: Paths of the files.
        view: Transform of the evaluation.
        count: Maximum number of images.
        say: Called with a message for each unreadable file.
        pixels: Pixel format of the encoder.

    Raises:
        UserError: If no file is readable.
    """
    images: dict[int, Tensor] = {}  # by index in `paths`
    left = list(range(len(paths)))
    while left and len(images) < count:
        chosen = {left[place] for place in evenly_spaced(len(left), count - len(images))}
        for place in sorted(chosen):
            try:
                images[place] = view([load(paths[place], None, pixels)])
            except Unreadable as failure:
                say(f"{failure}; left out")
        left = [place for place in left if place not in chosen]
    if not images:
        raise UserError(f"none of the {len(paths)} pictures can be read")
    of = f" of {len(paths)}" if len(paths) > len(images) else ""
    names = tuple(Path(paths[place]).name for place in sorted(images))
    return Pictures(torch.cat([images[place] for place in sorted(images)]), names, f"{len(images)}{of} pictures")


@dataclass
class Report:
    """Collect figures by name, numbers for JSON, and lines for the console."""

    figures: dict[str, Figure] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def save(self, folder: Path, step: int) -> list[Path]:
        """Write figures, numbers.json and a TensorBoard file atomically.

        Args:
            folder: Folder of the files.
            step: Step of the checkpoint, for TensorBoard.

        Returns:
            Paths of the figures and of numbers.json.

        Raises:
            UserError: If the files cannot be written.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import image

        # The writer of TensorBoard uses a thread, whose failure on a full disk would block the main thread.
        events = io.BytesIO()
        board = RecordWriter(events)
        board.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        files = {}
        for name, figure in self.figures.items():
            files[f"{name}.png"] = data = figure.png()
            with Image.open(io.BytesIO(data)) as picture:
                summary = image(name, np.asarray(picture.convert("RGB")), dataformats="HWC")
            board.write(Event(wall_time=time.time(), step=step, summary=summary).SerializeToString())
        for_board = f"events.out.tfevents.{step:010d}.visualize"
        files |= {for_board: events.getvalue(), "numbers.json": (json.dumps(self.numbers) + "\n").encode()}
        return [path for path in atomic_io.write_files(folder, files) if path.name != for_board]


def look(
    encoder: ViT,
    pictures: Pictures,
    *,
    layer: int,
    pooling: str,
    shown: int,
    batch_size: int,
    display: Display,
    other: tuple[str, ViT] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Analyse an encoder in eval mode on some images.

    Args:
        encoder: The encoder.
        pictures: The images.
        layer: Layer whose heads are plotted, counted from 1.
        pooling: Pooling of the attention maps, see `attention.over_patches`.
        shown: Number of images whose attention is plotted.
        batch_size: Batch size, 8 or more.
        display: Conversion to RGB images.
        other: Name of a second encoder with the same image size, and that encoder, for comparison.
        progress: Called with the numbers of processed and of all images.
    """
    grid, sides = encoder.grid, "x".join(map(str, encoder.image_size))
    numbers = {"images": len(pictures.images), "image_size": encoder.image_size, "patch_size": encoder.patch_size}
    report = Report(numbers=numbers | {"grid": grid, "filters": None, "positions": None})
    report.lines.append(f"{pictures.description} of {sides} pixels, {grid[0]}x{grid[1]} patches")
    for add in (partial(_add_filters, display=display), _add_positions):
        try:
            add(report, encoder)
        except UserError as reason:
            report.lines.append(str(reason))
    encoders = {"the encoder": encoder, **(dict([other]) if other else {})}
    distances, alignment = measure(list(encoders.values()), pictures.images, batch_size, progress)
    _add_distances(report, encoder, dict(zip(encoders, distances, strict=True)))
    _add_similarity(report, alignment, len(encoder.blocks), other[0] if other else "")
    _add_maps(report, encoder, pictures.some(shown), layer, pooling, display)
    return report


def _add_filters(report: Report, encoder: ViT, display: Display) -> None:
    found = filters.components(filters.filters(encoder))
    count, share = len(found.shares), f"{100 * found.shares.sum():.1f} % of their variance"
    report.figures["filters"] = filters.plot(found, display)
    report.numbers["filters"] = {"components": count, "shares_of_variance": _plain(found.shares)}
    report.lines.append(f"filters: the first {count} principal components have {share}")


def _add_positions(report: Report, encoder: ViT) -> None:
    found = positions.similarity(encoder).cpu()
    report.figures["positions"] = positions.plot(found, encoder.grid)
    report.numbers["positions"] = {"cosine": _plain(found)}


@torch.no_grad()
def measure(
    encoders: Sequence[ViT], images: Tensor, batch_size: int, progress: Callable[[int, int], None] | None = None
) -> tuple[list[Tensor], Tensor | None]:
    """Return the mean attention distances of each encoder, and the similarity of the layers of all encoders.

    Args:
        encoders: The encoders.
        images: Images, (b, c, h, w) uint8.
        batch_size: Batch size, 8 or more.
        progress: Called with the numbers of processed and of all images.

    Returns:
        Distances of each encoder, (l, h) in pixels, and the linear CKA of the layers of all encoders, concatenated,
        which
        is None for fewer than `similarity.FEWEST` images.
    """
    between = [attention.between_patches(encoder) for encoder in encoders]
    sums = [torch.zeros(len(encoder.blocks), encoder.blocks[0].attention.heads).double() for encoder in encoders]
    layers = sum(map(len, sums))
    independence, done = torch.zeros(layers, layers).double(), 0
    enough = len(images) >= similarity.FEWEST
    # Batches differ in size by at most one image, so that none is too small.
    for part in images.tensor_split(math.ceil(len(images) / batch_size)):
        grams = []
        for encoder, apart, own in zip(encoders, between, sums, strict=True):

            def see(layer: int, weights: Tensor, own: Tensor = own, apart: Tensor = apart) -> None:
                own[layer] += attention.mean_distance(weights, apart).sum(0).cpu()

            with attention.watched(encoder, see):
                grams += [similarity.gram(tokens) for tokens in encoder.layers(part.to(encoder.mean.device))]
        if enough:
            independence += similarity.hsic(torch.stack(grams)).cpu()
        done += len(part)
        if progress:
            progress(done, len(images))
    return [own / len(images) for own in sums], similarity.cka(independence) if enough else None


def _add_distances(report: Report, encoder: ViT, found: dict[str, Tensor]) -> None:
    uniform = attention.between_patches(encoder).mean().item()
    report.figures["attention_distance"] = attention.plot_distances(found, uniform)
    report.numbers["attention_distance"] = {
        "unit": "pixels between patch centres, prefix tokens left out",
        "all_patches_alike": uniform,
        "layers_by_heads": {name: _plain(distances) for name, distances in found.items()},
    }
    for name, distances in found.items():
        ends = ", ".join(
            f"layer {layer + 1} {heads.mean():.2f} pixels (heads {heads.min():.2f} to {heads.max():.2f})"
            for layer, heads in {end: distances[end] for end in (0, len(distances) - 1)}.items()
        )
        report.lines.append(f"mean attention distance of {name}: {ends}")
    report.lines.append(f"mean attention distance if all patches were alike: {uniform:.2f} pixels")


def _add_similarity(report: Report, alignment: Tensor | None, layers: int, other: str) -> None:
    report.numbers["cka"] = None
    if alignment is None:
        report.lines.append(f"similarity: not available of fewer than {similarity.FEWEST} images")
        return
    report.figures["similarity"] = similarity.plot(alignment, layers, other)
    within, across = alignment[:layers, :layers], alignment[:layers, layers:]
    report.numbers["cka"] = {"layers": _plain(within)}
    report.lines.append(f"similarity of the first and the last layer (linear CKA): {within[0, -1]:.3f}")
    if not other:
        return
    report.numbers["cka"] |= {"other": other, "layers_by_layers_of_other": _plain(across)}
    if across.shape[0] != across.shape[1]:
        report.lines.append(f"similarity with {other}: it has another depth, so no layer has its like")
        return
    same = across.diagonal()
    report.numbers["cka"]["same_layer"] = _plain(same)
    values = " ".join(f"{value:.3f}" for value in same.tolist())
    least = same.nan_to_num(1).argmin().item() + 1
    report.lines.append(f"similarity with {other}, layer by layer: {values}; layer {least} differs most")


@torch.no_grad()
def _add_maps(report: Report, encoder: ViT, pictures: Pictures, layer: int, pooling: str, display: Display) -> None:
    rollout: Tensor | None = None
    heads: Tensor | None = None

    def see(number: int, weights: Tensor) -> None:
        nonlocal rollout, heads
        rollout = attention.rolled(rollout, weights)
        if number + 1 == layer:
            heads = attention.over_patches(weights, encoder.num_prefix_tokens, pooling).cpu()

    with attention.watched(encoder, see):
        encoder(pictures.images.to(encoder.mean.device))
    assert rollout is not None
    assert heads is not None  # because `layer` is at most the depth
    whole = attention.over_patches(rollout, encoder.num_prefix_tokens, pooling).cpu()
    images = display(pictures.images)
    by_head = {f"head {number}": one for number, one in enumerate(heads.unbind(1), start=1)}
    maps = {"rollout": {"attention": whole}, "heads": by_head}
    for (name, of_images), title in zip(maps.items(), ("", f"layer {layer}"), strict=True):
        report.figures[name] = attention.plot_maps(images, pictures.names, of_images, encoder.grid, title)
    shared = {"pooling": pooling, "images": pictures.names}
    report.numbers["rollout"] = {**shared, "attention": _plain(whole)}
    report.numbers["heads"] = {**shared, "layer": layer, "attention": _plain(heads)}


def _plain(numbers: Tensor) -> Any:
    """Return nested lists for JSON, with None for NaN."""
    rounded = np.round(numbers.double().cpu().numpy(), _DIGITS).astype(object)
    rounded[numbers.isnan().cpu().numpy()] = None
    return rounded.tolist()
