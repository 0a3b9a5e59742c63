"""Retrieval metrics equal their definitions in plain loops."""

import pytest
import torch
import torch.nn.functional as F

from ssvit.evaluation.neighbours import Flat, Neighbours, nearest
from ssvit.evaluation.probes.retrieval import average_precisions, measure
from ssvit.options import OptionError, UserError


def unit(count: int, seed: int) -> torch.Tensor:
    return F.normalize(torch.randn(count, 16, generator=torch.Generator().manual_seed(seed)))


def by_loops(rankings, query_labels, labels, own, ks):
    """By the definitions; also mAP over the whole ranking."""
    sums = {f"{name}@{k}": [] for name in ("recall", "precision", "map") for k in ks} | {"map": []}
    for order, label, row in zip(rankings, query_labels, own, strict=True):
        relevant = sum(other == label and i != row for i, other in enumerate(labels))
        if label == -1 or relevant == 0:
            continue
        hits = [labels[i] == label for i in order]
        for k in (*ks, None):
            precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(k or len(hits)) if hits[i]]
            sums[f"map@{k}" if k else "map"].append(sum(precisions) / min(k or len(hits), relevant))
            if k:
                sums[f"recall@{k}"].append(float(any(hits[:k])))
                sums[f"precision@{k}"].append(sum(hits[:k]) / k)
    return {name: sum(values) / len(values) for name, values in sums.items()} | {"queries": len(sums["map"])}


@pytest.mark.parametrize("inside", [False, True], ids=["other queries", "queries among the images"])
def test_metrics_equal_loops(inside, monkeypatch):
    monkeypatch.setattr("ssvit.evaluation.probes.retrieval._BLOCK", 500)  # a few queries at a time
    images, queries = unit(120, 6), unit(10, 7)
    labels = torch.randint(-1, 9, (120,), generator=torch.Generator().manual_seed(5))
    labels[labels == 7] = 8
    labels[17] = 7  # the only one of its class
    own = torch.tensor([17, 3, -1, 60, 100, 5, 6, 7, 8, 9]) if inside else torch.full((10,), -1)
    query_labels = torch.tensor([7, 0, -1, 3, 8, 12, 1, 2, 0, 5])
    queries = torch.where((own >= 0)[:, None], images[own.clamp(min=0)], queries)
    query_labels = torch.where(own >= 0, labels[own.clamp(min=0)], query_labels)
    similarities = (queries @ images.T).tolist()
    rankings = [
        sorted((i for i in range(120) if i != row), key=lambda i, cosines=cosines: (-cosines[i], i))
        for cosines, row in zip(similarities, own.tolist(), strict=True)
    ]
    expected = by_loops(rankings, query_labels.tolist(), labels.tolist(), own.tolist(), (1, 3, 20, 40))
    assert expected["queries"] < 10
    excluded = own if inside else None
    neighbours = nearest(Flat().over(images), queries, 40, own=excluded)
    metrics = measure(neighbours, query_labels, labels, own=excluded, ks=(1, 3, 20, 40))
    metrics["map"] = average_precisions(queries, query_labels, images, labels, own=excluded).mean().item()
    assert metrics == pytest.approx(expected, rel=1e-12)


def test_missing_neighbours_are_not_relevant():
    neighbours = Neighbours(torch.tensor([[0.9, -torch.inf]]), torch.tensor([[1, -1]]))
    metrics = measure(neighbours, torch.tensor([0]), torch.tensor([0, 0, 0]), ks=(2,))
    assert metrics == {"recall@2": 1, "precision@2": 0.5, "map@2": 0.5, "queries": 1}


@pytest.mark.parametrize(
    ("query_labels", "labels", "k", "error"),
    [([-1, -1], [-1] * 5, 1, UserError), ([3, 4], [0] * 5, 1, UserError), ([0, 0], [0] * 5, 4, OptionError)],
)
def test_queries_without_relevant_images_and_too_many_neighbours_are_errors(query_labels, labels, k, error):
    neighbours = nearest(Flat().over(unit(5, 0)), unit(2, 1), 3)
    with pytest.raises(error):
        measure(neighbours, torch.tensor(query_labels), torch.tensor(labels), ks=(k,))
