"""Measure the shape bias of a classifier on images whose shape and texture are of different classes.

Shapes use n images.
"""

import math

import torch
from torch import Tensor

from ssvit.data.sources.shapes import conflicts
from ssvit.evaluation.evaluators.base import Evaluation, Evaluator
from ssvit.evaluation.evaluators.options import ShapeBias as ShapeBiasOptions
from ssvit.evaluation.statistics import of_accuracy
from ssvit.figures.plot import History
from ssvit.objectives.classify import Classify


def shape_bias(predictions: Tensor, shapes: Tensor, textures: Tensor) -> dict[str, float]:
    """Return the shape bias of predictions for images with conflicting cues (Geirhos et al. 2019).

    Args:
        predictions: Predicted classes, (n,), of any classifier or probe.
        shapes: Classes of the shapes, (n,).
        textures: Classes of the textures, (n,), each another one than that of the shape.

    Returns:
        shape and texture: fractions of images for which the prediction is the class of the cue; shape_bias: shape /
        (shape + texture), NaN if both are 0.
    """
    shape, texture = ((predictions == cue).double().mean().item() for cue in (shapes, textures))
    bias = shape / (shape + texture) if shape + texture else math.nan
    return {"shape": shape, "texture": texture, "shape_bias": bias}


class ShapeBias(Evaluator):
    """Measure the shape bias of a classifier of the rendered shapes on rendered images with conflicting cues.

    Args:
        options: The options.
        images: Have no effect, since the images are rendered.
    """

    def __init__(self, options: ShapeBiasOptions, **images: object) -> None:
        self.options, self.images = options, options.images

    def __call__(self, objective: Classify, history: History | None = None) -> Evaluation:
        """Return the metrics of `shape_bias`, and a line with a 95 % interval over the decisions for a cue."""
        device, size = objective.encoder.mean.device, objective.encoder.image_size
        scenes, textures = conflicts(self.images, seed=self.options.seed, size=size)
        batches = scenes.images.split(self.options.batch_size)
        predictions = torch.cat([objective.logits(batch.to(device)).argmax(1).cpu() for batch in batches])
        metrics = shape_bias(predictions, scenes.labels, textures)
        bias, decided = metrics["shape_bias"], metrics["shape"] + metrics["texture"]
        low, high = of_accuracy(bias, round(decided * self.images)) if decided else (math.nan, math.nan)
        line = (
            f"shape bias {100 * bias:.1f} % (95 % interval {100 * low:.1f} to {100 * high:.1f}) "
            f"on {self.images:,} images with conflicting cues: "
            f"{100 * metrics['shape']:.1f} % by shape, {100 * metrics['texture']:.1f} % by texture"
        )
        return Evaluation(metrics=metrics, lines=[line])
