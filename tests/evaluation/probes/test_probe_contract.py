"""The contract of every probe."""

import json
import math
from dataclasses import replace

import pytest
import torch
from command import error_of
from ranks import results

from ssvit.errors import UserError
from ssvit.evaluation.features import Features
from ssvit.evaluation.options import HNSW
from ssvit.evaluation.probes.base import Probe, check_labels
from ssvit.evaluation.probes.options import Attentive, Knn, Logistic, Retrieval, Ridge, Segmentation, Sgd

CLASSES = ("ant", "bee", "cat")
OF_LABELS = {
    "knn": Knn(k=[1, 5]), "knn_standardized": Knn(k=5, standardize=True), "knn_hnsw": Knn(k=5, index=HNSW()),
    "few_shot": Ridge(shots=[2, 4], seeds=2), "ridge": Ridge(),
    "sgd": Sgd(learning_rates=[0.01, 0.1], epochs=2, batch_size=16), "logistic": Logistic(l2s=[0.1, 0.01]),
    "retrieval": Retrieval(k=[1, 5]),
    "attentive": Attentive(learning_rates=[1e-3, 1e-2], weight_decays=[5e-4], epochs=2, batch_size=16),
}  # fmt: skip
OPTIONS = {**OF_LABELS, "segmentation": Segmentation(l2s=[0.1, 0.01])}
PROBES = {name: options.build() for name, options in OPTIONS.items()}
named = pytest.mark.parametrize("name", OF_LABELS)
every = pytest.mark.parametrize("name", PROBES)


def images(probe: Probe, count: int, seed: int, *, several: bool = False) -> Features:
    """Features of overlapping classes: of images or of patches of two rows and columns, with labels or masks."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    shape = (count, 2, 2, 6) if probe.features == "patches" else (count, 6)
    values = torch.randn(*shape, generator=generator)
    values += torch.eye(6)[labels].view(count, *(1,) * (values.ndim - 2), 6)
    masks = None
    if probe.truth == "masks":
        masks = (labels.view(-1, 1, 1).expand(-1, 4, 4) + torch.randint(2, (count, 4, 4), generator=generator)) % 3
        masks = masks.to(torch.uint8)
    if several:
        labels = torch.rand(count, 3, generator=generator) < 0.4
    return Features(values, labels, CLASSES, masks)


def pair(name: str, **options: bool) -> tuple[Features, Features]:
    """Training and test images of a probe."""
    return images(PROBES[name], 60, 0, **options), images(PROBES[name], 41, 1, **options)


@every
def test_columns_are_shares_and_the_last_is_the_mean_over_the_test_images(name):
    train, test = pair(name)
    copies = [(one.values.clone(), one.labels.clone()) for one in (train, test)]
    result = PROBES[name](train, test, choose=True)
    assert all(0 <= share <= 1 for share in result.scores.values())
    assert result.choice is not None
    assert 0 <= result.choice[0] <= 1
    assert json.loads(json.dumps(result.numbers))
    if result.per_image is not None:
        assert (result.per_image.dtype, result.per_image.shape) == (torch.float64, (41,))
        assert result.per_image.mean().item() == pytest.approx([*result.scores.values()][-1], abs=1e-12)
    if result.choice_images is not None:
        correct = result.choice[0] * result.choice_images
        assert correct == pytest.approx(round(correct))
    if result.predictions is not None:
        assert len(result.predictions) == 41
    for one, (values, labels) in zip((train, test), copies, strict=True):
        assert one.values.equal(values)
        assert one.labels.equal(labels)


@every
def test_the_same_features_give_the_same_bits_whatever_the_global_generator(name):
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        results.append(PROBES[name](*pair(name), choose=True))
        assert torch.get_rng_state().equal(state)
    assert results[0].scores == results[1].scores
    assert results[0].choice == results[1].choice
    assert json.dumps(results[0].numbers) == json.dumps(results[1].numbers)


@pytest.mark.parametrize("name", [name for name, options in OPTIONS.items() if hasattr(options, "seed")])
def test_another_seed_gives_other_numbers(name):
    train, test = pair(name)
    first, second = (OPTIONS[name].changed(seed=seed).build()(train, test).numbers for seed in (1, 2))
    assert json.dumps(first) != json.dumps(second)


@every
def test_no_test_label_changes_a_choice(name):
    train, test = pair(name)
    order = torch.randperm(41, generator=torch.Generator().manual_seed(0))
    masks = None if test.masks is None else test.masks[order]
    results = [
        PROBES[name](train, one, choose=True) for one in (test, replace(test, labels=test.labels[order], masks=masks))
    ]
    assert results[0].choice == results[1].choice
    for first, second in zip(*(_numbers(result.numbers) for result in results), strict=True):
        assert first == second
    if results[0].predictions is not None:
        assert torch.equal(results[0].predictions, results[1].predictions)


def _numbers(numbers: object) -> list[object]:
    """The chosen options, losses and accuracies of training images among a result's numbers."""
    chosen = ("l2", "learning_rate", "weight_decay", "validation", "validation_grid", "grid", "leave_one_out", "train")
    if isinstance(numbers, list):  # of the fits of few shots
        return [fit[key] for score in numbers for fit in score["fits"] for key in ("l2", "left_out", "error")]
    assert isinstance(numbers, dict)
    return [numbers[key] for key in chosen if key in numbers]


def scores_and_choices() -> dict[str, list]:
    measured = {name: PROBES[name](*pair(name), choose=True) for name in PROBES}
    return {name: [dict(result.scores), list(result.choice)] for name, result in measured.items()}


def test_two_processes_have_the_results_of_one(tmp_path):
    assert results(scores_and_choices, 2, tmp_path) == [scores_and_choices()] * 2


@named
def test_one_class_is_reported_in_one_line(name):
    labels = torch.zeros(9, dtype=torch.int64)
    assert "two classes" in str(error_of(check_labels, PROBES[name], labels, labels, ("ant",)))


@every
def test_images_of_several_classes_are_measured_or_refused_in_one_line(name):
    probe, (train, test) = PROBES[name], pair(name, several=True)
    if probe.truth == "masks":
        check_labels(probe, train.labels, test.labels, CLASSES)  # its classes are classes of pixels
        return
    assert probe.multi_label
    check_labels(probe, train.labels, test.labels, CLASSES)
    assert "none has one" in str(error_of(check_labels, probe, train.labels, torch.zeros_like(test.labels), CLASSES))
    result = probe(train, test, choose=True)
    assert 0 <= [*result.scores.values()][-1] <= 1
    assert result.choice_images is None

    class Single(type(probe)):
        multi_label = False

    with pytest.raises(UserError, match="multi-label"):
        check_labels(Single(OPTIONS[name]), train.labels, test.labels, CLASSES)


@pytest.mark.parametrize(
    ("probe", "option", "values"),
    [
        (Knn, "k", [[], 0, "5", True, [1.5]]), (Knn, "temperature", [0]), (Retrieval, "queries", [0, 1.5]),
        (Ridge, "shots", [[0], ["none"], 1.5, []]), (Ridge, "seeds", [0]), (Ridge, "l2", [[1.0, 0.0], []]),
        (Sgd, "learning_rates", [[], 0.1, "0.1", [0.1, 0], [0.1, 0.1], [[0.1]]]), (Sgd, "momentum", [1]),
        (Sgd, "weight_decay", [-1]), (Sgd, "held_out", [0, 1]), (Sgd, "standardize", ["yes"]),
        (Logistic, "l2s", [[0], [math.inf]]), (Logistic, "seed", [-1, None]), (Logistic, "iterations", [0]),
        (Attentive, "weight_decays", [[0.1, 0.1]]), (Attentive, "train_images", [0]), (Attentive, "epochs", [0]),
        (Attentive, "batch_size", [2.5]), (Segmentation, "train_images", [1]),
        *((type(options), "nothing", [1]) for options in OPTIONS.values()),
    ],
)  # fmt: skip
def test_options_are_refused_by_name(probe, option, values):
    for value in values:
        assert error_of(probe, **{option: value}).name == option
