"""The vote of neighbours is what a plain loop counts."""

import math
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from sklearn.preprocessing import StandardScaler

from ssvit.errors import OptionError
from ssvit.evaluation.features import Features
from ssvit.evaluation.options import HNSW, IVF
from ssvit.evaluation.probes.knn import vote
from ssvit.evaluation.probes.options import Knn


def features(count: int, d: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes that overlap: features (count, d) and labels (count,)."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, d, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(classes, (count,), generator=generator)
    return centres[labels] + 2 * torch.randn(count, d, generator=generator), labels


def knn(train, train_labels, test, test_labels, *, classes, **options):
    """Accuracy by k."""
    names = tuple(map(str, range(classes)))
    both = Features(train, train_labels, names), Features(test, test_labels, names)
    return Knn(**options).build()(*both).numbers["test"]


def plain(similarities, indices, labels, truth, temperature, k):
    """Compute the accuracy by a loop: the class with most votes; ties are decided by the nearest neighbour."""
    correct = 0
    for row, places, true in zip(*map(torch.Tensor.tolist, (similarities, indices, truth)), strict=True):
        votes: dict[int, float] = defaultdict(float)
        for similarity, image in zip(row[:k], places[:k], strict=True):
            votes[labels[image].item()] += 1 if temperature is None else math.exp(similarity / temperature)
        correct += max(votes, key=votes.get) == true
    return correct / len(truth)


@pytest.mark.parametrize("temperature", [0.1, 0.07, None])
def test_accuracy_is_that_of_a_loop(temperature):
    train, train_labels = features(600, 16, 12, seed=0)
    test, test_labels = features(101, 16, 12, seed=1)
    options = {"classes": 12, "temperature": temperature, "k": (1, 10, 20, 100, 200)}
    scores = knn(train, train_labels, test, test_labels, **options)
    nearest = (F.normalize(test.double()) @ F.normalize(train.double()).T).sort(descending=True)
    for k, score in scores.items():
        assert score == plain(*nearest, train_labels, test_labels, temperature, k)
    assert len(set(scores.values())) > 2


@pytest.mark.parametrize(
    ("voters", "weights", "winner"),
    [
        ([3, 1, 1, 3], [1.0, 1.0, 1.0, 1.0], 3), ([1, 3, 3, 1], [1.0, 1.0, 1.0, 1.0], 1),
        ([0, 1, 1], [1.0, 1.0, 1.0], 1), ([0, 1, 1], [1.0, 0.1, 0.1], 0), ([2], [1e-300], 2),
    ],
)  # fmt: skip
def test_the_largest_sum_of_weights_wins_and_the_nearer_class_of_equal_ones(voters, weights, winner):
    assert vote(torch.tensor([voters]), torch.tensor([weights], dtype=torch.float64), 4).tolist() == [winner]


def test_small_temperatures_do_not_overflow():
    assert knn(torch.eye(3), torch.arange(3), torch.eye(3), torch.arange(3), classes=9, temperature=1e-4, k=2) == {2: 1}


def test_standardised_features_have_the_neighbours_that_sklearns_scaling_gives():
    train, labels = features(300, 16, 3, seed=0)
    test, truth = features(200, 16, 3, seed=1)
    noise = torch.Generator().manual_seed(2)
    train, test = (torch.cat([one, 99 * torch.randn(len(one), 4, generator=noise) + 9], 1) for one in (train, test))
    scaler = StandardScaler().fit(train.double().numpy())
    scaled = [torch.from_numpy(scaler.transform(values.double().numpy())) for values in (train, test)]
    found = knn(train, labels, test, truth, classes=3, k=[5], standardize=True)
    assert found == knn(scaled[0], labels, scaled[1], truth, classes=3, k=[5])
    assert found[5] > knn(train, labels, test, truth, classes=3, k=[5])[5] + 0.2
    assert Knn(k=5, standardize=True).build().name == "knn5_standardized"


def test_the_image_itself_is_left_out():
    train, labels = features(80, 8, 3, seed=0)
    both = 2 * [Features(train, labels, "abc")]
    result = Knn(k=[1, 5]).build()(*both, choose=True)
    nearest = F.normalize(train.double()) @ F.normalize(train.double()).T
    ordered = nearest.fill_diagonal_(-2).sort(descending=True)
    expected = {k: plain(*ordered, labels, labels, 0.07, k) for k in (1, 5)}
    assert result.numbers["leave_one_out"] == expected
    assert result.choice == (expected[5],)
    assert result.scores["1-NN"] == 1 > expected[1]


IMAGES, LABELS = features(30, 4, 3, seed=0)


def test_an_approximate_index_votes_as_the_exact_one_where_it_finds_all():
    both = 2 * [Features(IMAGES, LABELS, "abc")]
    exact = Knn(k=[1, 5]).build()(*both).scores
    for index in (HNSW(), IVF(nlist=4, nprobe=4)):
        probe = Knn(k=[1, 5], index=index).build()
        assert probe(*both).scores == exact
        assert probe.name == f"knn5_{type(index).__name__.lower()}"
    with pytest.raises(OptionError, match=r"^k=20: "):
        Knn(k=[20], index=IVF(nlist=4, nprobe=1)).build()(*both)
