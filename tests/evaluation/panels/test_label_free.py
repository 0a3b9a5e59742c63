"""Measures without labels: held against numpy and plain loops, on features of which the answer is known."""

import itertools
import math
import re

import numpy as np
import pytest
import tiny
import torch
from scipy.stats import kendalltau

from ssvit.data.augment.crop import CenterCrop, InceptionCrop
from ssvit.evaluation.features import Frozen
from ssvit.evaluation.features_options import Features
from ssvit.evaluation.panels import label_free_options
from ssvit.evaluation.panels.label_free import LabelFree, alpha, describe, lidar, measure, rankme, warn

GENERATOR = torch.Generator().manual_seed(0)
VIEW = CenterCrop(size=16)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def entropic(shares: np.ndarray) -> float:
    return math.exp(-sum((share + 1e-7) * math.log(share + 1e-7) for share in shares))


def test_rankme_counts_directions_that_are_equally_long():
    for directions in (1, 3, 8):
        axes = torch.linalg.qr(normal(20, directions)).Q
        turned = axes @ torch.linalg.qr(normal(12, directions)).Q.T
        assert rankme(torch.linalg.svdvals(7 * turned)) == pytest.approx(directions, abs=1e-3)


def test_rankme_is_the_entropy_of_singular_values():
    features = normal(30, 9) * torch.arange(1, 10)
    values = np.linalg.svd(features.numpy(), compute_uv=False)
    assert rankme(torch.linalg.svdvals(features)) == pytest.approx(entropic(values / values.sum()), rel=1e-9)


def test_lidar_is_the_entropy_of_the_whitened_covariance():
    n, v, d = 40, 3, 6
    crops = (normal(n, d) @ normal(d, d))[None] + 0.3 * normal(v, n, d) @ normal(d, d)
    array = crops.numpy()
    means = [sum(array[k, i] for k in range(v)) / v for i in range(n)]
    middle = sum(means) / n
    between = sum(np.outer(mean - middle, mean - middle) for mean in means) / (n - 1)
    within = 1e-4 * np.eye(d)
    for i, k in itertools.product(range(n), range(v)):
        within += np.outer(array[k, i] - means[i], array[k, i] - means[i]) / (n * (v - 1))
    values, vectors = np.linalg.eigh(within)
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    eigenvalues = np.linalg.eigvalsh(root @ between @ root)
    assert lidar(crops) == pytest.approx(entropic(eigenvalues / eigenvalues.sum()), rel=1e-6)


def test_lidar_sees_through_a_rank_that_tells_nothing_of_the_image():
    """Two directions differ from image to image, ten only from crop to crop: RankMe counts twelve, LiDAR about two."""
    images, noise = normal(400, 2), normal(4, 400, 10)
    crops = torch.cat([(10 * images).expand(4, -1, -1) + 0.01 * normal(4, 400, 2), noise], dim=2)
    assert rankme(torch.linalg.svdvals(crops[0])) > 6
    assert lidar(crops) < 2.1


def test_alpha_is_the_power_by_which_eigenvalues_fall():
    for power in (0.7, 1.0, 2.5):
        places = torch.arange(1, 41, dtype=torch.float64)
        axes = torch.linalg.qr(torch.cat([torch.ones(90, 1, dtype=torch.float64), normal(90, 40)], 1)).Q[:, 1:]
        features = axes * places ** (-power / 2) @ torch.linalg.qr(normal(40, 40)).Q + 3.0
        assert alpha(torch.linalg.svdvals(features - features.mean(0))) == pytest.approx(power, rel=1e-6)


def test_the_mean_hides_a_rank_from_rankme_alone():
    features = normal(100, 16)
    found, shifted = (measure(one, torch.empty(0)) for one in (features, features + 50.0))
    assert shifted["rankme"] < 3
    assert shifted["rankme_centered"] == pytest.approx(found["rankme_centered"])


def test_features_that_are_not_finite_have_no_measures():
    features = normal(10, 12)
    features[3, 2] = math.inf
    found = measure(features, normal(2, 10, 12))
    assert found.keys() == measure(normal(10, 12), normal(2, 10, 12)).keys()
    assert all(map(math.isnan, found.values()))
    assert warn(found, [{"step": 0, "rankme_centered": 5.0}]) == ["the features are not finite"]


def test_an_evaluation_measures_each_layer_of_the_backbone():
    objective = tiny.model()
    source = tiny.labelled()
    evaluator = LabelFree(
        label_free_options.LabelFree(images=24, batch_size=10, views=2, seed=3), source=source, transform=VIEW
    )
    assert evaluator.images == 24 * 3
    found = evaluator(objective, [{"step": 0}])
    encoder = objective.backbone()
    layers = Features(layer="all").readings(encoder.arguments)
    images = torch.stack([source.read(place) for place in range(24)])
    crop = InceptionCrop(size=(16, 16), scale=(0.4, 1.0), flip=0.5)
    views = [images, *(crop(images, torch.arange(24), 3, view) for view in range(2))]
    extracted = [Frozen(encoder, layers, identity="")(view) for view in views]
    for layer in layers:
        features = torch.stack([one[layer.name] for one in extracted]).double()
        for name, value in measure(features[0], features[1:]).items():
            assert found.metrics[f"{name}_layer{layer.layer}"] == pytest.approx(value, rel=1e-5)
    assert found.metrics["lidar"] == found.metrics[f"lidar_layer{len(layers)}"]
    assert not found.warnings


@pytest.mark.parametrize(("images", "enough"), [(14, False), (15, True)])
def test_alpha_needs_fifteen_images(images, enough):
    source = tiny.labelled().take(torch.arange(images))
    found = LabelFree(label_free_options.LabelFree(images=images), source=source, transform=VIEW)(
        tiny.model(), [{"step": 0}]
    )
    assert ("alpha" in found.metrics, "alpha-ReQ" in found.tables["label_free.md"]) == (enough, enough)
    assert not any(map(math.isnan, found.metrics.values()))


def test_a_single_held_out_image_is_told():
    source = tiny.labelled().take(torch.tensor([0]))
    found = LabelFree(label_free_options.LabelFree(), source=source, transform=VIEW)(tiny.model(), [{"step": 0}])
    assert (found.metrics, found.lines) == ({}, ["not measured, which needs two held-out images or more"])


def test_collapsed_features_are_told_at_once():
    objective = tiny.model()
    evaluator = LabelFree(label_free_options.LabelFree(images=24, views=0), source=tiny.labelled(), transform=VIEW)
    healthy = {"step": 0, **evaluator(objective).metrics}
    with torch.no_grad():
        objective.backbone().norm.weight.fill_(0.0)
        objective.backbone().norm.bias.fill_(1.0)
    found = evaluator(objective, [healthy, {"step": 6}])
    (line,) = found.warnings
    assert "COLLAPSE" in line
    assert f", below {0.02}" in line
    assert re.search(rf"RankMe without the mean .* below 25 % .* {healthy['rankme_centered']:.1f} at step 0", line)
    assert found.lines == []


def test_the_console_has_one_verdict_and_the_file_has_the_numbers():
    evaluator = LabelFree(label_free_options.LabelFree(images=24), source=tiny.labelled(), transform=VIEW)
    found = evaluator(tiny.model(), [{"step": 0}])
    (line,) = found.lines
    assert line.startswith("no collapse: ")
    assert re.findall(r"\d+(?:\.\d+)?", line) == ["25", "0.02"]  # the thresholds, of rank and deviation
    for name in ("rankme", "rankme_centered", "lidar", "feature_std", "feature_cosine"):
        assert f"{found.metrics[name]:.2f}" in found.tables["label_free.md"]


def test_agreement_with_a_probe_is_told_once_there_are_enough_evaluations():
    accuracies, ranks = [0.2, 0.25, 0.3, 0.28, 0.4], [5.0, 6.0, 6.5, 9.0, 8.0]
    rows = [
        {"step": step, "probe/knn20": 0.9, "probe/knn20_last": accuracy, "rankme": rank}
        for step, (accuracy, rank) in enumerate(zip(accuracies, ranks, strict=True))
    ]
    metrics = {"rankme": ranks[-1], "feature_std": 0.5, "feature_cosine": 0.5}
    tau = kendalltau(accuracies, ranks).statistic
    assert (
        f"with knn20 over 5 evaluations (Kendall's tau, 1: the same order): RankMe {tau:.2f}"
        in describe(metrics, rows)[-1]
    )
    assert len(describe(metrics, rows[1:])) == 2
