"""A classifier on images of another kind than those it was trained on: accuracies, errors by corruption, shape bias.

Letters: n images, k classes of the classifier, f folders of a set or classes of cue-conflict images.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, sqrt
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssvit.data.batch import EvalTransform
from ssvit.data.decode_options import RGB, PixelFormat
from ssvit.data.loader import evaluation_batches
from ssvit.data.sources.base import Source
from ssvit.data.sources.files import Files
from ssvit.data.sources.robustness import CLASSES, CUE_CONFLICT, Part, cues, entry_level, parts
from ssvit.evaluation.significance import above_chance, chance, standard_error
from ssvit.objectives.classify import Classify
from ssvit.options import OptionError, markdown


class Share(NamedTuple):
    """A fraction of images, and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, right: Tensor) -> "Share":
        """Of (n,) bool; NaN of none."""
        value = right.double().mean().item()
        return cls(value, standard_error(value, len(right)) if len(right) else value)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The error at one severity of one corruption."""

    corruption: str
    severity: int
    images: int
    error: Share


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of a set.

    left_out: images that are unreadable, or whose class is none of the classifier's. agreeing: cue-conflict images of
    the same class in shape and texture, which do not count for shape bias and are left out too.
    """

    name: str
    layout: str
    images: int
    classes: int
    accuracy: Share  # of cue-conflict images: by their shape
    chance: float  # of always the most frequent class
    left_out: int = 0
    agreeing: int = 0
    clean: Share | None = None  # of the usual test images of the same classes, with the same choice of answers
    cells: list[Cell] = field(default_factory=list)
    shape_bias: Share | None = None  # shape decisions of those for shape or texture (Geirhos et al. 2019)
    by_shape: dict[str, Share] = field(default_factory=dict)  # the shape bias of images of each shape

    @property
    def tells(self) -> bool:
        """Whether the accuracy is above chance."""
        return above_chance(self.accuracy.value, self.chance, self.images)


class Answers(NamedTuple):
    """What a classifier says of images."""

    logits: Tensor  # (n, k) float32
    folders: Tensor  # (n,) int64, the number of each image's folder
    allowed: Tensor  # (f, k) bool, whether a class is right for a folder
    names: list[str]  # (n,) the images' paths below their part

    def guess(self, among: Tensor) -> Tensor:
        """The most probable of the classes where among (k,) is true: (n,)."""
        return self.logits.masked_fill(~among, -torch.inf).argmax(1)

    def right(self, among: Tensor) -> Tensor:
        """(n,) bool."""
        return self.allowed[self.folders, self.guess(among)]

    @property
    def chance(self) -> float:
        """The accuracy of the class that is right most often."""
        return self.allowed[self.folders].double().mean(0).max().item()


class Robustness:
    """Measures a classifier on sets. OptionError for folders that are none of its classes."""

    def __init__(
        self,
        objective: Classify,
        transform: EvalTransform,
        pixels: PixelFormat = RGB,
        *,
        batch_size: int = 64,
        workers: int = 0,
    ) -> None:
        self.objective, self.transform, self.pixels = objective, transform, pixels
        self.batch_size, self.workers = batch_size, workers
        self.classes = tuple(objective.classes)
        self._clean: Answers | None = None

    def __call__(self, name: str, root: str, layout: str, mapping: Mapping[str, Sequence[str]] | None = None) -> Row:
        """A set of a layout; one called clean stands beside those after it. UserError for unreadable images."""
        if layout == CUE_CONFLICT:
            return self._cue_conflict(name, root, mapping or entry_level(self.classes))
        found = parts(root, layout)
        folders = sorted({folder for part in found for _, folder in part.images})
        allowed = self._allowed(name, mapping) if mapping else {one: [one] for one in folders}
        known = [one for one in folders if one in allowed and set(allowed[one]) <= set(self.classes)]
        if not known:
            right = f"has no folder of a class of the classifier, as {self.classes[0]}, but {folders[0]}"
            raise OptionError(f"sets.{name}", root, right)
        # As the sets' authors: the answers are the set's classes, and all classes where a folder stands for several.
        matrix = self._matrix([allowed[one] for one in known])
        among = torch.ones(len(self.classes), dtype=torch.bool) if mapping else matrix.any(0)
        cells: list[Cell] = []
        rights: list[Tensor] = []
        names: list[list[str]] = []
        for part in found:
            answers = self._answers(part, known, matrix, root)
            if not len(answers.folders):
                continue
            hits = answers.right(among)
            rights.append(hits)
            names.append(answers.names)
            chances = answers.chance
            if part.corruption:
                error = Share.of(~hits)
                cells.append(Cell(corruption=part.corruption, severity=part.severity, images=len(hits), error=error))
        clean = self._clean_share(matrix.any(0), among)
        if name == "clean" and layout == CLASSES and not mapping:
            self._clean = answers
        total = sum(len(part.images) for part in found)
        used = sum(map(len, rights))
        return Row(
            name=name,
            layout=layout,
            images=used,
            classes=len(known),
            accuracy=mean_of(cells, rights, names) if cells else Share.of(rights[0]),
            chance=chances,
            left_out=total - used,
            clean=clean,
            cells=cells,
        )

    def _cue_conflict(self, name: str, root: str, mapping: Mapping[str, Sequence[str]]) -> Row:
        """The class of the highest mean probability decides, as with Geirhos et al.; shape and texture must differ."""
        from ssvit.data.sources.folder import pictures

        of_classes = self._allowed(name, mapping)
        found = [(path, cues(path)) for path in pictures(root)]
        shown = {one for _, pair in found if pair for one in pair}
        known = sorted(shown & of_classes.keys())
        of_known = [(path, pair) for path, pair in found if pair and set(pair) <= set(known)]
        used = [(path, pair) for path, pair in of_known if pair[0] != pair[1]]
        agreeing = len(of_known) - len(used)
        if not used:
            right = f"its classes ({', '.join(sorted(shown))}) must be of the classifier: name them in mappings.{name}"
            raise OptionError(f"sets.{name}", root, right)
        matrix = self._matrix([of_classes[one] for one in known]).float()
        number = {one: place for place, one in enumerate(known)}
        answers = self._answers(Part([(path, pair[0]) for path, pair in used]), known, matrix > 0, root)
        texture_of = {os.path.relpath(path, root): number[pair[1]] for path, pair in used}
        means = self.objective.probabilities(answers.logits).float() @ (matrix / matrix.sum(1, keepdim=True)).T
        guess = means.argmax(1)
        texture = torch.tensor([texture_of[one] for one in answers.names])
        shapes, textures = guess == answers.folders, guess == texture
        decided = shapes | textures
        by_shape = {
            one: Share.of(shapes[decided & (answers.folders == place)])
            for one, place in number.items()
            if (decided & (answers.folders == place)).any()
        }
        return Row(
            name=name,
            layout=CUE_CONFLICT,
            images=len(guess),
            classes=len(known),
            accuracy=Share.of(shapes),
            chance=chance(answers.folders.tolist()),
            left_out=len(found) - len(guess) - agreeing,
            agreeing=agreeing,
            shape_bias=Share.of(shapes[decided]) if decided.any() else None,
            by_shape=by_shape,
        )

    def _allowed(self, name: str, mapping: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
        """The mapping. OptionError if it names a class that the classifier lacks."""
        for folder, classes in mapping.items():
            if missing := [one for one in classes if one not in self.classes]:
                right = f"{missing[0]} is no class of the classifier, as {self.classes[0]}"
                raise OptionError(f"mappings.{name}", folder, right)
        return mapping

    def _matrix(self, allowed: Sequence[Sequence[str]]) -> Tensor:
        place = {name: number for number, name in enumerate(self.classes)}
        matrix = torch.zeros(len(allowed), len(self.classes), dtype=torch.bool)
        for row, classes in enumerate(allowed):
            matrix[row, [place[one] for one in classes]] = True
        return matrix

    @torch.no_grad()
    def _answers(self, part: Part, known: Sequence[str], allowed: Tensor, root: str) -> Answers:
        """What the classifier says of the images in known folders."""
        number = {folder: place for place, folder in enumerate(known)}
        images = [(path, number[folder]) for path, folder in part.images if folder in number]
        below = os.path.join(root, part.corruption, str(part.severity)) if part.corruption else root
        logits, slots = [torch.empty(0, len(self.classes))], [torch.empty(0, dtype=torch.int64)]
        if images:
            source: Source = Files([path for path, _ in images], pixels=self.pixels)
            device = next(self.objective.parameters()).device
            for batch in evaluation_batches(
                source, self.transform, batch_size=self.batch_size, workers=self.workers, device=device
            ):
                logits.append(self.objective.logits(batch.images).float().cpu())
                slots.append(batch.slots.cpu())
        places = torch.cat(slots)
        names = [os.path.relpath(images[place][0], below) for place in places.tolist()]
        folders = torch.tensor([of for _, of in images], dtype=torch.int64)[places]
        return Answers(torch.cat(logits), folders, allowed, names)

    def _clean_share(self, classes: Tensor, among: Tensor) -> Share | None:
        """The accuracy on clean images of these classes, (k,) bool, None if there is none."""
        if self._clean is None:
            return None
        kept = (self._clean.allowed & classes).any(1)[self._clean.folders]
        return Share.of(self._clean.right(among)[kept]) if kept.any() else None


def mean_of(cells: Sequence[Cell], rights: Sequence[Tensor], names: Sequence[Sequence[str]]) -> Share:
    """The mean over corruptions of the mean accuracy over severities.

    The same photograph stands under every corruption, so its answers count together in the standard error.
    """
    severities: dict[str, int] = defaultdict(int)
    for cell in cells:
        severities[cell.corruption] += 1
    deviations: dict[str, float] = defaultdict(float)
    value = 0.0
    for cell, right, of_cell in zip(cells, rights, names, strict=True):
        weight = 1 / (len(severities) * severities[cell.corruption])
        accuracy = 1 - cell.error.value
        value += weight * accuracy
        for name, one in zip(of_cell, right.tolist(), strict=True):
            deviations[name] += weight * (one - accuracy) / len(of_cell)
    return Share(value, sqrt(fsum(deviation**2 for deviation in deviations.values())))


def by_corruption(cells: Sequence[Cell]) -> dict[str, float]:
    """The mean error of each corruption over its severities."""
    return {
        name: fmean(cell.error.value for cell in cells if cell.corruption == name)
        for name in dict.fromkeys(cell.corruption for cell in cells)
    }


def facts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows for JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        if isinstance(value, Share):
            return value._asdict()
        return [plain(one) for one in value] if isinstance(value, list) else value

    found = []
    for row in rows:
        one = plain({name: value for name, value in vars(row).items() if name != "cells"})
        one["cells"] = [plain(vars(cell)) for cell in row.cells]
        found.append({**one, "above_chance": row.tells, "error_by_corruption": by_corruption(row.cells)})
    return found


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each set, the errors by corruption and severity, and the shape bias."""
    lines = ["| set | images | classes | accuracy (%) | chance | clean, same classes |", "|---|---|---|---|---|---|"]
    for row in rows:
        clean = "" if row.clean is None else _text(row.clean)
        mark = "" if row.tells else " (not above chance)"
        lines.append(
            f"| {markdown(row.name)} | {row.images:,} | {row.classes} | {_text(row.accuracy)}{mark} "
            f"| {100 * row.chance:.1f} | {clean} |"
        )
    for row in rows:
        of_set = markdown(row.name)
        if row.cells:
            levels = sorted({cell.severity for cell in row.cells})
            lines += ["", f"| error on {of_set} (%) | mean | {' | '.join(f'severity {one}' for one in levels)} |"]
            lines.append("|---|---|" + "---|" * len(levels))
            of = {(cell.corruption, cell.severity): f"{100 * cell.error.value:.1f}" for cell in row.cells}
            means = by_corruption(row.cells)
            for name, mean in means.items():
                cells = " | ".join(of.get((name, one), "") for one in levels)
                lines.append(f"| {markdown(name)} | {100 * mean:.1f} | {cells} |")
            lines.append(f"| mean | {100 * fmean(means.values()):.1f} |{' |' * len(levels)}")
        if row.layout == CUE_CONFLICT:
            bias = "no decision for shape or texture" if row.shape_bias is None else _text(row.shape_bias) + " %"
            lines += ["", f"{of_set}: shape bias {bias}; the accuracy above is that of the shapes"]
        if row.agreeing:
            lines += ["", f"{of_set}: {row.agreeing:,} images are left out: their shape and texture agree"]
        if row.left_out:
            lines += ["", f"{of_set}: {row.left_out:,} images are left out: unreadable, or not of known classes"]
    return "\n".join([*lines, ""])


def _text(share: Share) -> str:
    return f"{100 * share.value:.1f} ± {100 * share.error:.1f}"
