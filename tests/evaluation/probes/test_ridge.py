"""Ridge regression: the fits are the plain float64 solutions, and the penalty is chosen by leaving one out."""

import numpy as np
import pytest
import torch

from ssvit.engine.randomness import permutation
from ssvit.errors import UserError
from ssvit.evaluation.features import Features
from ssvit.evaluation.probes.options import Ridge
from ssvit.evaluation.probes.ridge import RidgePath, sample

PENALTIES = tuple(2.0**i for i in range(-10, 21, 5))
# More rows than columns over several chunks, fewer, as many, and one more or fewer.
SHAPES = [(600, 7), (300, 110), (9, 60), (20, 20), (21, 20), (19, 20), (1, 3)]


def matrices(n, d, k=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, size, generator=generator, dtype=torch.float64) for size in (d, k))


def blobs(images, classes=4, width=12, distance=1.0, seed=0):
    """Features around a centre a class, off zero and of unequal scales, one constant, with labels in no order."""
    generator = torch.Generator().manual_seed(seed)
    centres = distance * torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(images * classes)[torch.randperm(images * classes, generator=generator)] % classes
    features = centres[labels] + torch.randn(len(labels), width, generator=generator)
    features[:, 0] = 1
    return 3 + features * torch.logspace(-2, 2, width), labels


def ridge(train, train_labels, test, test_labels, *, names=tuple("abcd"), **options):
    return Ridge(**options).build()(Features(train, train_labels, names), Features(test, test_labels, names))


def sets(images=40, test_images=100, **options):
    """Training features and labels, test features and labels."""
    return *blobs(images, **options), *blobs(test_images, seed=1, **options)


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
    """Return each row's prediction by a fit to all other rows, n fits."""
    others = [np.arange(len(x)) != row for row in range(len(x))]
    return np.stack([x[row] @ solved(x[keep], y[keep], l2) for row, keep in enumerate(others)])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reference", [solved, solved_dual])
def test_weights_are_the_solution_of_the_normal_equations(shape, reference):
    x, y = matrices(*shape)
    if shape == (20, 20):
        x[:, 3], x[:, 5] = 0, x[:, 4]  # constant and repeated columns
    other = next(matrices(300, shape[1], seed=1))
    path = RidgePath(x, y)
    assert path.dual == (shape[0] <= shape[1])
    for l2 in PENALTIES:
        expected = reference(x.numpy(), y.numpy(), l2)
        scale = np.abs(expected).max()
        np.testing.assert_allclose(
            path.predict(torch.eye(shape[1]).double(), l2).numpy(), expected, rtol=0, atol=1e-8 * scale
        )
        np.testing.assert_allclose(path.predict(other, l2).numpy(), other.numpy() @ expected, rtol=0, atol=1e-7 * scale)


@pytest.mark.parametrize("shape", [(300, 7), (60, 40), (9, 60), (20, 20), (21, 20), (19, 20)])
def test_leave_one_out_is_a_refit_without_each_row(shape):
    x, y = matrices(*shape)
    path = RidgePath(x, y)
    for l2, predictions in zip(PENALTIES, path.leave_one_out(PENALTIES), strict=True):
        expected = left_out(x.numpy(), y.numpy(), l2)
        np.testing.assert_allclose(predictions.numpy(), expected, rtol=0, atol=1e-7 * np.abs(expected).max())


@pytest.mark.parametrize("width", [12, 200])
def test_samples_and_fits_of_few_shots_are_those_of_plain_loops(width):
    train, labels, test, test_labels = sets(width=width, distance=0.5)
    result = ridge(train, labels, test, test_labels, shots=[1, 5, 10, 25], l2=1024.0)
    assert list(result.scores) == ["1 label per class", *(f"{shots} labels per class" for shots in (5, 10, 25))]
    for title, shots, numbers in zip(result.scores, (1, 5, 10, 25), result.numbers, strict=True):
        expected, correct = [], []
        for seed in range(3):
            order = [permutation(seed, f"few_shot/class_{label}", 40)[:shots] for label in range(4)]
            support = torch.cat([(labels == label).nonzero()[rows, 0] for label, rows in enumerate(order)])
            x, z = prepared(train[support], train[support]), prepared(train[support], test)
            solve = solved if len(x) >= x.shape[1] else solved_dual
            guesses = (z @ solve(x, targets(labels[support], 4), 2.0**10)).argmax(1)
            correct.append(guesses == test_labels.numpy())
            expected.append(correct[-1].mean())
        assert [fit["accuracy"] for fit in numbers["fits"]] == pytest.approx(expected)
        assert all(fit["images"] == 4 * shots and fit["l2"] == 1024 for fit in numbers["fits"])
        assert result.scores[title] == numbers["mean"] == pytest.approx(np.mean(expected))
        assert result.deviations[title] == pytest.approx(np.std(expected, ddof=1))
    assert result.per_image.numpy() == pytest.approx(np.mean(correct, 0))


@pytest.mark.parametrize(("shots", "width"), [(1, 6), (5, 6), (5, 40), ("all", 6)])
def test_the_penalty_is_chosen_by_leaving_one_out(shots, width):
    train, labels, test, test_labels = sets(12, 80, width=width, distance=0.7)
    result = ridge(train, labels, test, test_labels, shots=shots, seeds=1)
    (fit,) = result.numbers[0]["fits"]
    assert result.deviations == {}
    support = torch.arange(48)
    if shots != "all":
        support = torch.cat([rows[:shots] for rows in sample(labels, 4, 0)])
    x, y = prepared(train[support], train[support]), targets(labels[support], 4)
    predictions = {2.0**power: left_out(x, y, 2.0**power) for power in range(-10, 20)}
    correct = {l2: (prediction.argmax(1) == y.argmax(1)).sum() for l2, prediction in predictions.items()}
    errors = {l2: ((prediction - y) ** 2).sum() for l2, prediction in predictions.items()}
    assert fit["l2"] == max(predictions, key=lambda l2: (correct[l2], -errors[l2]))
    guesses = (prepared(train[support], test) @ solved(x, y, fit["l2"])).argmax(1)
    assert fit["accuracy"] == pytest.approx((guesses == test_labels.numpy()).mean())
    assert result.choice == pytest.approx((correct[fit["l2"]] / len(support), -errors[fit["l2"]]))


def test_all_images_of_a_rare_class_are_used_which_is_stated():
    names = ("ant", "bee", "cat", "dog")
    train, labels = blobs(5)
    kept = labels.sort(stable=True).indices[:-3]  # the last class has two images
    train, labels = train[kept], labels[kept]
    few = Ridge(shots=[1, 4], seeds=2).build()
    few.check_classes(labels, labels, names)
    remark = few.remark(labels, names)
    assert [name in remark for name in names] == [False, False, False, True]
    assert (Ridge(shots=2).build().remark(labels, names), Ridge().build().remark(labels, names)) == ("", "")
    result = ridge(train, labels, train, labels, shots=[1, 4], seeds=2)
    assert [[fit["images"] for fit in number["fits"]] for number in result.numbers] == [[4, 4], [14, 14]]
    Ridge().build().check_classes(labels, labels, (*names, "eel"))  # a class without any image
    with pytest.raises(UserError, match=r"^shots=all: class 4 \(eel\)"):
        Ridge().build().check_classes(labels, torch.tensor([0, 4]), (*names, "eel"))
