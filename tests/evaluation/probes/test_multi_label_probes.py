"""Probes of images of several classes equal plain loops and scikit-learn."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from torch import Tensor

from ssvit.errors import OptionError
from ssvit.evaluation.features import Features
from ssvit.evaluation.precision import average_precisions, mean_average_precision, share_of_class
from ssvit.evaluation.probes import logistic, ridge
from ssvit.evaluation.probes.options import Knn, Logistic, Ridge, Sgd

CLASSES = ("cat", "dog", "owl", "yak")


def marks(count: int, seed: int = 0, share: float = 0.35) -> Tensor:
    """(count, 4) bool."""
    return torch.rand(count, 4, generator=torch.Generator().manual_seed(seed)) < share


def test_average_precision_is_that_of_scikit_learn():
    truth, scores = marks(60), torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    truth[:, 2] = False
    for values in (scores, scores.round(), torch.zeros(60, 4)):
        found = average_precisions(values, truth)
        assert found[2].isnan()
        for k in (0, 1, 3):
            assert found[k].item() == pytest.approx(average_precision_score(truth[:, k], values[:, k]))
        assert mean_average_precision(values, truth) == pytest.approx(found[[0, 1, 3]].mean().item())
    assert mean_average_precision(torch.zeros(60, 4), truth) == pytest.approx(share_of_class(truth))


def split(count: int, seed: int) -> Features:
    """Return features (count, 6) that determine three of the classes."""
    labels = marks(count, seed)
    mixing = torch.randn(4, 6, generator=torch.Generator().manual_seed(9))
    noise = torch.randn(count, 6, generator=torch.Generator().manual_seed(100 + seed))
    return Features(labels.float() @ mixing + 0.7 * noise, labels, CLASSES)


def test_the_vote_is_the_mean_of_the_neighbours_classes():
    train, test = split(60, 0), split(30, 1)
    for temperature in (None, 0.07):
        shares = torch.zeros(30, 4, dtype=torch.float64)
        cosines = F.normalize(test.values).double() @ F.normalize(train.values).double().T
        for row in range(30):
            best = cosines[row].topk(5)
            weights = [1.0 if temperature is None else np.exp(cosine / temperature) for cosine in best.values.tolist()]
            for weight, place in zip(weights, best.indices.tolist(), strict=True):
                shares[row] += weight * train.labels[place]
            shares[row] /= sum(weights)
        result = Knn(temperature=temperature, k=[2, 5]).build()(train, test, choose=True)
        assert result.scores["5-NN"] == pytest.approx(mean_average_precision(shares.float(), test.labels))
        assert len(result.choice) == 1


def test_least_squares_on_several_classes():
    train, test = split(80, 0), split(50, 1)
    probe = Ridge(l2=[1e-3, 10.0]).build()
    result = probe(train, test)
    x, y = ridge.whiten(train.values, train.values), 2 * train.labels.double() - 1
    precisions = {}
    for l2 in (1e-3, 10.0):
        left_out = []
        for row in range(80):
            rest = torch.arange(80) != row
            gram = x[rest].T @ x[rest] + l2 * torch.eye(7)
            left_out.append(x[row] @ torch.linalg.solve(gram, x[rest].T @ y[rest]))
        precisions[l2] = mean_average_precision(torch.stack(left_out), train.labels)
    (score,) = result.numbers
    (fit,) = score["fits"]
    chosen = max(precisions, key=lambda l2: precisions[l2])
    assert (fit["l2"], fit["left_out"]) == (chosen, pytest.approx(precisions[chosen]))
    weights = torch.linalg.solve(x.T @ x + chosen * torch.eye(7), x.T @ y)
    guesses = ridge.whiten(train.values, test.values) @ weights
    assert result.scores["all labels"] == pytest.approx(mean_average_precision(guesses, test.labels))
    (few,) = Ridge(shots=3, seeds=2).build()(train, test).numbers
    assert all(4 <= fit["images"] <= 12 for fit in few["fits"])
    samples = ridge.sample(train.labels, 4, 0)
    assert [train.labels[places, k].all().item() for k, places in enumerate(samples)] == [True] * 4
    assert Ridge(shots=99).build().remark(train.labels, CLASSES).startswith("shots=99: 4 of 4")
    with pytest.raises(OptionError, match="shots=99: class 3"):
        Ridge(shots=99).build().check_classes(
            train.labels * torch.tensor([True, True, True, False]), test.labels, CLASSES
        )


def test_linear_layers_by_sigmoids():
    train, test = split(200, 0), split(60, 1)
    rows = torch.cat([train.values, torch.ones(200, 1)], 1)
    (layer,), converged = logistic.fit(rows, train.labels, [0.01], torch.zeros(4, 7))
    assert converged
    for k in range(4):
        model = LogisticRegression(C=1 / (200 * 0.01), tol=1e-8, max_iter=1000).fit(train.values, train.labels[:, k])
        assert np.allclose(layer[k, :-1], model.coef_[0], atol=2e-3)
        assert layer[k, -1].item() == pytest.approx(model.intercept_[0], abs=2e-3)
    for probe in (Logistic(l2s=[0.1, 0.01]).build(), Sgd(learning_rates=[0.1, 0.5], epochs=4, batch_size=50).build()):
        result = probe(train, test)
        assert list(result.scores) == ["train", "validation", "test"]
        assert result.scores["test"] > share_of_class(test.labels) + 0.2
        assert result.predictions is None
