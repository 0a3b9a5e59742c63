"""Linear probes against plain float64 loops and an independent solver, and what must never sway their choice."""

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression

from ssvit.errors import UserError
from ssvit.evaluation.features import Features
from ssvit.evaluation.probes.linear import Classifiers, LinearScores, hold_out_by_class, logits_of, losses
from ssvit.evaluation.probes.logistic import fit
from ssvit.evaluation.probes.options import Logistic, Sgd
from ssvit.evaluation.probes.scaler import Scaler
from ssvit.evaluation.probes.sgd import batches

CLASSES = 4
RATES = (0.3, 0.003, 0.03)
L2S = (0.1, 0.001, 0.01)


def clusters(count=300, width=7, *, apart=1.0, seed=0, dtype=torch.float64):
    """Correlated features of uneven scale around a centre for each class, and their labels."""
    draw = torch.Generator().manual_seed(100 + seed)
    shape = torch.Generator().manual_seed(width)
    centres = apart * torch.randn(CLASSES, width, generator=shape, dtype=torch.float64)
    mix = torch.randn(width, width, generator=shape, dtype=torch.float64) * torch.logspace(0, -2, width).double()
    labels = torch.arange(count) % CLASSES
    features = (centres[labels] + torch.randn(count, width, generator=draw, dtype=torch.float64)) @ mix + 3
    return features.to(dtype), labels


TRAIN, LABELS = clusters()
TEST, TEST_LABELS = clusters(200, seed=1)
NOISE = torch.randn(300, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
TEST_NOISE = torch.randn(200, 5, generator=torch.Generator().manual_seed(6), dtype=torch.float64)


NAMES = ("ant", "bee", "cat", "dog")


SGD = Sgd(learning_rates=RATES, epochs=3, batch_size=32)


def probed(probe, train=TRAIN, labels=LABELS, test=TEST, test_labels=TEST_LABELS, *, names=NAMES, **options):
    return probe.changed(**options).build()(Features(train, labels, names), Features(test, test_labels, names))


sgd, logistic = partial(probed, SGD), partial(probed, Logistic(l2s=L2S))


def standardized(features, by):
    """Rows as numpy would make them."""
    features, by = features.double().numpy(), by.double().numpy()
    return torch.from_numpy((features - by.mean(0)) / by.std(0))


def trained_alone(features, labels, order, *, rate, momentum=0.9, weight_decay=0.0):
    """One linear layer by autograd and torch.optim, a batch at a time."""
    layer = torch.nn.Linear(features.shape[1], CLASSES, dtype=torch.float64)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate, momentum=momentum, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(order))
    for batch in order:
        optimizer.zero_grad()
        F.cross_entropy(layer(features[batch]), labels[batch]).backward()
        optimizer.step()
        schedule.step()
    return layer


def accuracy(layer, features, labels):
    return (layer(features).argmax(1) == labels).double().mean().item()


def solved_alone(features, labels, l2):
    """The layer (k, d + 1) by scikit-learn, whose C is 1 / (n l2)."""
    options = {"solver": "newton-cg", "tol": 1e-10, "max_iter": 10_000}
    model = LogisticRegression(C=1 / (len(labels) * l2), **options).fit(features.numpy(), labels.numpy())
    return torch.from_numpy(np.column_stack([model.coef_, model.intercept_]))


def objective(layer, features, labels, l2):
    layer = layer.double()
    loss = F.cross_entropy(features.double() @ layer[:, :-1].T + layer[:, -1], labels)
    return (loss + l2 / 2 * layer[:, :-1].square().sum()).item()


def solve(features, labels, l2, **options):
    """The layer for one penalty, and whether its fit converged."""
    rows = Scaler.of_features(features, False)(features)
    layers, converged = fit(rows, labels, [l2], **{"start": rows.new_zeros(CLASSES, rows.shape[1])} | options)
    return layers[0], converged


@pytest.mark.parametrize(
    ("standardize", "options"),
    [(True, {}), (False, {"momentum": 0.0}), (False, {"momentum": 0.5, "weight_decay": 0.1})],
)
def test_the_sgd_probe_is_the_loop_that_one_would_write(standardize, options):
    trained, kept = hold_out_by_class(LABELS, fraction=0.2, seed=4)
    order = [trained[batch] for batch in batches(len(trained), batch_size=32, epochs=3, seed=4)]
    for train, test in ((NOISE, TEST_NOISE), (TRAIN, TEST)):
        probe = SGD.changed(standardize=standardize, held_out=0.2, seed=4, **options)
        result = probed(probe, train, test=test)
        logits = probe.build().train(Features(train, LABELS, NAMES), trained).logits(test, range(len(RATES)))
        if standardize:
            train, test = standardized(train, train[trained]), standardized(test, train[trained])
        layers = {rate: trained_alone(train, LABELS, order, rate=rate, **options) for rate in RATES}
        for of_rate, layer in zip(logits, layers.values(), strict=True):
            torch.testing.assert_close(of_rate.T, layer(test), rtol=1e-8, atol=1e-10)
        expected = tuple(accuracy(layer, train[kept], LABELS[kept]) for layer in layers.values())
        numbers = result.numbers
        assert tuple(numbers["validation_grid"]) == pytest.approx(expected, abs=1e-12)
        assert numbers["validation"] == max(numbers["validation_grid"])
        chosen = layers[numbers["learning_rate"]]
        assert numbers["train"] == pytest.approx(accuracy(chosen, train[trained], LABELS[trained]), abs=1e-12)
        assert numbers["test"] == pytest.approx(accuracy(chosen, test, TEST_LABELS), abs=1e-12)
        assert result.scores == {name: numbers[name] for name in ("train", "validation", "test")}
        loss = F.cross_entropy(chosen(train[kept]), LABELS[kept]).item()
        assert result.choice == pytest.approx((numbers["validation"], -loss))


def test_of_equal_accuracies_the_least_loss_is_chosen():
    # Centres so far apart that every rate names every held-out image.
    train, labels = clusters(apart=30.0)
    test, test_labels = clusters(200, apart=30.0, seed=1)
    result = sgd(train, labels, test, test_labels)
    assert result.numbers["validation_grid"] == [1.0, 1.0, 1.0]
    assert result.numbers["learning_rate"] == max(RATES)
    # Of two feature sets that classify all images, the one whose classes are further apart is chosen.
    near = [clusters(n, apart=15.0, seed=own)[0] for n, own in ((300, 0), (200, 1))]
    nearer = sgd(near[0], labels, near[1], test_labels)
    assert nearer.choice[0] == result.choice[0] == 1
    assert nearer.choice < result.choice
    assert set(logistic(train, labels, test, test_labels).scores.values()) == {1}
    assert sgd().choice[0] > sgd(NOISE, test=TEST_NOISE).choice[0] + 0.2


def test_standardized_features_may_have_any_scale_and_shift_and_idle_columns():
    scale, shift = torch.logspace(-4, 3, 7).double(), torch.linspace(-50, 50, 7).double()
    idle = [torch.full((count, 1), 0.1, dtype=torch.float64) for count in (300, 200)]
    moved = [torch.cat([features * scale + shift, own], 1) for features, own in zip((TRAIN, TEST), idle, strict=True)]
    for probe in (sgd, logistic):
        assert probe(moved[0], test=moved[1]).numbers == probe().numbers
    assert sgd(moved[0], test=moved[1], standardize=False).numbers != sgd(standardize=False).numbers
    assert Scaler.of_features(moved[0], True)(moved[0])[:, 7].abs().max() == 0


def test_rounding_alone_is_no_variation():
    features = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    features[:, 1] = 1000.0
    features[::2, 1] = torch.nextafter(torch.tensor(1000.0), torch.tensor(2000.0))
    features[:, 2] = features[:, 2] * 1e-6
    rows = Scaler.of_features(features, True)(features)
    torch.testing.assert_close(rows.std(0, correction=0), torch.tensor([1.0, 0.0, 1.0, 0.0]))
    assert (rows[:, 3] == 1).all()


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.9])
def test_held_out_images_are_a_fraction_of_each_class(fraction):
    labels = torch.tensor([0] * 40 + [2] * 21 + [3] * 2 + [4]).flip(0)
    trained, kept = hold_out_by_class(labels, fraction=fraction, seed=0)
    assert torch.cat([trained, kept]).sort().values.tolist() == list(range(len(labels)))
    for label, count in ((0, 40), (2, 21), (3, 2)):
        assert (labels[kept] == label).sum() == min(max(round(fraction * count), 1), count - 1)
    assert (labels[kept] != 4).all()
    assert torch.equal(kept, hold_out_by_class(labels, fraction=fraction, seed=0)[1])
    assert not torch.equal(kept, hold_out_by_class(labels, fraction=fraction, seed=1)[1])


@pytest.mark.parametrize(("count", "batch_size"), [(10, 3), (100, 32), (5, 64), (64, 64)])
def test_every_epoch_shows_every_image_once_in_even_batches(count, batch_size):
    order = list(batches(count, batch_size=batch_size, epochs=3, seed=0))
    each = len(order) // 3
    assert each == math.ceil(count / batch_size)
    epochs = [torch.cat(order[start : start + each]) for start in range(0, len(order), each)]
    assert all(epoch.sort().values.tolist() == list(range(count)) for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])
    sizes = [len(batch) for batch in order]
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1
    other = torch.cat(list(batches(count, batch_size=batch_size, epochs=3, seed=1)))
    assert not torch.equal(torch.cat(order), other)


def scored(layers, features, labels) -> LinearScores:
    classifiers = Classifiers([], partial(logits_of, Scaler.of_features(features, False), layers), {})
    return classifiers.score(Features(features, labels, NAMES), torch.arange(len(labels)), range(len(layers)))


def test_scores_are_those_of_a_loop_over_more_images_than_a_chunk():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2500, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (2500,), generator=generator)
    layers = torch.randn(3, CLASSES, 7, generator=generator, dtype=torch.float64)
    scores = scored(layers, features, labels)
    for place, layer in enumerate(layers):
        logits = features @ layer[:, :-1].T + layer[:, -1]
        assert torch.equal(scores.predictions[place], logits.argmax(1))
        assert scores.accuracies[place] == pytest.approx((logits.argmax(1) == labels).double().mean().item(), abs=1e-12)
        assert scores.losses[place] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-12)


def test_losses_are_those_of_softmax_or_of_sigmoids():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, generator=generator)
    labels, truth = torch.arange(7) % 3, torch.rand(7, 3, generator=generator) < 0.5
    shares = torch.rand(7, 3, generator=generator)
    found = [losses(logits, targets) for targets in (labels, truth, shares)]
    for r in range(2):
        for b in range(7):
            row = logits[r, :, b].double()
            likelihood, share = torch.log(row.exp() / row.exp().sum()), 1 / (1 + torch.exp(-row))
            binary = torch.where(truth[b], share, 1 - share).log().sum()
            expected = -likelihood[labels[b]], -binary, -(shares[b] * likelihood).sum()
            assert [loss[r, b].item() for loss in found] == pytest.approx([one.item() for one in expected], rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_predictions_of_logits_that_are_not_finite_are_wrong(bad):
    layers = torch.zeros(2, CLASSES, 8, dtype=torch.float64)
    layers[1, 0, 0] = bad
    scores = scored(layers, TRAIN, LABELS)
    assert scores.accuracies == [0.25, 0]
    assert scores.losses == [pytest.approx(math.log(CLASSES)), math.inf]


def test_rates_that_diverge_are_not_chosen_and_spoil_no_other():
    train, test = TRAIN.float(), TEST.float()
    numbers = sgd(train, test=test, learning_rates=[0.03, 1e38]).numbers
    assert numbers["validation_grid"][1] == 0
    assert numbers["learning_rate"] == 0.03
    alone = sgd(train, test=test, learning_rates=[0.03]).numbers
    assert numbers["validation_grid"][0] == alone["validation_grid"][0]
    with pytest.raises(UserError, match="finite"):
        sgd(train, test=test, learning_rates=[1e38])


def test_a_classifier_with_an_infinite_loss_is_not_chosen_for_its_accuracy(monkeypatch):
    def score(self, features, rows, which):
        return LinearScores([(0.5, 0.9)[place] for place in which], [(1.0, math.inf)[place] for place in which])

    monkeypatch.setattr(Classifiers, "score", score)
    assert sgd(learning_rates=[0.03, 0.01]).numbers["learning_rate"] == 0.03


@pytest.mark.parametrize("l2", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize(
    "features",
    [
        standardized(TRAIN, TRAIN), TRAIN, TRAIN + 100, torch.cat([standardized(TRAIN, TRAIN)] * 2, 1),
        torch.randn(80, 120, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    ],
    ids=["standardized", "raw", "far from zero", "columns twice", "wider than long"],
)  # fmt: skip
def test_the_optimum_is_that_of_an_independent_solver(features, l2):
    labels = LABELS[: len(features)]
    layer, converged = solve(features, labels, l2)
    expected = solved_alone(features, labels, l2)
    assert converged
    least = objective(expected, features, labels, l2)
    assert objective(layer, features, labels, l2) == pytest.approx(least, abs=1e-8)
    # The penalty makes the loss strongly convex: a loss close to the minimum implies weights close to the optimum.
    assert (layer - expected)[:, :-1].norm() <= math.sqrt(2 * 1e-8 / l2)


def test_wherever_it_starts_it_is_the_same_optimum():
    features = standardized(TRAIN, TRAIN)
    best = solved_alone(features, LABELS, 1e-3)
    for start in (3 * torch.randn(best.shape, generator=torch.Generator().manual_seed(0)).double(), 1e3 * best):
        layer, converged = solve(features, LABELS, 1e-3, start=start)
        assert converged
        least = objective(best, features, LABELS, 1e-3)
        assert objective(layer, features, LABELS, 1e-3) == pytest.approx(least, abs=1e-8)


def test_single_precision_reaches_the_same_optimum():
    features = standardized(*[clusters(3000, 40)[0]] * 2)
    labels = clusters(3000, 40)[1]
    for l2 in (1e-2, 1e-4):
        single, double = (solve(kind, labels, l2) for kind in (features.float(), features))
        assert single[1]
        assert single[0].dtype == torch.float32
        least = objective(double[0], features, labels, l2)
        assert objective(single[0], features, labels, l2) == pytest.approx(least, abs=1e-7)


def test_correlated_features_take_few_iterations():
    """Without preconditioning, they would take several times as many."""
    features, labels = clusters(1000, 60, apart=0.15)
    features = standardized(features, features)
    least = objective(solved_alone(features, labels, 1e-5), features, labels, 1e-5)
    layer, converged = solve(features, labels, 1e-5, iterations=40)
    assert converged
    assert objective(layer, features, labels, 1e-5) == pytest.approx(least, abs=1e-8)


@pytest.mark.parametrize("l2", [0.1, 1e-5])
def test_close_to_chance_preconditioned_variables_have_the_same_curvature(l2):
    """The gradient then points to the optimum; with another scale of the weights or the bias, 8 iterations or more."""
    features, _ = clusters(1000, 60)
    shares = torch.tensor([0.55, 0.45, 0.55, 0.45])
    targets = torch.rand(1000, CLASSES, generator=torch.Generator().manual_seed(0)) < shares
    assert solve(standardized(features, features), targets, l2, iterations=8)[1]


@pytest.mark.parametrize("standardize", [True, False])
def test_the_logistic_probe_chooses_on_held_out_images_and_fits_all_again(standardize):
    result = logistic(standardize=standardize, held_out=0.8, seed=2)
    trained, kept = hold_out_by_class(LABELS, fraction=0.8, seed=2)

    def accuracy(part, l2, features, labels):
        """Accuracy of a fit to the training images `part`."""
        train = TRAIN[part]
        layer = solved_alone(standardized(train, train) if standardize else train, LABELS[part], l2)
        rows = standardized(features, train) if standardize else features
        logits = rows @ layer[:, :-1].T + layer[:, -1]
        return (logits.argmax(1) == labels).double().mean().item()

    numbers, scores = result.numbers, result.scores
    l2s = [setting["l2"] for setting in numbers["grid"]]
    assert l2s == sorted(L2S, reverse=True)
    expected = [accuracy(trained, l2, TRAIN[kept], LABELS[kept]) for l2 in l2s]
    assert numbers["validation_grid"] == pytest.approx(expected, abs=1e-12)
    assert scores["validation"] == max(expected) == expected[l2s.index(numbers["l2"])]
    every = torch.arange(len(TRAIN))
    assert scores["train"] == pytest.approx(accuracy(every, numbers["l2"], TRAIN, LABELS), abs=1e-12)
    assert scores["test"] == pytest.approx(accuracy(every, numbers["l2"], TEST, TEST_LABELS), abs=1e-12)
    assert result.predictions.eq(TEST_LABELS).double().mean().item() == scores["test"]
    assert numbers["converged"]
    assert not logistic(iterations=1).numbers["converged"]


def test_large_features_that_repeat_under_a_small_penalty_are_solved():
    features = 1e6 * torch.cat([standardized(TRAIN, TRAIN)] * 2, 1)
    layer, converged = solve(features, LABELS, 1e-9)
    assert converged
    # As good as where they are small, since weights that are smaller by as much bear less of the penalty.
    small, _ = solve(features / 1e6, LABELS, 1e-6)
    assert objective(layer, features, LABELS, 1e-9) <= objective(small, features / 1e6, LABELS, 1e-6)


def test_classes_that_are_not_tested_or_not_trained_on_are_no_matter():
    few = TEST_LABELS < 2
    assert 0 < sgd(test=TEST[few], test_labels=TEST_LABELS[few]).scores["test"] <= 1
    for probe in (sgd, logistic):
        assert probe(names="abcdefghi").scores["test"] > 0.5


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (LABELS.clamp_max(2), r"class 3 \(dog\) has test images"),
        (LABELS[:1], "but no training images"),
        (LABELS[:4], "held_out=0.1: "),
    ],
)
def test_classes_that_do_not_suffice_are_reported(labels, message):
    with pytest.raises(UserError, match=message):
        SGD.build().check_classes(labels, TEST_LABELS, NAMES)
