"""Describe the figures of a report: scores by encoder, layer and column, and images with neighbours or masks.

Shapes use b, m images, y, x rows and columns of patches, d width, k classes.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.sources.base import class_text
from ssvit.evaluation.baselines import PIXELS, RANDOM_PREFIX
from ssvit.evaluation.duplicates import Pair
from ssvit.evaluation.neighbours import relative_distances, search
from ssvit.evaluation.report.comparison import Standing
from ssvit.evaluation.report.scores import Scores, Split
from ssvit.figures import label_maps
from ssvit.figures.base import Figure
from ssvit.figures.contact_sheet import NEIGHBOURS, PAIRS, QUERIES, contact_sheet, neighbour, pair_sheet, query
from ssvit.figures.intervals import Dot, Intervals
from ssvit.figures.matrices import Confusion
from ssvit.figures.pictures import Gallery, Mosaic
from ssvit.figures.plot import Level, Line, Panel, Plot, chance
from ssvit.figures.style import evenly_spaced

_SHOWN = 6  # images with components or masks
_SAMPLED = 300  # images whose patches determine the components
_CLIPPED = 0.01  # fraction of patches clipped at both ends of a component, since outliers would reduce the contrast


def figures(splits: Mapping[str, Split], scores: Sequence[Scores], standings: Sequence[Standing]) -> dict[str, Figure]:
    """Return the figures by name.

    Neighbours are searched with the features chosen by k-NN, or else by the first probe of whole images.

    Args:
        splits: Feature sets by probe.
        scores: Results of the probes.
        standings: Comparison of the encoders.
    """
    of_images = [result for result in scores if splits[result.probe].test.values[result.best].ndim == 2]
    described: dict[str, Figure] = {}
    if len({standing.encoder for standing in standings}) > 1:
        described["side_by_side"] = side_by_side(standings)
    if of_images:
        split = splits[of_images[0].probe]
        if len(split.feature_sets) > 1:
            described["by_layer"] = by_layer(of_images, split.feature_sets)
        for result in of_images:
            if result.predictions is not None and not split.is_multi_label:
                described["confusion"] = confusion(split, result.predictions, f"{result.title} on {result.best}")
        chosen = next((result for result in of_images if result.probe == "knn"), of_images[0]).best
        described["contact_sheet"] = neighbours(split, chosen)
    first = next(iter(splits.values()))
    if first.duplicates:
        described["duplicates"] = near_duplicates(first, first.duplicates)
    for result in scores:
        split = splits[result.probe]
        if split.test.values[result.best].ndim == 4:
            described["patches" if split.test.masks is None else "segmentation"] = patches(split, result)
    return described


def side_by_side(standings: Sequence[Standing]) -> Intervals:
    """Return the score of each encoder in each probe, with intervals."""
    by_probe = {probe: list(rows) for probe, rows in groupby(standings, key=lambda standing: standing.probe)}
    return Intervals(
        {probe: [Dot(row.encoder, row.interval, row.value) for row in rows] for probe, rows in by_probe.items()},
        {probe: rows[0].chance for probe, rows in by_probe.items() if rows[0].chance is not None},
    )


def by_layer(scores: Sequence[Scores], feature_sets: Sequence[str]) -> Plot:
    """Plot the last column of each probe over the layers.

    The title states the layer chosen without test labels, and its difference from the last layer in percentage points.

    Args:
        scores: Results of the probes.
        feature_sets: Feature sets of the encoder, in the order of layers.
    """
    layers = {name: int(name.removeprefix("layer").split("_")[0]) for name in feature_sets}  # layer3_patch_mean: 3
    panels = []
    for result in scores:
        values = {name: 100 * row[-1] for name, row in result.values.items()}
        untrained = [name for name in feature_sets if RANDOM_PREFIX + name in values]
        lines = (
            Line([*layers.values()], [values[name] for name in feature_sets], "encoder"),
            Line(
                [layers[name] for name in untrained], [values[RANDOM_PREFIX + name] for name in untrained],
                "random weights", "replaced", "--",
            ),
        )  # fmt: skip
        chosen = "the last layer chosen"
        if result.best != feature_sets[-1]:
            gain = values[result.best] - values[feature_sets[-1]]
            chosen = f"layer {layers[result.best]} chosen, {gain:+.1f} points from the last"
        title = f"{result.title}\n{chosen}"
        levels = (Level(values.get(PIXELS), "pixels", ":", ""), chance(result.chance, "ignoring the image"))
        panels.append(Panel("score (%)", lines, levels, "layer", title, [*layers.values()]))
    across = math.ceil(math.sqrt(len(panels)))
    down = math.ceil(len(panels) / across)
    return Plot(panels, (3.6 * across, 3.4 * down), down, legend="below", shared=True)


def confusion(split: Split, predictions: Tensor, by: str) -> Confusion:
    """Return the confusion matrix of predictions; `by` names the classifier."""
    truth, k = split.test.known_labels, len(split.classes)
    counts = torch.bincount(truth * k + predictions.cpu(), minlength=k * k).view(k, k)
    accuracy = counts.trace().item() / len(truth)
    return Confusion(counts, split.classes, f"{by}\naccuracy {100 * accuracy:.1f} % on the {split.part} images")


def neighbours(split: Split, name: str) -> Gallery:
    """Return test images, evenly spaced over several classes if there are labels, and their nearest training images."""
    train, test, several = split.train, split.test, split.is_multi_label
    rows = torch.tensor(evenly_spaced(len(test), QUERIES))
    if test.labels is not None and not several:
        rows = test.labels.argsort(stable=True)[rows]
    features = test.values[name][rows], train.values[name]
    nearest = search(*features, min(NEIGHBOURS, len(train)))
    distances = relative_distances(nearest, *features).tolist()
    sheet = []
    for index, image in enumerate(split.pictures(test, rows)):
        places = nearest.indices[index]
        shown = list(zip(split.pictures(train, places), distances[index], strict=True))
        if test.labels is None or len(split.classes) < 2:
            row = [query(image, Path(test.picture(int(rows[index]))).name)]
            sheet.append(row + [neighbour(picture, distance) for picture, distance in shown])
            continue
        label, row = test.labels[rows[index]], []
        for (picture, distance), other in zip(shown, train.known_labels[places], strict=True):
            same = bool((other & label).any() if several else other == label)
            row.append(neighbour(picture, distance, class_text(other, split.classes), same))
        sheet.append([query(image, class_text(label, split.classes)), *row])
    return contact_sheet(sheet)


def near_duplicates(split: Split, pairs: Sequence[Pair]) -> Gallery:
    """Return test images next to the training images that they nearly duplicate, evenly spaced over all pairs."""
    shown = [pairs[index] for index in evenly_spaced(len(pairs), PAIRS)]
    rows = torch.tensor([[pair.test, pair.train] for pair in shown]).T
    ours, theirs = split.pictures(split.test, rows[0]), split.pictures(split.train, rows[1])
    return pair_sheet(list(zip(ours, theirs, [pair.correlation for pair in shown], strict=True)))


def patches(split: Split, result: Scores) -> Mosaic:
    """Return images next to the principal components of their patches and, if available, masks and predictions.

    The components are those of a sample of the images.
    """
    test = split.test
    sample = torch.tensor(evenly_spaced(len(test), _SAMPLED))
    shown = torch.tensor(evenly_spaced(len(sample), _SHOWN))
    rows = sample[shown]
    images, colors = split.pictures(test, rows), components(test.values[result.best][sample])[shown]
    enlarged = F.interpolate(colors.movedim(-1, 1), size=images.shape[2:], mode="nearest")
    columns = {"image": images, "components": enlarged}
    if test.masks is None or result.predictions is None:
        return Mosaic(columns)
    masks = {"true": test.masks[rows], "predicted": result.predictions[rows].cpu()}
    return label_maps.mosaic(columns, masks, test.source.mask_classes)


def components(values: Tensor) -> Tensor:
    """Return the first three principal components of patches, scaled to [0, 1]: (m, y, x, d) -> (m, y, x, 3).

    As in DINOv2 (Oquab et al. 2024, section 7.5), components are computed over all images, so that colours are
    comparable. The mean over images at each position is subtracted first, because features of masked models retain much
    of the position of a patch. Signs are such that the largest weight of a component is positive. Constant components
    are 0.5.
    """
    values = values.double()
    rows = (values - values.mean(0)).flatten(0, 2)
    _, vectors = torch.linalg.eigh(rows.T @ rows)
    vectors = vectors.flip(1)[:, :3]
    vectors = vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    projections = F.pad(rows @ vectors, (0, 3 - vectors.shape[1]))
    order = projections.sort(0).values
    low, high = order[int(_CLIPPED * (len(order) - 1))], order[-1 - int(_CLIPPED * (len(order) - 1))]
    varies = high - low > 1e-9 * rows.abs().max()
    colors = torch.where(varies, (projections - low) / torch.where(varies, high - low, 1), 0.5)
    return colors.clamp(0, 1).float().unflatten(0, values.shape[:3])
