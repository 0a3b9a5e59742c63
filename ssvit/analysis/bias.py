"""Measure the inductive biases of encoders: consistency under changes of the images, and receptive fields.

Shapes use b, n images, c channels, h, w pixels, p side of a patch, y, x rows and columns of patches, d width, l layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ssvit.analysis import attention
from ssvit.analysis.inside import Pictures
from ssvit.figures.plot import Level, Line, Panel, Plot
from ssvit.models.encoder import Encoder, scaled
from ssvit.models.vit import ViT
from ssvit.randomness import uniform

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


class NearestMean:
    """Classify features, (n, d), by the nearest mean of the training features of a class.

    Args:
        features: Training features, (n, d).
        labels: Their classes, (n,).
    """

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.classes = labels.unique()
        self.means = torch.stack([features[labels == number].mean(0) for number in self.classes])

    def __call__(self, features: Tensor) -> Tensor:
        """Return the classes of features, (n,)."""
        return self.classes[torch.cdist(features, self.means).argmin(1)]


@dataclass(frozen=True)
class Consistency:
    """Compare the features of changed images with those of the unchanged images.

    Attributes:
        cosine: Mean cosine similarity of the features of an image and its changed copy, after subtraction of the mean
            feature of the training images, so that about 0 is expected for two different images.
        changed: Fraction of the images whose nearest class mean of the training features differs; None without labels.
    """

    cosine: float
    changed: float | None


@dataclass(frozen=True)
class Biases:
    """Store the inductive biases of an encoder.

    Attributes:
        translation: Consistency under a translation by 1, 2, … pixels, averaged over the four directions.
        shuffling: Consistency under a permutation of the patches.
        accuracy: Fraction of the unchanged images whose nearest class mean is that of their class; None without labels.
        receptive_field: `extent` of the receptive field of each layer, in pixels.
        attention_distance: Mean attention distance of each layer in pixels; None for an encoder other than a ViT.
    """

    translation: list[Consistency]
    shuffling: Consistency
    accuracy: float | None
    receptive_field: list[float]
    attention_distance: list[float] | None


@torch.no_grad()
def measure(
    encoder: Encoder, train: Pictures, pictures: Pictures, *, patch_size: int, batch_size: int, seed: int
) -> Biases:
    """Measure the inductive biases of an encoder in eval mode.

    Args:
        encoder: The encoder.
        train: Training images, for the means of the features and of the features of each class.
        pictures: Images that are changed.
        patch_size: Side of the patches that are shuffled, and maximum of the translations, in pixels.
        batch_size: Batch size.
        seed: Seed of the permutations of patches.
    """

    def features(images: Tensor) -> Tensor:
        parts = images.split(batch_size)
        return torch.cat([encoder.represent(part.to(encoder.mean.device)).cpu() for part in parts]).double()

    of_train, images, labels = features(train.images), pictures.images, train.labels
    mean, before = of_train.mean(0), features(images)
    classify = None if labels is None or labels.ndim > 1 else NearestMean(of_train, labels)

    def consistency(*changes: Tensor) -> Consistency:
        after, repeated = torch.cat([features(changed) for changed in changes]), before.repeat(len(changes), 1)
        cosine = F.cosine_similarity(after - mean, repeated - mean).mean().item()
        if classify is None:
            return Consistency(cosine, None)
        return Consistency(cosine, classify(after).ne(classify(repeated)).double().mean().item())

    accuracy = None
    if classify and pictures.labels is not None:
        accuracy = classify(before).eq(pictures.labels).double().mean().item()
    return Biases(
        [
            consistency(*(translated(images, shift * down, shift * right) for down, right in _DIRECTIONS))
            for shift in range(1, patch_size + 1)
        ],
        consistency(shuffled(images, patch_size, seed)),
        accuracy,
        [extent(field) for field in receptive_fields(encoder, images, batch_size)],
        attention.mean_distances(encoder, images, batch_size).mean(1).tolist() if isinstance(encoder, ViT) else None,
    )


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
        centres = [
            of_layer[:, of_layer.shape[1] // 2, of_layer.shape[2] // 2].sum() for of_layer in encoder.maps(pixels)
        ]
        gradients = [torch.autograd.grad(centre, pixels, retain_graph=True)[0] for centre in centres]
        sums.append(torch.stack([gradient.abs().double().sum((0, 1)).cpu() for gradient in gradients]))
    return torch.stack(sums).sum(0) / len(images)


def extent(field: Tensor) -> float:
    """Return the mean distance of the pixels of a receptive field (h, w) from its centroid, weighted by the field."""
    places = torch.cartesian_prod(*map(torch.arange, field.shape)).to(field)
    weights = field.flatten()[:, None] / field.sum()
    return ((places - (weights * places).sum(0)).norm(dim=1) @ weights).item()


def table(biases: Mapping[str, Biases]) -> list[list[str]]:
    """Return the rows of a table of encoders, with a header."""

    def percent(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.1f} %"

    def pixels(layers: list[float] | None) -> str:
        return "-" if layers is None else f"{layers[0]:.1f} to {layers[-1]:.1f}"

    shifts = len(next(iter(biases.values())).translation)
    cosines = (f"{change}: cosine" for change in ("1 px", f"{shifts} px", "shuffled"))
    header = ["", "accuracy", *(title for cosine in cosines for title in (cosine, "changed"))]
    rows = [[*header, "receptive field (px)", "attention (px)"]]
    for name, of_encoder in biases.items():
        row = [name, percent(of_encoder.accuracy)]
        for change in (of_encoder.translation[0], of_encoder.translation[-1], of_encoder.shuffling):
            row += [f"{change.cosine:.3f}", percent(change.changed)]
        rows.append([*row, pixels(of_encoder.receptive_field), pixels(of_encoder.attention_distance)])
    return rows


def plot(biases: Mapping[str, Biases], uniform: float) -> Plot:
    """Plot consistency over translations, and receptive fields and attention distances over layers.

    Args:
        biases: Biases by name of the encoder.
        uniform: Extent of a receptive field of all pixels equally.
    """
    cosines, changes, fields = [], [], []
    for index, (name, of_encoder) in enumerate(biases.items()):
        color, shifts = f"C{index % 10}", range(1, len(of_encoder.translation) + 1)
        label = f"{name} (shuffled: {{}})"
        values = [change.cosine for change in of_encoder.translation]
        cosines.append(Line(shifts, values, label.format(f"{of_encoder.shuffling.cosine:.2f}"), color))
        if of_encoder.shuffling.changed is not None:
            values = [100 * (change.changed or 0) for change in of_encoder.translation]
            changes.append(Line(shifts, values, label.format(f"{100 * of_encoder.shuffling.changed:.0f} %"), color))
        for layers, kind, dash in (
            (of_encoder.receptive_field, "", "-"),
            (of_encoder.attention_distance or [], ": attention distance", ":"),
        ):
            depths = [(layer + 1) / len(layers) for layer in range(len(layers))]
            fields.append(Line(depths, layers, f"{name}{kind}", color, dash))
    whole = Level(uniform, "receptive field of all pixels equally", form="{:.1f}")
    panels = [
        Panel("cosine of centred features", cosines, xlabel="translation (pixels)", xticks=shifts),
        Panel("changed predictions (%)", changes, xlabel="translation (pixels)", xticks=shifts),
        Panel("receptive field (mean distance in pixels)", fields, [whole], xlabel="layer / number of layers"),
    ]
    return Plot(panels, (15, 6), legend="under")
