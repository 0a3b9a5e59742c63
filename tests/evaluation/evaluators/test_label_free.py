"""Label-free measures equal numpy on features whose effective rank is known, and a collapse gives a warning."""

import math

import numpy as np
import pytest
import tiny
import torch
from test_evaluator_contract import build

from ssvit.evaluation.evaluators.label_free import measure, rankme, warn
from ssvit.evaluation.features import Frozen
from ssvit.evaluation.options import Features

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def test_rankme_is_the_entropy_of_the_singular_values():
    features = normal(30, 9) * torch.arange(1, 10)
    values = np.linalg.svd(features.numpy(), compute_uv=False)
    shares = values / values.sum() + 1e-7
    assert rankme(features) == pytest.approx(math.exp(-sum(shares * np.log(shares))), rel=1e-9)


def test_measures_of_features_that_are_not_finite_are_nan():
    features = normal(10, 12)
    features[3, 2] = math.inf
    measures = measure(features)
    assert measures.keys() == measure(normal(10, 12)).keys()
    assert all(map(math.isnan, measures.values()))
    assert len(warn(measures, [{"step": 0, "rankme_centered": 5.0}])) == 1


def test_each_layer_of_the_backbone_is_measured():
    objective = tiny.model()
    evaluator = build("label_free")
    metrics = evaluator(objective).metrics
    encoder = objective.backbone()
    layers = Features(layer="all").specs(encoder.arguments)
    features = Frozen(encoder, layers, identity="")(torch.cat([images for images, _ in evaluator.batches]))
    for layer in layers:
        for name, value in measure(features[layer.name].double()).items():
            assert metrics[f"{name}_layer{layer.layer}"] == pytest.approx(value, rel=1e-5)
            assert metrics[name] == metrics[f"{name}_layer{len(layers)}"]


def test_a_single_image_has_no_metrics():
    evaluation = build("label_free", images=1)(tiny.model(), [{"step": 0}])
    assert (evaluation.metrics, len(evaluation.lines)) == ({}, 1)


def test_only_collapsed_features_give_a_warning():
    objective, evaluator = tiny.model(), build("label_free")
    healthy = evaluator(objective, [{"step": 0}])
    assert healthy.warnings == []
    with torch.no_grad():
        objective.backbone().norm.weight.fill_(0.0)
        objective.backbone().norm.bias.fill_(1.0)
    collapsed = evaluator(objective, [{"step": 0, **healthy.metrics}, {"step": 6}])
    (line,) = collapsed.warnings
    assert "below 0.02" in line
    assert f"below 25 % of its highest value, {healthy.metrics['rankme_centered']:.1f} at step 0" in line
