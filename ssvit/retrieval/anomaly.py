"""Score pictures and patches by their distance to the nearest neighbour in a reference store.

For patches, this is AnomalyDINO (Damm et al. 2025, section 3): the score of a patch is its cosine distance to the
nearest patch of the reference pictures, and that of a picture is the mean of its highest 1 % of patch scores.

Shapes use n pictures, y, x rows and columns of patches, d width.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from ssvit.errors import UserError
from ssvit.evaluation.neighbours import nearest
from ssvit.evaluation.options import Flat
from ssvit.evaluation.statistics import auroc
from ssvit.figures.pictures import Gallery, Picture, heat_map, in_rows
from ssvit.retrieval.pictures import pictures_of
from ssvit.retrieval.store import Store

_HIGHEST = 0.01  # share of the patches whose mean is the score of a picture
_SHOWN, _ACROSS = 20, 4  # pictures on a sheet, and in each of its rows


class Anomalies:
    """Compute anomaly scores of pictures.

    Args:
        reference: Store of the same kind of features. A class is normal if a picture of the store has it, or, for a
            picture without a class, its folder has this name.
        names: Names of the pictures.
        classes: Classes of the pictures, "" where unknown.
        features: Features of the pictures, (n, d), or of their patches, (n, y, x, d).

    Attributes:
        distances: Cosine distances of pictures, (n,), or of their patches, (n, y, x).
        scores: Score of each picture, (n,).
        in_store: Whether the store has each picture or one of its windows; scores are then 0 or close to it.

    Raises:
        UserError: The store is empty.
    """

    def __init__(self, reference: Store, names: Sequence[str], classes: Sequence[str], features: Tensor) -> None:
        if not len(reference):
            raise UserError(f"{reference.folder}: has no pictures to compare with")
        vectors, queries = (F.normalize(rows.flatten(0, -2)) for rows in (reference.features, features))
        cosines = nearest(Flat().build(vectors=vectors), queries, 1).similarities
        self.distances = (1 - cosines.view(features.shape[:-1])).clamp(min=0)
        patches = self.distances.view(len(names), -1)
        self.scores = patches.topk(max(1, round(_HIGHEST * patches.shape[1]))).values.mean(1)
        self.names, self.classes = names, classes
        stored = {*pictures_of(reference.names)}
        self.in_store = [picture in stored for picture in pictures_of(names)]
        pairs = zip(reference.names, reference.classes, strict=True)
        self.normal = {class_name or Path(name).parent.name for name, class_name in pairs}

    def report(self) -> list[str]:
        """Return a line with the AUROC of the scores of pictures if some classes are normal and others are not.

        Pictures that are in the store are left out.
        """
        columns = (self.scores.tolist(), self.classes, self.in_store)
        labelled = [
            (score, name in self.normal)
            for score, name, left_out in zip(*columns, strict=True)
            if name and not left_out
        ]
        normal, others = ([score for score, is_normal in labelled if is_normal is value] for value in (True, False))
        left_out = sum(self.in_store)
        if not (others and (normal or left_out)):
            return []
        if not normal:
            return [f"no AUROC: only pictures that are in the store ({left_out:,}) have one of its classes"]
        pictures = f"{len(others):,} pictures of other classes, {len(normal):,} of the classes of the store"
        pictures += f"; {left_out:,} that are in the store are left out" if left_out else ""
        return [f"anomaly score: AUROC {auroc(others, normal):.3f} ({pictures}; 0.5: equal scores)"]

    def sheet(self, show: Callable[[str], Tensor]) -> Gallery:
        """Return the pictures with the highest scores, each next to its heat map if patches have scores.

        Args:
            show: Returns a picture by its name, see `ssvit.retrieval.pictures.viewer`.
        """
        groups, highest = [], self.distances.max()
        for row in self.scores.argsort(descending=True, stable=True)[:_SHOWN].tolist():
            image, path = show(self.names[row]), Path(self.names[row])
            groups.append([Picture(image, (f"{self.scores[row]:.3f}", f"{path.parent.name}/{path.name}"))])
            if self.distances.ndim == 3:
                groups[-1].append(Picture(heat_map(image, self.distances[row] / highest.clamp(min=1e-6))))
        rows = [[*chain(*row)] for row in in_rows(groups, _ACROSS)]
        title = f"cosine distance to the nearest neighbour in the reference store (brightest patch: {highest:.2f})"
        return Gallery(rows, title, blocks=min(len(groups), _ACROSS))
