"""Measure the inductive biases of encoders: consistency under changes of the images, and receptive fields.

Shapes use b, n images, c channels, h, w pixels, p side of a patch, y, x rows and columns of patches, d width, l layers.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ssvit.analysis import attention
from ssvit.analysis.inside import Pictures
from ssvit.engine.randomness import uniform
from ssvit.figures.plot import Level, Line, Panel, Plot
from ssvit.models.encoder import Encoder, scaled
from ssvit.models.vit import ViT

_DIRECTIONS = (0, 1), (0, -1), (1, 0), (-1, 0)


def translated(images: Tensor, down: int, right: int) -> Tensor:
    """Translate images (b, c, h, w) by less than their sides; pixels that enter at a border are reflected there."""

    def places(side: int, shift: int) -> Tensor:
        places = (torch.arange(side) - shift).abs()
        return torch.minimum(places, 2 * (side - 1) - places)

    return images[:, :, places(images.shape[2], down)][..., places(images.shape[3], right)]


def shuffled(images: Tensor, patch_size: int, seed: int) -> Tensor:
    """Permute the patches of each image (b, c, h, w) at random, as a function of the seed and of its index."""
    sizes = {"p": patch_size, "q": patch_size}
    patches = rearrange(images, "b c (y p) (x q) -> b (y x) c p q", **sizes)
    rows = torch.arange(len(images))
    order = uniform(seed, "shuffled patches", rows, patches.shape[1]).argsort(1)
    rearranged = patches[rows[:, None], order]
    return rearrange(rearranged, "b (y x) c p q -> b c (y p) (x q)", y=images.shape[2] // patch_size, **sizes)


def changes(images: Tensor, patch_size: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield changed copies of images (b, c, h, w) with the name of the change.

    These are translations in four directions, (4 b, c, h, w), named "1 px" and so on, and "shuffled", (b, c, h, w).
    """
    for shift in range(1, patch_size + 1):
        yield f"{shift} px", torch.cat([translated(images, shift * y, shift * x) for y, x in _DIRECTIONS])
    yield "shuffled", shuffled(images, patch_size, seed)


@dataclass(frozen=True)
class Biases:
    """Store the inductive biases of an encoder.

    Attributes:
        cosine: Mean cosine similarity of the features of an image and its changed copy, by name of the change. The mean
            feature of the training images is subtracted, so that about 0 is expected for two different images.
        changed: Fraction of the images whose prediction changes, by name of the change; empty without labels. The
            prediction is the class whose mean feature of the training images is nearest.
        accuracy: Accuracy of the predictions for the unchanged images; None without labels.
        receptive_field: `extent` of the receptive field of each layer, in pixels.
        attention_distance: Mean attention distance of each layer in pixels; empty for an encoder other than a ViT.
    """

    cosine: dict[str, float]
    changed: dict[str, float]
    accuracy: float | None
    receptive_field: list[float]
    attention_distance: list[float]


@torch.no_grad()
def measure(
    encoder: Encoder,
    train: Pictures,
    pictures: Pictures,
    *,
    patch_size: int,
    batch_size: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Biases:
    """Measure the inductive biases of an encoder in eval mode.

    Args:
        encoder: The encoder.
        train: Training images, for the means of the features and of the features of each class.
        pictures: Images that are changed.
        patch_size: Side of the patches that are shuffled, and maximum of the translations, in pixels.
        batch_size: Batch size.
        seed: Seed of the permutations of patches.
        progress: Called after each batch with the numbers of processed and of all images, changed copies included.
    """
    total = len(train.images) + len(pictures.images) * (2 + len(_DIRECTIONS) * patch_size)
    done = 0

    def features(images: Tensor) -> Tensor:
        nonlocal done
        values = []
        for part in images.split(batch_size):
            values.append(encoder.represent(part.to(encoder.mean.device)).cpu())
            done += len(part)
            if progress:
                progress(done, total)
        return torch.cat(values).double()

    images, of_train, unchanged = pictures.images, features(train.images), features(pictures.images)
    labels = None if train.labels is None or train.labels.ndim > 1 else train.labels
    classes, numbers = (torch.zeros(len(of_train)) if labels is None else labels).unique(return_inverse=True)
    means = torch.stack([of_train[numbers == number].mean(0) for number in range(len(classes))])
    predicted, mean = torch.cdist(unchanged, means).argmin(1), of_train.mean(0)
    cosine, changed, accuracy = {}, {}, None
    for name, altered in changes(images, patch_size, seed):
        after = features(altered).unflatten(0, (-1, len(images)))
        cosine[name] = F.cosine_similarity(after - mean, unchanged - mean, dim=-1).mean().item()
        if labels is not None:
            changed[name] = torch.cdist(after, means).argmin(-1).ne(predicted).double().mean().item()
    if labels is not None and pictures.labels is not None:
        accuracy = classes[predicted].eq(pictures.labels).double().mean().item()
    fields = [extent(field) for field in receptive_fields(encoder, images, batch_size)]
    heads = attention.mean_distances(encoder, images, batch_size) if isinstance(encoder, ViT) else torch.empty(0, 1)
    return Biases(cosine, changed, accuracy, fields, heads.mean(1).tolist())


@torch.enable_grad()
def receptive_fields(encoder: Encoder, images: Tensor, batch_size: int) -> Tensor:
    """Return the effective receptive field of the central feature of each layer (Luo et al. 2016).

    It is the gradient of the sum of the feature's channels with respect to the pixels: its absolute value, summed over
    the channels of the image and averaged over images.

    Args:
        encoder: The encoder in eval mode.
        images: Images, (n, c, h, w), uint8 or in [0, 1].
        batch_size: Batch size.

    Returns:
        Fields, (l, h, w) float64.

    Raises:
        UserError: The encoder has no feature maps.
    """
    sums = []
    for part in images.split(batch_size):
        pixels = scaled(part.to(encoder.mean.device)).requires_grad_()
        centres = [map_[:, map_.shape[1] // 2, map_.shape[2] // 2].sum() for map_ in encoder.maps(pixels)]
        gradients = [torch.autograd.grad(centre, pixels, retain_graph=True)[0] for centre in centres]
        sums.append(torch.stack([gradient.abs().double().sum((0, 1)).cpu() for gradient in gradients]))
    return torch.stack(sums).sum(0) / len(images)


def extent(field: Tensor) -> float:
    """Return the mean distance of the pixels of a receptive field (h, w) from its centroid, weighted by the field."""
    places = torch.cartesian_prod(*map(torch.arange, field.shape)).to(field)
    weights = field.flatten()[:, None] / field.sum()
    return ((places - (weights * places).sum(0)).norm(dim=1) @ weights).item()


def bias_table(biases: Mapping[str, Biases]) -> list[list[str]]:
    """Return the rows of a table of encoders, with a header: cosine and changed predictions of some of the changes."""
    names = [*next(iter(biases.values())).cosine]
    names = [*dict.fromkeys([names[0], *names[-2:]])]
    rows = [["cosine, changed predictions", "accuracy", *names, "receptive field (pixels)", "attention (pixels)"]]
    for encoder, of_encoder in biases.items():
        accuracy = "-" if of_encoder.accuracy is None else f"{100 * of_encoder.accuracy:.1f} %"
        changed = {name: f", {100 * share:.1f} %" for name, share in of_encoder.changed.items()}
        changes = [f"{of_encoder.cosine[name]:.3f}{changed.get(name, '')}" for name in names]
        layers = of_encoder.receptive_field, of_encoder.attention_distance
        ends = [f"{values[0]:.1f} to {values[-1]:.1f}" if values else "-" for values in layers]
        rows.append([encoder, accuracy, *changes, *ends])
    return rows


def plot(biases: Mapping[str, Biases], uniform: float) -> Plot:
    """Plot consistency over translations, and receptive fields and attention distances over layers.

    Args:
        biases: Biases by name of the encoder.
        uniform: Extent of a receptive field of all pixels equally.
    """
    level = Level(uniform, "receptive field of all pixels equally", form="{:.1f}")
    lines: tuple[list[Line], ...] = [], [], []
    for index, (name, of_encoder) in enumerate(biases.items()):
        color = f"C{index % 10}"
        for panel, values in ((lines[0], of_encoder.cosine), (lines[1], of_encoder.changed)):
            if values:
                *translations, last = values.values()
                panel.append(Line(range(1, len(values)), translations, f"{name} (shuffled: {last:.2f})", color))
        fields = (of_encoder.receptive_field, "", "-"), (of_encoder.attention_distance, ": attention distance", ":")
        for layers, kind, dash in fields:
            depths = [layer / len(layers) for layer in range(1, len(layers) + 1)]
            lines[2].append(Line(depths, layers, f"{name}{kind}", color, dash))
    panels = [
        Panel("cosine of centred features", lines[0], xlabel="translation (pixels)", xticks=lines[0][0].x),
        Panel("fraction of changed predictions", lines[1], xlabel="translation (pixels)", xticks=lines[0][0].x),
        Panel("receptive field: mean distance (pixels)", lines[2], [level], "layer / number of layers"),
    ]
    return Plot([panel for panel in panels if panel.lines], (15, 6), legend="under")
