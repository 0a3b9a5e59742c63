"""Count the evaluation images that were in the pre-training, by the fingerprints that its run recorded.

Two images are identical if the hashes of their content are equal. Near-duplicates among the training images of an
evaluation are detected by `ssvit.evaluation.duplicates`. The other images of a pre-training are known by their
fingerprints only: the distance of two images is the number of bits in which their perceptual hashes differ, and an
evaluation image is a near-duplicate if its nearest image of the pre-training is within a threshold, which is half of
the 1st percentile of the distances to the second nearest images. The threshold is 0 for images of one kind that hardly
differ, and for a pre-training on several versions of each image; only identical images are then counted.

Shapes use m evaluation images, n images of the pre-training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from scipy.special import betaincinv
from torch import Tensor

from ssvit.data.fingerprints import CONTENT, fingerprints
from ssvit.data.loader import Loading
from ssvit.data.sources.base import Source
from ssvit.evaluation.duplicates import Pair
from ssvit.evaluation.features import extract
from ssvit.kernels.fast_faiss import faiss

_TYPICAL, _PART = 0.01, 0.5  # the threshold is this part of this quantile of the distances to the second nearest images
_CONFIDENCE = 0.95


class Fingerprints:
    """Extract fingerprints, which are the features of images that `fingerprints` has transformed."""

    identities: Mapping[str, str] = {"fingerprints": "1"}

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Return the fingerprints (b, 24) unchanged."""
        return {"fingerprints": images}


@dataclass(frozen=True)
class Overlap:
    """Store which evaluation images were in a pre-training.

    Attributes:
        recorded: Number n of images of the pre-training.
        identical: Whether an evaluation image is identical to one of them, (m,) bool.
        similar: Whether an evaluation image is a near-duplicate of one of them, and not identical, (m,) bool.
        bits: Maximum distance of the perceptual hashes of near-duplicates.
        false_matches: Upper 95 % limit of the fraction of false matches. It is measured on the second nearest images,
            which are assumed to be different images.
    """

    recorded: int
    identical: Tensor
    similar: Tensor
    bits: int
    false_matches: float

    @property
    def seen(self) -> Tensor:
        """Return whether an evaluation image was in the pre-training, (m,) bool."""
        return self.identical | self.similar

    def values(self, scores: Mapping[str, Tensor | None]) -> dict[str, Any]:
        """Return the numbers as plain data.

        Args:
            scores: Scores of the evaluation images, (m,), by name; None if there is no score of single images. They
                are omitted if all images were in the pre-training.
        """
        parts = {
            name: {"all": values.double().mean().item(), "without": values.double()[~self.seen].mean().item()}
            for name, values in scores.items()
            if values is not None and len(values) == len(self.seen) and not self.seen.all()
        }
        return {
            "images": len(self.seen),
            "recorded": self.recorded,
            "identical": int(self.identical.sum()),
            "near_duplicates": int(self.similar.sum()),
            "bits": self.bits,
            "false_matches": self.false_matches,
            "scores": parts,
        }


def overlap(
    recorded: np.ndarray,
    evaluated: np.ndarray,
    train: np.ndarray | None = None,
    pairs: Sequence[Pair] = (),
) -> Overlap:
    """Return the overlap of evaluation images with a pre-training.

    Args:
        recorded: Fingerprints of the pre-training, (n, 24) uint8; rows of 0 are ignored.
        evaluated: Fingerprints of the evaluation images, (m, 24) uint8.
        train: Fingerprints of the training images of the evaluation, (k, 24) uint8; None if they are unknown.
        pairs: Near-duplicates among these training images, with which perceptual hashes are therefore not compared.
    """
    recorded = np.unique(recorded[recorded.any(1)], axis=0)
    contents, of_contents, of_train = (
        np.ascontiguousarray(rows[:, :CONTENT]).view(np.uint64)[:, 0]
        for rows in (recorded, evaluated, evaluated[:0] if train is None else train)
    )
    pictures, of_pictures = (np.ascontiguousarray(rows[:, CONTENT:]) for rows in (recorded, evaluated))
    identical = np.isin(of_contents, contents)
    bits, similar, false_matches = 0, np.zeros_like(identical), 1.0
    if len(recorded) > 1:
        (first, second), (nearest, _) = (columns.T for columns in _search(pictures, of_pictures, 2))
        bits = int(_PART * np.quantile(second, _TYPICAL, method="lower"))
        similar = (first <= bits) & (bits > 0)
        is_train = np.isin(contents, of_train)
        if (near_train := similar & is_train[nearest]).any():
            others, _ = _search(pictures[~is_train], of_pictures[near_train], 1)
            similar[near_train] = others[:, 0] <= bits
        wrong = int((second <= bits).sum())
        false_matches = float(betaincinv(wrong + 1, len(second) - wrong, _CONFIDENCE)) if wrong < len(second) else 1.0
    is_recorded = np.isin(of_train, contents)
    similar[[pair.test for pair in pairs if is_recorded[pair.train]]] = True
    similar &= ~identical
    return Overlap(len(recorded), torch.from_numpy(identical), torch.from_numpy(similar), bits, false_matches)


def _search(pictures: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return distances in bits and numbers of the k nearest pictures; missing ones have the distance 2^31 - 1."""
    index = faiss.IndexBinaryFlat(8 * pictures.shape[1])
    index.add(pictures)
    distances, numbers = index.search(queries, k)
    return distances, numbers


def fingerprints_of(source: Source, indices: Tensor, **loading: Unpack[Loading]) -> np.ndarray:
    """Return the fingerprints of images of a source, (m, 24) uint8. All processes must call this function.

    Args:
        source: The evaluation images.
        indices: Indices of the images, (m,).
        **loading: Options of reading files.
    """
    features = extract(Fingerprints(), source.take(indices), fingerprints, **loading)
    return features.values["fingerprints"].numpy()


def sentence(values: Mapping[str, Any], part: str) -> str:
    """Return a sentence on an overlap.

    Args:
        values: Numbers of the overlap, see `Overlap.values`.
        part: Name of the evaluation images, such as test.
    """
    images, seen = values["images"], values["identical"] + values["near_duplicates"]
    of = f"of the {images:,} {part} images"
    limit = f"{values['recorded']:,} images recorded, "
    if values["bits"]:
        limit += f"false matches below {100 * values['false_matches']:.1f} %"
    else:
        limit += "which are too similar to each other to recognise changed copies"
    if not seen:
        return f"none {of} was in the pre-training ({limit})"
    parts = f"{values['identical']:,} identical, {values['near_duplicates']:,} near-duplicates"
    rest = "".join(
        f"; {name} {100 * scores['all']:.1f} %, without them {100 * scores['without']:.1f} %"
        for name, scores in values["scores"].items()
    )
    if seen == images:
        rest = f"; no {part} image remains without them"
    return f"{seen:,} {of} ({100 * seen / images:.1f} %) were in the pre-training: {parts} ({limit}){rest}"
