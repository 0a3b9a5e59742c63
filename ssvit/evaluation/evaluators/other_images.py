"""Measure a finished classifier on another set of labelled images, and its confidence on images of no known class."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ssvit.data.batch import Batch
from ssvit.data.sources.files import Files
from ssvit.errors import OptionError, UserError, print_lines
from ssvit.evaluation.evaluators.base import Evaluation
from ssvit.evaluation.evaluators.classification import Classification
from ssvit.evaluation.evaluators.options import Classification as ClassificationOptions
from ssvit.evaluation.evaluators.predictions import Predictions
from ssvit.evaluation.statistics import auroc
from ssvit.figures.display import Display


class OtherImages(Classification):
    """Evaluate predictions that were computed before."""

    def predictions(self, objective: Predictions) -> Predictions:  # type: ignore[override]
        """Return the predictions, which are passed instead of a model."""
        return objective


def measure(
    classifier: Any, images: Sequence[tuple[str, str | None]], names: Mapping[str, str]
) -> tuple[Evaluation, int]:
    """Return the evaluation of a classifier on images, and the number of unreadable files.

    Unreadable files are printed and excluded. The metrics include auroc, how well the confidence separates images of
    the classes from others.

    Args:
        classifier: The `ssvit.inference.Classifier`.
        images: Path and class of each image; None, or a name that is not a class: an image of none of the classes.
        names: Names of the classifier's classes in these images, for those that differ; the probabilities of classes
            with equal names are added. {}: if all classes of the images are numbers, those of the classifier's classes.

    Raises:
        OptionError: No image is of a class of the classifier.
        UserError: None of these images can be read.
    """
    of_images = {name for _, name in images if name is not None}
    if not names and of_images.isdisjoint(classifier.classes) and all(map(str.isdecimal, of_images)):
        names = {name: str(number) for number, name in enumerate(classifier.classes)}
    renamed = [names.get(name, name) for name in classifier.classes]
    classes = tuple(dict.fromkeys(renamed))
    if of_images.isdisjoint(classes):
        expected = f"must contain classes of the classifier, such as {', '.join(classes[:3])}"
        raise OptionError("labelled", min(of_images, default=""), expected)
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(classes)}
    read = []
    for (path, name), (_, answer) in zip(images, classifier.name_files([path for path, _ in images]), strict=True):
        if isinstance(answer, UserError):
            print_lines(answer)
        else:
            read.append((path, numbers.get(name, -1), answer))
    if all(label < 0 for _, label, _ in read):
        raise UserError("labelled: none of the images can be read")
    labels, groups = torch.tensor([label for _, label, _ in read]), torch.tensor([numbers[name] for name in renamed])
    probabilities = torch.zeros(len(read), len(classes)).index_add_(1, groups, torch.stack([row for *_, row in read]))
    is_known = labels >= 0
    batch = Batch({}, labels[is_known], torch.arange(int(is_known.sum())))
    predictions = Predictions.of_logits(probabilities[is_known].log(), batch)
    paths = [path for path, label, _ in read if label >= 0]
    source = Files(paths, labels[is_known], classes, pixels=classifier.pixels)
    encoder, shown = classifier.checkpoint.encoder, range(min(3, classifier.pixels.channels))
    display = Display.of_pixels(classifier.pixels, mean=encoder["mean"], std=encoder["std"], shown=shown)
    evaluator = OtherImages(
        ClassificationOptions(), source=source, transform=classifier.transform, display=display, part="labelled"
    )
    result = evaluator(predictions, [{"step": 0}])  # type: ignore[arg-type]
    metrics, lines = dict(result.metrics), list(result.lines)
    if len(paths) < len(read):
        known, others = (probabilities[rows].amax(1).tolist() for rows in (is_known, ~is_known))
        separation = auroc(known, others)
        metrics |= {"auroc": separation, "unknown": len(others)}
        of_others = f"{len(others):,} images of none of the classes"
        lines.append(f"confidence compared with {of_others}: AUROC {separation:.3f} (0.5: equal confidence)")
    figures = {name: figure for name, figure in result.figures.items() if name != "learning"}
    return Evaluation(metrics=metrics, lines=lines, figures=figures, tables=result.tables), len(images) - len(read)
