"""Few-shot accuracy: every fit is the plain float64 solution, protocols are what they say, no test label chooses."""

import json

import numpy as np
import pytest
import torch

from ssvit.evaluation.features import Features
from ssvit.evaluation.probes import ridge_options
from ssvit.evaluation.probes.ridge import FewShot, RidgePath, ShotsScore, sample, signs, whiten
from ssvit.evaluation.probes.ridge_options import FEW_SHOT_PROTOCOLS as PROTOCOLS
from ssvit.options import UserError
from ssvit.randomness import permutation

PENALTIES = tuple(2.0**i for i in range(-10, 21, 5))
# More rows than columns over several chunks, fewer, as many, and one more or fewer.
SHAPES = [(600, 7), (300, 110), (9, 60), (20, 20), (21, 20), (19, 20), (1, 3)]


def matrices(n, d, k=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, size, generator=generator, dtype=torch.float64) for size in (d, k))


def blobs(images, classes=4, width=12, distance=1.0, seed=0):
    """Features around a centre a class, off zero and of unequal scales, with labels in no order."""
    generator = torch.Generator().manual_seed(seed)
    centres = distance * torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(images * classes)[torch.randperm(images * classes, generator=generator)] % classes
    features = centres[labels] + torch.randn(len(labels), width, generator=generator)
    return 3 + features * torch.logspace(-2, 2, width), labels


def few_shot(train, train_labels, test, test_labels, *, names=tuple("abcd"), **asked) -> list[ShotsScore]:
    return FewShot(**asked).fit(Features(train, train_labels, names), Features(test, test_labels, names))


def solved(x, y, l2):
    """The normal equations, as they are written."""
    return np.linalg.solve(x.T @ x + l2 * np.eye(x.shape[1]), x.T @ y)


def solved_dual(x, y, l2):
    return x.T @ np.linalg.solve(x @ x.T + l2 * np.eye(len(x)), y)


def prepared(support, features):
    """Whitening by the support set and the bias column, plainly."""
    support, features = support.double().numpy(), features.double().numpy()
    white = (features - support.mean(0)) / (support.std(0) + 1e-5)
    return np.concatenate([white, np.full((len(white), 1), 100.0)], axis=1)


def targets(labels, classes):
    return np.where(np.arange(classes) == labels.numpy()[:, None], 1.0, -1.0)


def left_out(x, y, l2):
    """Each row's prediction by a fit to all others: n fits."""
    others = [np.arange(len(x)) != row for row in range(len(x))]
    return np.stack([x[row] @ solved(x[keep], y[keep], l2) for row, keep in enumerate(others)])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reference", [solved, solved_dual])
def test_every_penalty_has_the_solution_of_the_normal_equations(shape, reference):
    x, y = matrices(*shape)
    other = next(matrices(300, shape[1], seed=1))
    path = RidgePath(x, y)
    weights, said = path.weights(PENALTIES), path.predict(other, PENALTIES)
    assert path.dual == (shape[0] <= shape[1])
    assert weights.shape == (len(PENALTIES), shape[1], 3)
    assert said.shape == (len(PENALTIES), 300, 3)
    for place, l2 in enumerate(PENALTIES):
        expected = reference(x.numpy(), y.numpy(), l2)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(weights[place].numpy(), expected, rtol=0, atol=1e-8 * scale)
        np.testing.assert_allclose(said[place].numpy(), other.numpy() @ expected, rtol=0, atol=1e-7 * scale)
        torch.testing.assert_close(path.weights([l2])[0], weights[place], rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize("shape", [(300, 7), (60, 40), (9, 60), (20, 20), (21, 20), (19, 20)])
def test_leave_one_out_is_a_refit_without_each_row(shape):
    x, y = matrices(*shape)
    chunks = list(RidgePath(x, y).leave_one_out(PENALTIES))
    assert torch.equal(torch.cat([targets for targets, _ in chunks]), y)
    said = torch.cat([chunk for _, chunk in chunks], dim=1)
    for place, l2 in enumerate(PENALTIES):
        expected = left_out(x.numpy(), y.numpy(), l2)
        np.testing.assert_allclose(said[place].numpy(), expected, rtol=0, atol=1e-7 * np.abs(expected).max())


@pytest.mark.parametrize("shape", [(300, 7), (9, 60)])
def test_a_larger_penalty_shrinks_the_weights_and_fits_worse(shape):
    x, y = matrices(*shape)
    path = RidgePath(x, y)
    norms = path.weights(PENALTIES).square().sum((1, 2))
    errors = (path.predict(x, PENALTIES) - y).square().sum((1, 2))
    assert (norms.diff() < 0).all()
    assert (errors.diff() > 0).all()


def test_columns_without_content_do_no_harm():
    x, y = matrices(50, 8)
    x[:, 3], x[:, 5] = 0, x[:, 4]
    weights = RidgePath(x, y).weights(PENALTIES)
    for found, l2 in zip(weights, PENALTIES, strict=True):
        np.testing.assert_allclose(found.numpy(), solved(x.numpy(), y.numpy(), l2), rtol=0, atol=1e-9)


@pytest.mark.parametrize("n", [5, 700])
def test_rows_are_whitened_by_the_support_and_end_in_the_bias(n):
    support, other = (1000 + matrix.float() * torch.logspace(-3, 2, 9) for matrix in matrices(max(n, 400), 9, 9))
    support = support[:n]
    support[:, 4] = other[:, 4] = 7
    for features in (support, other):
        found = whiten(support, features)
        assert (found.dtype, found.shape) == (torch.float64, (len(features), 10))
        np.testing.assert_allclose(found.numpy(), prepared(support, features), rtol=1e-9, atol=1e-6)


def test_targets_are_one_for_the_class_and_minus_one_for_others():
    assert signs(torch.tensor([2, 0, 2]), 4).tolist() == [[-1, -1, 1, -1], [1, -1, -1, -1], [-1, -1, 1, -1]]


@pytest.mark.parametrize("width", [12, 200])
def test_big_vision_is_the_published_protocol(width):
    train, labels = blobs(40, width=width, distance=0.5)
    test, test_labels = blobs(100, width=width, distance=0.5, seed=1)
    result = few_shot(train, labels, test, test_labels, protocol="big_vision")
    assert [score.shots for score in result] == [1, 5, 10, 25]
    for score in result:
        expected = []
        for seed in range(3):
            support = torch.cat(
                [
                    (labels == c).nonzero()[:, 0][permutation(seed, f"few_shot/class_{c}", 40)[: score.shots]]
                    for c in range(4)
                ]
            )
            x, z = prepared(train[support], train[support]), prepared(train[support], test)
            solve = solved if len(x) >= x.shape[1] else solved_dual
            guesses = (z @ solve(x, targets(labels[support], 4), 2.0**10)).argmax(1)
            expected.append((guesses == test_labels.numpy()).mean())
        assert [fit.accuracy for fit in score.fits] == pytest.approx(expected)
        assert [fit.seed for fit in score.fits] == [0, 1, 2]
        assert all(fit.images == 4 * score.shots and fit.l2 == 2**10 for fit in score.fits)
        assert score.mean == pytest.approx(np.mean(expected))
        assert score.deviation == pytest.approx(np.std(expected, ddof=1))


@pytest.mark.parametrize(("shots", "width"), [(1, 6), (5, 6), (5, 40), ("all", 6)])
def test_the_paper_chooses_its_penalty_by_leaving_one_out(shots, width):
    train, labels = blobs(12, width=width, distance=0.7)
    test, test_labels = blobs(80, width=width, distance=0.7, seed=1)
    result = few_shot(train, labels, test, test_labels, protocol="paper", shots=[shots], seeds=1)
    fit = result[0].fits[0]
    if shots == "all":
        support = torch.arange(48)
        assert fit.seed is None
        assert result[0].deviation is None
    else:
        support = torch.cat([places[:shots] for places in sample(labels, 4, 0)])
    x, y = prepared(train[support], train[support]), targets(labels[support], 4)
    said = {l2: left_out(x, y, l2) for l2 in PROTOCOLS["paper"].l2}
    right = {l2: (prediction.argmax(1) == y.argmax(1)).sum() for l2, prediction in said.items()}
    best = [l2 for l2 in said if right[l2] == max(right.values())]
    assert fit.l2 == min(best, key=lambda l2: ((said[l2] - y) ** 2).sum())
    guesses = (prepared(train[support], test) @ solved(x, y, fit.l2)).argmax(1)
    assert fit.accuracy == pytest.approx((guesses == test_labels.numpy()).mean())


def test_the_sweep_is_that_of_the_paper():
    assert [np.log2(l2) for l2 in PROTOCOLS["paper"].l2] == list(range(-10, 20))


def test_a_draw_is_a_permutation_of_each_class_by_the_seed_alone():
    labels = blobs(30)[1]
    first = sample(labels, 4, 0)
    for number, places in enumerate(first):
        assert places.sort().values.tolist() == (labels == number).nonzero()[:, 0].tolist()
    assert all(torch.equal(a, b) for a, b in zip(first, sample(labels, 4, 0), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, sample(labels, 4, 1), strict=True))
    orders = [(labels == number).nonzero()[:, 0].tolist().index(places[0]) for number, places in enumerate(first)]
    assert len(set(orders)) > 1, "every class must have an order of its own"


def test_the_same_again_and_for_the_test_set_in_any_order():
    train, labels = blobs(30)
    test, test_labels = blobs(300, seed=1)
    order = permutation(0, "test", len(test))
    copies = [tensor.clone() for tensor in (train, labels, test, test_labels)]
    options = {"protocol": "paper", "shots": [1, 5, "all"]}
    first = few_shot(train, labels, test, test_labels, **options)
    assert first == few_shot(train, labels, test, test_labels, **options)
    assert first == few_shot(train, labels, test[order], test_labels[order], **options)
    assert all(map(torch.equal, (train, labels, test, test_labels), copies))


def test_scale_and_place_of_the_features_do_not_matter():
    train, labels = blobs(30)
    test, test_labels = blobs(100, seed=1)
    scale, shift = torch.logspace(1, -1, 12, dtype=torch.float64), torch.linspace(-5, 5, 12, dtype=torch.float64)
    moved = few_shot(train * scale + shift, labels, test * scale + shift, test_labels, protocol="big_vision")
    plain = few_shot(train, labels, test, test_labels, protocol="big_vision")
    for ours, theirs in zip(moved, plain, strict=True):
        assert ours.mean == pytest.approx(theirs.mean, abs=0.005)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_accuracy_is_full_where_classes_are_apart_and_chance_where_they_are_not(protocol):
    options = {"protocol": protocol, "shots": [25]}
    for distance, low, high in ((20.0, 1.0, 1.0), (0.0, 0.2, 0.3)):
        train, labels = blobs(30, distance=distance)
        test, test_labels = blobs(500, distance=distance, seed=1)
        assert low <= few_shot(train, labels, test, test_labels, **options)[0].mean <= high


def test_more_shots_are_better():
    train, labels = blobs(100, distance=0.7)
    test, test_labels = blobs(300, distance=0.7, seed=1)
    result = few_shot(train, labels, test, test_labels, protocol="paper", shots=[2, 10, "all"], seeds=5)
    means = [score.mean for score in result]
    assert means == sorted(means)
    assert means[-1] > means[0] + 0.1


def test_the_result_is_plain_data():
    train, labels = blobs(5)
    both = 2 * [Features(train, labels, "abcd")]
    result = FewShot(protocol="paper", shots=[1, "all"], seeds=2, l2=[1, 2])(*both)
    data = json.loads(json.dumps(result.numbers))
    assert [score["shots"] for score in data] == [1, "all"]
    assert all(fit["l2"] in (1, 2) for score in data for fit in score["fits"])
    assert list(result.scores.values()) == [score["mean"] for score in data]
    assert list(result.scores) == ["1 label per class", "all labels"]
    assert result.deviations == {"1 label per class": data[0]["deviation"]}
    (of_all,) = data[1]["fits"]
    assert result.choice == (of_all["left_out"] / of_all["images"], -of_all["error"])


def test_what_is_not_given_is_the_protocols_own():
    assert vars(ridge_options.FewShot(protocol="big_vision")) == {
        "protocol": "big_vision",
        **vars(PROTOCOLS["big_vision"]),
    }
    assert ridge_options.FewShot(seeds=7).seeds == 7
    assert ridge_options.FewShot(seeds=7).l2 == PROTOCOLS["paper"].l2
    assert ridge_options.FewShot(shots=3) == ridge_options.FewShot(shots=[3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shots": [1, 6]}, r"shots=6: class 0 \(ant\) has 5 training images, and at least 6 are needed"),
        (
            {"names": ("ant", "bee", "cat", "dog", "eel"), "shots": ["all"]},
            r"shots=all: class 4 \(eel\) has 0 training images, and at least 1 are needed",
        ),
    ],
)
def test_what_the_user_can_mend_is_told_in_one_line(change, message):
    features, labels = blobs(5)
    given = {"train": features, "train_labels": labels, "test": features, "test_labels": labels}
    given |= {"protocol": "paper", "names": ("ant", "bee", "cat", "dog"), **change}
    with pytest.raises(UserError, match=f"^{message}$"):
        few_shot(**given)
