"""The vote of neighbours is what the published code counts, and what a plain loop counts."""

import math
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from lightly.utils.benchmarking.knn import knn_predict
from sklearn.preprocessing import StandardScaler

from ssvit.evaluation.features import Features
from ssvit.evaluation.neighbours import Neighbours
from ssvit.evaluation.neighbours_options import HNSW, IVF
from ssvit.evaluation.probes import knn as module
from ssvit.evaluation.probes.knn import Knn, vote
from ssvit.evaluation.probes.knn_options import KNN_TEMPERATURES
from ssvit.options import OptionError


def features(count: int, d: int, classes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes that overlap: features (count, d) and labels (count,)."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, d, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(classes, (count,), generator=generator)
    return centres[labels] + 2 * torch.randn(count, d, generator=generator), labels


NEIGHBOURS = (1, 10, 20, 100, 200)


def knn(train, train_labels, test, test_labels, *, classes, own=None, **options):
    """Top-1 and top-5 by k."""
    names = tuple(map(str, range(classes)))
    both = Features(train, train_labels, names), Features(test, test_labels, names)
    numbers, _ = Knn(**options)._measured(*both, own)
    return {k: (numbers["top1"][k], numbers["top5"][k]) for k in numbers["top1"]}


def neighbours(similarities: list, labels: list) -> tuple[Neighbours, torch.Tensor]:
    """Neighbours (one query a row) of such similarities, each another image, and the labels of these images."""
    shape = torch.tensor(similarities).shape
    return Neighbours(torch.tensor(similarities), torch.arange(shape.numel()).view(shape)), torch.tensor(
        labels
    ).flatten()


def plain(nearest: Neighbours, labels: torch.Tensor, truth: torch.Tensor, temperature: float | None, k: int) -> tuple:
    """Top-1 and top-5 as a loop: classes by their votes, of equals the one first met."""
    right = [0, 0]
    for similarities, indices, true in zip(*map(torch.Tensor.tolist, (*nearest, truth)), strict=True):
        votes: dict[int, float] = defaultdict(float)
        for similarity, image in zip(similarities[:k], indices[:k], strict=True):
            votes[labels[image].item()] += 1 if temperature is None else math.exp(similarity / temperature)
        ranked = sorted(votes, key=votes.get, reverse=True)
        right[0] += true in ranked[:1]
        right[1] += true in ranked[:5]
    return right[0] / len(truth), right[1] / len(truth)


def test_every_protocol_counts_what_a_loop_counts(monkeypatch):
    monkeypatch.setattr(module, "_VOTES", 1500)  # in parts
    train, train_labels = features(600, 16, 12, seed=0)
    test, test_labels = features(101, 16, 12, seed=1)
    found = {
        (name, k): score
        for name in KNN_TEMPERATURES
        for k, score in knn(train, train_labels, test, test_labels, classes=12, protocol=name, k=NEIGHBOURS).items()
    }
    similarities = F.normalize(test.double()) @ F.normalize(train.double()).T
    nearest = Neighbours(*similarities.sort(descending=True))
    for (name, k), score in found.items():
        assert score == plain(nearest, train_labels, test_labels, KNN_TEMPERATURES[name], k), (name, k)
    assert len(set(found.values())) > 10


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_instance_discrimination_is_lightlys(classes):
    train, train_labels = features(1000, 24, classes, seed=0)
    test, test_labels = features(300, 24, classes, seed=1)
    answer = knn_predict(F.normalize(test), F.normalize(train).T, train_labels, classes, knn_k=200, knn_t=0.1)
    hit = answer == test_labels[:, None]
    found = knn(train, train_labels, test, test_labels, classes=classes, protocol="instance_discrimination", k=[200])
    assert found[200][0] == hit[:, 0].double().mean().item()
    # Some classes have no vote of 200: lightly puts them in an order of its own, here they are never right.
    assert found[200][1] == hit[:, :5].any(1).double().mean().item()


def test_dino_is_the_softmax_of_similarities():
    """DINOv2's form: the weights of a query sum to one."""
    train, train_labels = features(500, 8, 7, seed=0)
    test, test_labels = features(200, 8, 7, seed=1)
    similarities, indices = (F.normalize(test.double()) @ F.normalize(train.double()).T).topk(20)
    votes = torch.einsum("mk,mkc->mc", (similarities / 0.07).softmax(1), F.one_hot(train_labels[indices], 7).double())
    for name in ("dino", "solo_learn"):
        found = knn(train, train_labels, test, test_labels, classes=7, protocol=name, k=[20])
        assert found[20][0] == (votes.argmax(1) == test_labels).double().mean().item()


def test_equal_votes_go_to_the_class_of_the_nearer():
    nearest, labels = neighbours([[0.9, 0.8, 0.7, 0.6]], [[3, 1, 1, 3]])
    for truth, right in ((3, 1.0), (1, 0.0)):
        scores = vote(nearest, labels, torch.tensor([truth]), classes=4, temperature=None, k=[2, 3, 4])
        assert (scores < 1).flatten().tolist() == [right, 1 - right, right]


def test_weights_let_one_near_image_outvote_two_far_ones():
    nearest, labels = neighbours([[0.9, 0.5, 0.5]], [[0, 1, 1]])
    for name, right in (("dino", 0), ("instance_discrimination", 0), ("uniform", 1)):
        temperature = KNN_TEMPERATURES[name]
        scores = vote(nearest, labels, torch.tensor([right]), classes=2, temperature=temperature, k=[3])
        assert scores.item() == 0


def test_a_class_without_a_vote_is_never_right():
    nearest, labels = neighbours([[0.9, 0.8]], [[0, 1]])
    for temperature in (None, 0.07, 1e-4):
        for truth, expected in ((0, (1, 1)), (1, (0, 1)), (2, (0, 0))):
            found = vote(nearest, labels, torch.tensor([truth]), classes=3, temperature=temperature, k=[2])
            assert (found.item() < 1, found.item() < 5) == expected


def test_top5_ends_at_the_fifth_class():
    nearest, labels = neighbours([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4]] * 6, [list(range(6))] * 6)
    (ranks,) = vote(nearest, labels, torch.arange(6), classes=6, temperature=0.07, k=[6])
    assert ranks.tolist() == list(range(6))


def test_a_class_that_only_training_images_have_still_takes_votes():
    train, test = torch.eye(3)[[0, 0, 1]], torch.eye(3)[[0, 1]]
    found = knn(train, torch.tensor([9, 9, 1]), test, torch.tensor([0, 1]), classes=10, protocol="uniform", k=[1])
    assert found[1][0] == 0.5


def test_standardised_features_have_the_neighbours_that_sklearns_scaling_gives():
    train, labels = features(300, 16, 3, seed=0)
    test, truth = features(200, 16, 3, seed=1)
    noise = torch.Generator().manual_seed(2)
    train, test = (torch.cat([one, 99 * torch.randn(len(one), 4, generator=noise) + 9], 1) for one in (train, test))
    scaler = StandardScaler().fit(train.double().numpy())
    scaled = [torch.from_numpy(scaler.transform(values.double().numpy())) for values in (train, test)]
    found = knn(train, labels, test, truth, classes=3, k=[5], standardize=True)
    assert found == knn(scaled[0], labels, scaled[1], truth, classes=3, k=[5])
    assert found[5][0] > knn(train, labels, test, truth, classes=3, k=[5])[5][0] + 0.2
    assert Knn(k=5, standardize=True).name == "knn5_standardized"


def test_the_image_itself_is_left_out():
    train, labels = features(80, 8, 3, seed=0)
    leave_one_out = knn(train, labels, train, labels, classes=3, k=[5], own=torch.arange(80))
    assert knn(train, labels, train, labels, classes=3, k=[5])[5] > leave_one_out[5]
    both = 2 * [Features(train, labels, "abc")]
    assert Knn(k=[5])(*both, choose=True).choice == leave_one_out[5][:1]


IMAGES, LABELS = features(30, 4, 3, seed=0)


def test_an_approximate_index_votes_as_the_exact_one_where_it_finds_all():
    both = 2 * [Features(IMAGES, LABELS, "abc")]
    exact = Knn(k=[1, 5])(*both).scores
    for index in (HNSW(), IVF(nlist=4, nprobe=4)):
        probe = Knn(k=[1, 5], index=index)
        assert probe(*both).scores == exact
        assert probe.name == f"knn5_{type(index).__name__.lower()}"
    with pytest.raises(OptionError, match="k=20: the index finds fewer"):
        Knn(k=[20], index=IVF(nlist=4, nprobe=1))(*both)


def test_more_neighbours_than_images_are_refused():
    with pytest.raises(OptionError, match="k=31: must be at most 30, the images to search"):
        Knn(k=[1, 31])(*2 * [Features(IMAGES, LABELS, "abc")])
