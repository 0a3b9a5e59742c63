"""Shape bias against plain counts, for predictions and for a classifier that sees one of the cues."""

import math
from types import SimpleNamespace

import pytest
import tiny
import torch
from command import error_of

from ssvit.config.declaration import Tree
from ssvit.data.sources.shapes import CLASSES, conflicts
from ssvit.data.sources.shapes_options import Shapes
from ssvit.evaluation.evaluators.options import ShapeBias
from ssvit.evaluation.evaluators.shape_bias import shape_bias
from ssvit.objectives import classify_options, mae_options
from ssvit.objectives.classify import Classify


def counted(predictions, shapes, textures) -> dict[str, float]:
    by_shape = by_texture = 0
    for guess, shape, texture in zip(predictions, shapes, textures, strict=True):
        by_shape += guess == shape
        by_texture += guess == texture
    bias = by_shape / (by_shape + by_texture) if by_shape + by_texture else math.nan
    return {"shape": by_shape / len(shapes), "texture": by_texture / len(shapes), "shape_bias": bias}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_shape_bias_is_the_fraction_of_shape_decisions_among_decisions_for_a_cue(share):
    generator = torch.Generator().manual_seed(0)
    shapes, others, guesses = torch.randint(0, 9, (3, 500), generator=generator)
    textures = (shapes + 1 + others % 8) % 9
    predictions = shapes.where(torch.rand(500, generator=generator) < share, guesses)
    assert shape_bias(predictions, shapes, textures) == pytest.approx(
        counted(predictions.tolist(), shapes.tolist(), textures.tolist())
    )


def test_without_a_decision_for_a_cue_the_shape_bias_is_undefined():
    measured = shape_bias(torch.tensor([2, 2]), torch.tensor([0, 1]), torch.tensor([1, 0]))
    assert (measured["shape"], measured["texture"]) == (0, 0)
    assert math.isnan(measured["shape_bias"])


def test_a_classifier_is_evaluated_on_images_with_conflicting_cues():
    torch.manual_seed(0)
    model = tiny.shaken(Classify(classify_options.Classify(classes=CLASSES), encoder=tiny.encoder(0.0)), 0.5).eval()
    evaluator = ShapeBias(images=60, batch_size=16, seed=3).build(source=[], transform=None)
    scenes, textures = conflicts(60, seed=3, size=model.encoder.image_size)
    with torch.no_grad():
        predictions = model.logits(scenes.images).argmax(1)
        found = evaluator(model)
    expected = counted(predictions.tolist(), scenes.labels.tolist(), textures.tolist())
    assert found.metrics == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("objective", "textures", "name"),
    [(mae_options.MAE(), True, "objective"), (classify_options.Classify(), False, "data.textures")],
)
def test_other_objectives_and_images_without_textures_of_classes_are_refused(objective, textures, name):
    run = SimpleNamespace(objective=objective, data=Shapes(textures=textures))
    assert error_of(ShapeBias().check, Tree(run)).name == name
    ShapeBias().check(Tree(SimpleNamespace(objective=classify_options.Classify(), data=Shapes(textures=True))))
