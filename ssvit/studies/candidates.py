"""Measure the frozen features of encoders, and raw pixels, on a sample of images."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.data.sources import rasters
from ssvit.data.sources.base import Data, Source, reduced
from ssvit.data.sources.base_options import DataSet, View
from ssvit.engine.progress import minutes, progress
from ssvit.errors import UserError, pair, print_lines
from ssvit.evaluation.baselines import OWN
from ssvit.evaluation.features import Extractor, Frozen, extract, timed
from ssvit.evaluation.options import Features
from ssvit.evaluation.probes.base import check_labels
from ssvit.evaluation.probes.options import Knn, Ridge
from ssvit.evaluation.report.against import fitted
from ssvit.evaluation.report.figures import neighbours
from ssvit.evaluation.report.scores import Split, score
from ssvit.exchange import files
from ssvit.figures.base import Figure
from ssvit.figures.display import Display
from ssvit.kernels.inference import resolved
from ssvit.loading.encoder import load_encoder
from ssvit.loading.options import usual_size
from ssvit.loading.origins import origin
from ssvit.studies.options import Try

_SIDE = 128  # maximum side of the images of existing weights, which are then measured within minutes
_FEW = 16  # images whose sides are read
_NEIGHBOURS = 20  # maximum number of neighbours of k-NN


class Candidate(NamedTuple):
    """Describe features by their extractor and its images.

    Attributes:
        name: Name of the features.
        function: The extractor.
        source: Options of the images.
        view: Their transform.
        checkpoint: The weights of the extractor; None for pixels.
        is_existing: Whether the weights existed before the command.
    """

    name: str
    function: Extractor
    source: DataSet
    view: View
    checkpoint: Checkpoint | None = None
    is_existing: bool = False

    @property
    def checksum(self) -> str | None:
        """Return the checksum of the weights; None for pixels."""
        return None if self.checkpoint is None else self.checkpoint.checksum


@dataclass(frozen=True)
class Sample:
    """Measure features on a part of a data set.

    Attributes:
        options: Numbers of images, and precision.
        source: Options of the images.
        data: All images.
        device: The device.
    """

    options: Try
    source: DataSet
    data: Data
    device: torch.device

    @property
    def labelled(self) -> bool:
        """Return whether the images have labels of at least two classes."""
        parts = self.data.train, self.data.test_or_validation[1]
        return all(part.labels is not None for part in parts) and len(self.data.classes) > 1

    def sources(self, data: Data) -> list[Source]:
        """Return the training and the held-out images that are measured."""
        limits = self.options.train_images, self.options.test_images
        return [*reduced(data.train, data.test_or_validation[1], *limits)]

    def encoder(self, path: str, name: str | None = None) -> Candidate:
        """Return the frozen features of an encoder, and print the origin of existing weights.

        Args:
            path: Its checkpoint.
            name: Its name; None for existing weights, whose name is that of the checkpoint.

        Raises:
            UserError: It cannot be loaded.
        """
        channels, mean, std = (getattr(self.source, option, 3) for option in ("channels", "mean", "std"))
        converted = {"channels": channels, "image_mean": mean, "image_std": std}
        loading, source = fitted({"path": path}, self.source, converted)
        checkpoint = loading.checkpoint()
        side = min(rasters.median_side(self.source.sample(_FEW)) or _SIDE, _SIDE)
        loading = loading.changed(image_size=usual_size(checkpoint, side))
        layers = Features(layer="all" if self.labelled else "last").specs(checkpoint.encoder | loading.changes)
        function = Frozen(load_encoder(loading), layers, identity=checkpoint.checksum)
        function.prepare(self.device, resolved(self.options.precision, self.device))
        view = self.source.view.for_size(pair("image_size", loading.loaded().image_size))
        if is_existing := name is None:
            (row, *_), digest = origin("start", checkpoint, path), checkpoint.checksum
            if checkpoint.foreign is not None:
                digest = files.digest(checkpoint.path)
            name = f"{row['name']} ({view.size[0]} px)"
            print_lines(f"  {name}: licence {row.get('license', 'unknown')}, sha256 {digest}, {path}")
        return Candidate(name, function, source, view, checkpoint, is_existing)

    def measure(self, candidate: Candidate, limit: float) -> tuple[dict[str, Any], Figure | None]:
        """Return the measured values of features, and a figure of neighbours if there are no labels.

        Unreadable images are skipped, however many there are.

        Args:
            candidate: The features.
            limit: Maximum time in seconds for existing weights.

        Raises:
            UserError: Existing weights take longer.
        """
        name, function, source, view, checkpoint, is_existing = candidate
        transform = view.build()
        loading: Any = {"batch_size": 64, "device": self.device, "report": lambda opened, unreadable: None}
        parts = self.sources(self.data if source == self.source else source.build())
        cost, _ = timed(function, parts[0], transform, **loading)
        if (needed := cost * sum(map(len, parts))) > limit and is_existing:
            raise UserError(f"takes {minutes(needed)}, more than half of the remaining time; set budget=…")
        sets, (held_out, _) = [], self.data.test_or_validation
        for part, images_of in zip(parts, ("training", held_out), strict=True):
            show = progress(f"{name}, {images_of} images", " images")
            sets.append(extract(function, part, transform, progress=show, **loading))
            show(len(part), len(part))  # unreadable images are not counted before
        display = Display.of_data(source)
        split = Split(tuple(function.identities), sets[0], sets[1], transform, held_out, display=display)
        row: dict[str, Any] = {"is_existing": is_existing, "path": checkpoint and str(checkpoint.path)}
        row |= {"checksum": candidate.checksum, "image_size": list(view.size), "cost": cost, "images": len(split.test)}
        row["probes"] = _probes(split) if self.labelled else {}
        return row, None if self.labelled else neighbours(split, split.feature_sets[-1])


def _probes(split: Split) -> dict[str, Any]:
    """Return the results of the probes by name."""
    results, k = {}, max(1, min(_NEIGHBOURS, len(split.train) - 1))
    for name, options in {"ridge": Ridge(), f"{k}-NN": Knn(k=(k,))}.items():
        probe = options.build()
        check_labels(probe, split.train.known_labels, split.test.known_labels, split.classes)
        result = score(name, probe, split, lambda done, total: None)
        results[name + " mAP" * split.is_multi_label] = {
            "value": result.values[result.best][-1], "features": result.best, "chance": result.chance,
            "balanced": result.balanced.get(OWN),
        }  # fmt: skip
    return results
