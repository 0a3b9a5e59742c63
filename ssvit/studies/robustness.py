"""Measure the robustness of a classifier: accuracy on robustness sets, errors by corruption, and shape bias.

Shapes use n images, k classes of the classifier, f folders of a set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from ssvit.data.batch import EvalTransform
from ssvit.data.decode_options import RGB, PixelFormat
from ssvit.data.loader import evaluation_batches
from ssvit.data.sources.base import Source
from ssvit.data.sources.files import Files
from ssvit.data.sources.folder import pictures
from ssvit.data.sources.robustness import CUE_CONFLICT, cues, entry_level, parts
from ssvit.evaluation.statistics import above_chance, chance, standard_error
from ssvit.objectives.classify import Classify
from ssvit.options import OptionError, markdown


class Share(NamedTuple):
    """Store a fraction of images and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, hits: Tensor) -> "Share":
        """Return the fraction of true values of (n,) bool, n > 0."""
        value = hits.double().mean().item()
        return cls(value, standard_error(value, len(hits)))


@dataclass(frozen=True, kw_only=True)
class SetResult:
    """Store the result of a set.

    Attributes:
        name: The name of the set.
        images: Number of evaluated images.
        classes: Number of their classes.
        accuracy: Accuracy; for cue-conflict images by their shape. For corruptions, the mean over corruptions of the
            mean over severities, with the standard error for the number of images of one severity.
        chance: Accuracy of always the most frequent class.
        left_out: Number of excluded images: unreadable, of no class of the classifier, or with equal classes of shape
            and texture.
        errors: Error of each corruption by severity.
        shape_bias: Fraction of shape decisions among shape and texture decisions (Geirhos et al. 2019).
    """

    name: str
    images: int
    classes: int
    accuracy: Share
    chance: float
    left_out: int
    errors: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    shape_bias: Share | None = None

    @property
    def is_above_chance(self) -> bool:
        """Return whether the accuracy is above chance."""
        return above_chance(self.accuracy.value, self.chance, self.images)


class RobustnessEvaluation:
    """Evaluate a classifier on robustness sets.

    Args:
        objective: The classifier.
        transform: Transform of the evaluation.
        pixels: Pixel format of the encoder.
        batch_size: Batch size.
        workers: Loader processes.
    """

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
        self.loading = {"batch_size": batch_size, "workers": workers}
        self.classes = tuple(objective.classes)

    def __call__(self, name: str, root: str, layout: str, mapping: Mapping[str, Sequence[str]] | None) -> SetResult:
        """Evaluate a set.

        Args:
            name: Name of the set.
            root: Folder of the set.
            layout: Layout of the folder.
            mapping: Classes of the classifier for each folder; None if folders are named by class.

        Raises:
            OptionError: If folders or mappings do not match the classes of the classifier.
            UserError: If no image is readable.
        """
        for folder, classes in (mapping or {}).items():
            if missing := [one for one in classes if one not in self.classes]:
                right = f"{missing[0]} is no class of the classifier, as {self.classes[0]}"
                raise OptionError(f"mappings.{name}", folder, right)
        if layout == CUE_CONFLICT:
            return self._cue_conflict(name, root, mapping or entry_level(self.classes))
        found = parts(root, layout)
        folders = sorted({folder for part in found for _, folder in part.images})
        known = [one for one in folders if one in (mapping or self.classes)]
        if not known:
            right = f"has no folder of a class of the classifier, as {self.classes[0]}, but {folders[0]}"
            raise OptionError(f"sets.{name}", root, right)
        # As in the authors' code, predictions are restricted to the classes of the set, unless folders map to several
        # classes.
        allowed = self._matrix([mapping[one] if mapping else [one] for one in known])
        among = allowed.any(0) | (mapping is not None)
        errors: dict[str, dict[int, float]] = {}
        hits: list[Tensor] = []
        permitted: list[Tensor] = []
        for part in found:
            logits, labels, _ = self._logits([image for image in part.images if image[1] in known], known)
            hits.append(allowed[labels, logits.masked_fill(~among, -torch.inf).argmax(1)])
            permitted.append(allowed[labels])
            if part.corruption and len(labels):
                errors.setdefault(part.corruption, {})[part.severity] = 1 - hits[-1].double().mean().item()
        correct = torch.cat(hits)
        accuracy = Share.of(correct)
        if errors:
            value = 1 - fmean(fmean(by_severity.values()) for by_severity in errors.values())
            accuracy = Share(value, standard_error(value, len(correct) / sum(map(len, errors.values()))))
        return SetResult(
            name=name,
            images=len(correct),
            classes=len(known),
            accuracy=accuracy,
            chance=torch.cat(permitted).double().mean(0).max().item(),
            left_out=sum(len(part.images) for part in found) - len(correct),
            errors=errors,
        )

    def _cue_conflict(self, name: str, root: str, mapping: Mapping[str, Sequence[str]]) -> SetResult:
        """Evaluate cue-conflict images by the class of the highest mean probability, as Geirhos et al. do.

        Images with equal classes of shape and texture are excluded.
        """
        found = [(path, pair) for path in pictures(root) if (pair := cues(path))]
        shown = {one for _, pair in found for one in pair}
        known = sorted(shown & mapping.keys())
        used = [(path, pair) for path, pair in found if set(pair) <= set(known) and pair[0] != pair[1]]
        if not used:
            right = f"its classes ({', '.join(sorted(shown))}) must be of the classifier: name them in mappings.{name}"
            raise OptionError(f"sets.{name}", root, right)
        matrix = self._matrix([mapping[one] for one in known]).float()
        logits, labels, places = self._logits([(path, pair[0]) for path, pair in used], known)
        means = self.objective.probabilities(logits).float() @ (matrix / matrix.sum(1, keepdim=True)).T
        guess = means.argmax(1)
        shapes = guess == labels
        textures = guess == torch.tensor([known.index(used[place][1][1]) for place in places])
        return SetResult(
            name=name,
            images=len(guess),
            classes=len(known),
            accuracy=Share.of(shapes),
            chance=chance(labels.tolist()),
            left_out=len(pictures(root)) - len(guess),
            shape_bias=Share.of(shapes[shapes | textures]) if (shapes | textures).any() else None,
        )

    def _matrix(self, allowed: Sequence[Sequence[str]]) -> Tensor:
        """Return whether a class is correct for a folder: (f, k) bool."""
        return torch.tensor([[name in classes for name in self.classes] for classes in allowed])

    @torch.no_grad()
    def _logits(self, images: Sequence[tuple[str, str]], known: Sequence[str]) -> tuple[Tensor, Tensor, list[int]]:
        """Return the logits (n, k) of readable images, the indices of their folders (n,), and their indices."""
        logits, places = [torch.empty(0, len(self.classes))], []
        if images:
            source: Source = Files([path for path, _ in images], pixels=self.pixels)
            device = next(self.objective.parameters()).device
            for batch in evaluation_batches(source, self.transform, device=device, **self.loading):
                logits.append(self.objective.logits(batch.images).float().cpu())
                places += batch.slots.tolist()
        labels = [known.index(images[place][1]) for place in places]
        return torch.cat(logits), torch.tensor(labels, dtype=torch.int64), places


def table(results: Sequence[SetResult]) -> str:
    """Return Markdown tables of the sets and of the errors by corruption and severity, and the shape bias."""
    lines = ["| set | images | classes | accuracy (%) | chance |", "|---|---|---|---|---|"]
    for one in results:
        mark = "" if one.is_above_chance else " (not above chance)"
        cells = f"{one.images:,} | {one.classes} | {_text(one.accuracy)}{mark} | {100 * one.chance:.1f}"
        lines.append(f"| {markdown(one.name)} | {cells} |")
    for one in results:
        name = markdown(one.name)
        if one.errors:
            levels = sorted({severity for by_severity in one.errors.values() for severity in by_severity})
            lines += ["", f"| error on {name} (%) | mean | {' | '.join(f'severity {level}' for level in levels)} |"]
            lines.append("|---|---|" + "---|" * len(levels))
            for corruption, errors in one.errors.items():
                cells = " | ".join(f"{100 * errors[level]:.1f}" if level in errors else "" for level in levels)
                lines.append(f"| {markdown(corruption)} | {100 * fmean(errors.values()):.1f} | {cells} |")
            lines.append(f"| mean | {100 * (1 - one.accuracy.value):.1f} |{' |' * len(levels)}")
        if one.shape_bias is not None:
            lines += ["", f"{name}: shape bias {_text(one.shape_bias)} %; the accuracy above is that of the shapes"]
        if one.left_out:
            lines += [
                "",
                f"{name}: {one.left_out:,} images are left out: unreadable, of no known class or of one alone",
            ]
    return "\n".join([*lines, ""])


def _text(share: Share) -> str:
    return f"{100 * share.value:.1f} ± {100 * share.error:.1f}"
