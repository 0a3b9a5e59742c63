"""Evaluate the accuracy of a classifier on each image of a source, and its confusion matrix.

Images are distributed over processes, and each process receives all predictions in the order of the source, so that the
metrics do not depend on the number of processes.

Shapes use n images of the source, k classes.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import torch

from ssvit.data.fingerprints import read_fingerprints
from ssvit.data.loader import Loading, evaluation_batches
from ssvit.data.sources.base import is_multi_label
from ssvit.errors import UserError
from ssvit.evaluation.evaluators.base import Evaluation, LabelledEvaluator, with_metrics
from ssvit.evaluation.evaluators.options import Classification as ClassificationOptions
from ssvit.evaluation.evaluators.predictions import MultiLabelPredictions, Predictions, percent
from ssvit.evaluation.evaluators.real import read_real
from ssvit.evaluation.leakage import Overlap, fingerprints_of, overlap, sentence
from ssvit.evaluation.processes import all_gather_results, rank_and_world
from ssvit.figures import plot
from ssvit.figures.base import Figure
from ssvit.figures.matrices import Confusion
from ssvit.figures.pictures import RED, Gallery, Picture, in_rows
from ssvit.figures.plot import History, Level, Panel, Plot, curve
from ssvit.figures.reliability import Reliability
from ssvit.objectives.classify import Classify
from ssvit.objectives.classify_options import MULTI_LABEL

_SHOWN, _ACROSS = 24, 6  # mistakes in the figure, and in each of its rows
_BLOCKS = 500  # maximum number of rows of the confusion matrix, which merges neighbouring classes if there are more


class Classification(LabelledEvaluator):
    """Evaluate a classifier on each image of a source, with the arguments of `LabelledEvaluator`."""

    def __init__(self, options: ClassificationOptions, **arguments: Any) -> None:
        super().__init__(options, **arguments)
        self._overlap: Overlap | None = None  # with the pre-training, the same in each evaluation
        self.real = None if options.real is None else read_real(options.real, self.source)

    def __call__(self, objective: Classify, history: History | None = None) -> Evaluation:
        """Return accuracy and further metrics of the classifier.

        Metrics are those of `Predictions` or, for multi-label images, of `MultiLabelPredictions`; accuracy_real, the
        share of images whose prediction is among their ReaL labels; and unreadable, the number of excluded images.
        Figures: `confusion` (not of multi-label images), `mistakes` (those of highest confidence), `reliability` and
        `learning`.
        Table: `classes.csv`, one line for each class.

        Raises:
            UserError: Images have no labels, classes differ from the classes of the model, or too many files are
                unreadable.
        """
        predictions, classes = self.predictions(objective), self.source.classes
        counts = predictions.by_class(classes)
        metrics = predictions.metrics(counts)
        if unreadable := len(self.source) - len(predictions.source_indices):
            metrics["unreadable"] = unreadable
        if self.real is not None and isinstance(predictions, Predictions):
            pairs = zip(predictions.source_indices.tolist(), predictions.guess.tolist(), strict=True)
            correct = [guess in self.real[index] for index, guess in pairs if self.real[index]]
            metrics["accuracy_real"] = sum(correct) / max(1, len(correct))
        if (
            self.run_folder is not None
            and self._overlap is None
            and (recorded := read_fingerprints(self.run_folder)) is not None
        ):
            loading: Loading = {"workers": self.options.workers, "timeout": self.options.timeout}
            self._overlap = overlap(recorded, fingerprints_of(self.source, predictions.source_indices, **loading))
        if history is None:
            return Evaluation(metrics=metrics)
        lines = predictions.lines(metrics, counts)
        if "accuracy_real" in metrics:
            lines.append(f"top-1 by ReaL labels {percent(metrics['accuracy_real'])}")
        if self._overlap is not None:
            scores = {"top-1": predictions.correct} if isinstance(predictions, Predictions) else {}
            lines.append(sentence(self._overlap.values(scores), self.part))
        if unreadable:
            lines.append(f"unreadable and excluded: {unreadable:,} images")
        history = with_metrics(history, metrics)
        labels = "predicted probability of a class", "share of images that have the class", "predictions"
        figures: dict[str, Figure] = {"mistakes": self._mistakes(predictions)}
        if isinstance(predictions, Predictions):
            labels = "confidence (probability of the predicted class)", "accuracy", "images"
            confusion = predictions.confusion(len(classes), min(len(classes), _BLOCKS))
            title = f"accuracy {percent(metrics['accuracy'])} on the {self.part} images"
            figures["confusion"] = Confusion(confusion, classes, title)
            shares = torch.bincount(predictions.truth).double() / len(predictions.truth)
            levels = [plot.chance(shares.max().item())]
            if "accuracy_top5" in metrics:
                top5 = shares.topk(min(5, len(shares))).values.sum().item()
                levels.append(Level(100 * top5, "top-5 chance (most frequent five)", ":", "{:.1f} %"))
            entropy = [Level(torch.special.entr(shares).sum().item(), "entropy of the classes", "-.")]
            measures = {"accuracy": "top-1", "accuracy_top5": "top-5"}
        else:
            levels, entropy = [plot.level(history, "map_constant", "mAP of a random order", "-.", 100, "{:.1f} %")], []
            measures = {"map": "mAP", "micro_f1": "micro-F1 at 0.5"}
        title = f"{self.part} images: ECE {percent(metrics['ece'])}, Brier score {metrics['brier']:.3f}"
        sizes, probabilities, frequencies = (column.tolist() for column in predictions.calibration)
        figures["reliability"] = Reliability(sizes, probabilities, frequencies, labels, title)
        figures["learning"] = self._learning(history, measures, levels, entropy)
        return Evaluation(
            metrics=metrics, lines=lines, figures=figures, tables={"classes.csv": predictions.table(counts)}
        )

    def trial(self, objective: Classify, images: int) -> int:
        """Predict the classes of a few images."""
        few = copy.copy(self)
        few.source = self.source.take(torch.arange(min(images, len(self.source))))
        few.predictions(objective)
        return len(few.source)

    def predictions(self, objective: Classify) -> Predictions | MultiLabelPredictions:
        """Return the predictions of all readable images, in each process.

        Raises:
            UserError: Images have no labels, classes differ from the classes of the model, or too many files are
                unreadable.
        """

        def predict() -> list[Predictions | MultiLabelPredictions]:
            self._check(objective)
            rank, world = rank_and_world()
            batches = evaluation_batches(
                self.source,
                self.transform,
                batch_size=self.options.batch_size,
                rank=rank,
                world=world,
                device=next(objective.parameters()).device,
                workers=self.options.workers,
                timeout=self.options.timeout,
            )
            row_type = MultiLabelPredictions if objective.options.loss == MULTI_LABEL else Predictions
            return [row_type.of_logits(objective.logits(batch.images), batch) for batch in batches]

        parts = list(chain.from_iterable(all_gather_results(predict)))
        self.check_readable(sum(len(part.source_indices) for part in parts))
        return type(parts[0])(*map(torch.cat, zip(*parts, strict=True)))

    def _check(self, objective: Classify) -> None:
        """Raise UserError unless the images have labels that suit the model."""
        if self.source.labels is None:
            raise UserError(f"the {self.part} images have no labels, which the evaluation of a classifier requires")
        if is_multi_label(self.source.labels) != (objective.options.loss == MULTI_LABEL):
            images, others = f"the {self.part} images", "the training images of the model"
            if objective.options.loss == MULTI_LABEL:
                images, others = others, images
            raise UserError(f"{images} may have several classes, but {others} have one each")
        if not len(self.source):
            raise UserError(f"there are no {self.part} images, which the evaluation of a classifier requires")
        for number, pair in enumerate(zip_longest(self.source.classes, objective.classes)):
            of_images, of_model = ("absent" if name is None else repr(name) for name in pair)
            if of_images != of_model:
                raise UserError(
                    f"the classes of the {self.part} images ({len(self.source.classes)}) are not the model's "
                    f"({len(objective.classes)}): class {number} is {of_images}, the model's is {of_model}"
                )

    def _mistakes(self, predictions: Predictions | MultiLabelPredictions) -> Gallery:
        """Return a gallery of the most confident mistakes with their class, the prediction and its probability."""
        mistakes, wrong = predictions.mistakes(_SHOWN, self.source.classes), ~predictions.correct
        source = self.source.take(predictions.source_indices[[mistake.row for mistake in mistakes]])
        batches = evaluation_batches(source, self.transform, batch_size=_SHOWN) if mistakes else ()
        images = (self.display(image) for batch in batches for image in batch.images)
        pictures = [
            Picture(image, (mistake.truth, f"→ {100 * mistake.probability:.0f} % {mistake.prediction}"), RED)
            for image, mistake in zip(images, mistakes, strict=True)
        ]
        title = f"{int(wrong.sum()):,} mistakes in {len(wrong):,} {self.part} images, the most confident first"
        return Gallery(in_rows(pictures, _ACROSS), title)

    def _learning(
        self, history: History, measures: Mapping[str, str], levels: Sequence[Level], entropy: Sequence[Level]
    ) -> Plot:
        """Plot loss and measures over the steps, next to a model that ignores the image.

        Validation images have separate curves if test images, which are evaluated at the end only, exist too.

        Args:
            history: Rows of metrics.
            measures: Labels of the measures by metric.
            levels: Baselines of the measures.
            entropy: Baseline of the loss.
        """
        has_validation = any(name.startswith("validation/") for row in history for name in row)
        losses = [curve(history, "train/loss", "training", "train")]
        shares = [curve(history, "train/accuracy", "training", "train", 100)]
        for prefix, name, marker in (
            ("validation/", "validation", "."),
            ("", self.part, "*" if has_validation else "."),
        ):
            losses.append(curve(history, f"{prefix}loss", name, marker=marker))
            for (measure, words), color in zip(measures.items(), ("model", "unchanged"), strict=True):
                shares.append(curve(history, f"{prefix}{measure}", f"{name}, {words}", color, 100, marker=marker))
        loss = "loss (nats)" if entropy else "loss (nats, summed over the classes)"
        return Plot((Panel(loss, losses, entropy), Panel("%", shares, levels)), (10, 4.8), legend="under")
