"""Evaluate a segmentation model on each image of a source, at the resolution of its mask.

Images are distributed over processes in parts of fixed composition, so that the metrics do not depend on the number of
processes.

Shapes use n images of the source, h, w pixels, k classes.
"""

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from ssvit.data.sources.base import Unreadable, masks, read_ahead
from ssvit.errors import UserError, one_line
from ssvit.evaluation.evaluators.base import Evaluation, LabelledEvaluator, with_metrics
from ssvit.evaluation.evaluators.predictions import as_csv, mean, percent
from ssvit.evaluation.processes import all_gather_results, rank_and_world
from ssvit.evaluation.segmentation import LabelMaps, class_counts, intersections_over_unions, interval_of_miou, mean_iou
from ssvit.figures import label_maps, plot
from ssvit.figures.pictures import Mosaic
from ssvit.figures.plot import History, Panel, Plot, curve
from ssvit.figures.style import evenly_spaced
from ssvit.objectives.segment import Segment

_PART = 16  # images whose windows are predicted together
_SHOWN = 6  # images in the figure
_NAMED = 3  # classes named in the lines


class Segmentation(LabelledEvaluator):
    """Evaluate a segmentation model on each image of a source, which the transform resizes."""

    def __call__(self, objective: Segment, history: History | None = None) -> Evaluation:
        """Return the mean IoU and further metrics of the model.

        Metrics: miou (mean IoU of the classes that have true or predicted pixels), miou_low and miou_high (its 95 %
        interval over images), pixel_accuracy, accuracy_per_class (mean over the classes that have pixels),
        miou_constant (always the most frequent class), images (their number), and unreadable, the number of excluded
        images.
        Figures: `masks` (image, truth, prediction and errors) and `learning`. Table: `classes.csv`.

        Raises:
            UserError: Images have no masks, classes differ from the classes of the model, or too many files are
                unreadable.
        """
        indices, counts = self.counts(objective)
        total, (low, high) = counts.sum(0), interval_of_miou(counts)
        correct, predicted, true = total.tolist()
        accuracies, ious = (total[0].double() / total[2]).tolist(), intersections_over_unions(total).tolist()
        pixels = sum(true)
        metrics = {
            "miou": mean_iou(total).item(),
            "miou_low": low,
            "miou_high": high,
            "pixel_accuracy": sum(correct) / max(1, pixels),
            "accuracy_per_class": mean(accuracies),
            "miou_constant": max(true) / max(1, pixels) / max(1, sum(count > 0 for count in true)),
            "images": len(indices),
        }
        if unreadable := len(self.source) - len(indices):
            metrics["unreadable"] = unreadable
        if history is None:
            return Evaluation(metrics=metrics)
        figures = {"learning": self._learning(with_metrics(history, metrics)), "masks": self._masks(objective, indices)}
        head = "class", "correct", "predicted", "pixels", "iou", "accuracy"
        table = as_csv(head, zip(objective.classes, correct, predicted, true, ious, accuracies, strict=True))
        measured = [pair for pair in zip(ious, objective.classes, strict=True) if not math.isnan(pair[0])]
        lowest = (f"{one_line(name)} {percent(iou)}" for iou, name in sorted(measured)[:_NAMED])
        lines = [
            f"mIoU {percent(metrics['miou'])} (95 % interval over images {percent(low)} to {percent(high)}) of "
            f"{len(indices):,} images (always the most frequent class {percent(metrics['miou_constant'])})",
            f"pixel accuracy {percent(metrics['pixel_accuracy'])}, mean accuracy of the classes "
            f"{percent(metrics['accuracy_per_class'])}",
            f"lowest IoU: {', '.join(lowest)}",
            *([f"unreadable and excluded: {unreadable:,} images"] if unreadable else []),
        ]
        return Evaluation(metrics=metrics, lines=lines, figures=figures, tables={"classes.csv": table})

    def counts(self, objective: Segment) -> tuple[list[int], Tensor]:
        """Return the indices of the readable images, and the counts of `class_counts` for each, (n, 3, k).

        Raises:
            UserError: Images have no masks, classes differ from the classes of the model, or too many files are
                unreadable.
        """
        if not len(self.source):
            raise UserError(f"there are no {self.part} images, which the evaluation of a segmentation model requires")
        if self.source.mask_classes != objective.classes:
            of_images, of_model = (
                ", ".join(names) or "none" for names in (self.source.mask_classes, objective.classes)
            )
            raise UserError(f"the masks of the {self.part} images have the classes {of_images}, the model {of_model}")

        def measured() -> list[tuple[int, Tensor]]:
            rank, world = rank_and_world()
            parts = torch.arange(len(self.source)).split(_PART)
            rows = []
            for indices in parts[len(parts) * rank // world : len(parts) * (rank + 1) // world]:
                known = self._read(indices.tolist())
                answers = self._label_maps(objective)([image for _, image, _ in known])
                for (index, _, mask), answer in zip(known, answers, strict=True):
                    rows.append((index, class_counts(answer, mask, len(objective.classes))))
            return rows

        rows = list(chain.from_iterable(all_gather_results(measured)))
        self.check_readable(len(rows), "images or masks")
        indices, counts = zip(*rows, strict=True)
        return list(indices), torch.stack(counts)

    def _read(self, indices: Sequence[int]) -> list[tuple[int, Tensor, Tensor]]:
        """Return index, image and mask of the readable ones among some images, read by threads."""

        def read(place: int) -> tuple[int, Tensor, Tensor] | None:
            index = indices[place]
            try:
                mask = masks(self.source, Tensor.clone, torch.tensor([index]))[0]
                return index, self.source.read(index), mask
            except Unreadable:
                return None

        results = read_ahead(read, range(len(indices)), 1 + self.options.workers)
        return [result for _, result in results if result is not None]

    def _label_maps(self, objective: Segment) -> LabelMaps:
        device = next(objective.parameters()).device
        scores = lambda windows: objective.scores(windows.to(device)).cpu()  # noqa: E731
        return LabelMaps(objective, self.transform, scores, self.options.batch_size)

    def _masks(self, objective: Segment, indices: Sequence[int]) -> Mosaic:
        """Return images, evenly spaced, with their true and predicted masks and errors, cropped by the transform."""
        known = self._read([indices[row] for row in evenly_spaced(len(indices), _SHOWN)])
        answers = self._label_maps(objective)([image for _, image, _ in known])
        images = self.display(self.transform([image for _, image, _ in known]))
        truth, predicted = (
            torch.stack([self.transform.mask(mask) for mask in maps])
            for maps in ([mask for _, _, mask in known], answers)
        )
        shown = label_maps.mosaic({"image": images}, {"true": truth, "predicted": predicted}, objective.classes)
        return Mosaic({**shown.columns, "errors": label_maps.errors(images, truth, predicted)}, shown.legend)

    def _learning(self, history: History) -> Plot:
        """Plot the loss and the measures over the steps."""
        losses = [curve(history, "train/loss", "training", "train")]
        shares = [curve(history, "train/pixel_accuracy", "pixel accuracy, training", "train", 100)]
        for prefix, name in (("validation/", "validation"), ("", self.part)):
            shares.append(curve(history, f"{prefix}pixel_accuracy", f"pixel accuracy, {name}", "unchanged", 100))
            shares.append(curve(history, f"{prefix}miou", f"mIoU, {name}", "model", 100))
        levels = [plot.level(history, "miou_constant", "mIoU of the most frequent class", "-.", 100, "{:.1f} %")]
        return Plot((Panel("loss (nats)", losses), Panel("%", shares, levels)), (10, 4.8), legend="under")
