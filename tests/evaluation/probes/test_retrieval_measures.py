"""Retrieval metrics equal their definitions in plain loops."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ssvit.errors import UserError
from ssvit.evaluation.features import Features
from ssvit.evaluation.probes.options import Retrieval


def images(count: int, seed: int, *, several: bool = False) -> Features:
    """Features and labels of eight classes; the last one is of no image unless there are several classes an image."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, 16, generator=generator)
    labels = torch.rand(count, 8, generator=generator) < 0.15 if several else torch.arange(count) % 7
    return Features(values, labels, "abcdefgh")


def by_loops(train: Features, test: Features, *, leave_one_out: bool) -> dict[str, list[float]]:
    """The measures of each query that has a relevant image."""
    cosines = (F.normalize(test.values) @ F.normalize(train.values).T).tolist()
    measures: dict[str, list[float]] = {name: [] for name in ("recall@1", "recall@20", "precision@1", "precision@20")}
    measures["mAP"] = []
    for row, of_row in enumerate(cosines):
        others = [i for i in range(len(of_row)) if not leave_one_out or i != row]
        order = sorted(others, key=lambda i: (-of_row[i], i))
        same = (
            train.labels & test.labels[row] if train.labels.ndim == 2 else (train.labels == test.labels[row])[:, None]
        )
        hits = same.any(1)[order].tolist()
        if any(hits):
            precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits)) if hits[i]]
            measures["mAP"].append(sum(precisions) / sum(hits))
            for k in (1, 20):
                measures[f"recall@{k}"].append(any(hits[:k]))
                measures[f"precision@{k}"].append(sum(hits[:k]) / k)
    return measures


@pytest.mark.parametrize(("several", "standardize"), [(False, False), (False, True), (True, False)])
def test_measures_equal_loops(several, standardize, monkeypatch):
    monkeypatch.setattr("ssvit.evaluation.probes.retrieval._BLOCK", 500)  # a few queries at a time
    train, test = images(120, 6, several=several), images(30, 7, several=several)
    train.values[40:50] = 0  # equally similar to all, so that they are ranked by their index
    if not several:
        train.labels[17] = test.labels[3] = 7  # the only one of its class
        test.labels[4] = 8
    options = Retrieval(k=[1, 20], queries=None, standardize=standardize)
    probe = options.build()
    result = probe(train, test, choose=True)
    if standardize:
        deviation, mean = torch.std_mean(train.values, dim=0, correction=0)
        train, test = (replace(part, values=(part.values - mean) / deviation) for part in (train, test))
    expected = by_loops(train, test, leave_one_out=False)
    assert result.numbers["queries"] == len(expected["mAP"]) < 30
    assert result.per_image.tolist() == pytest.approx(expected["mAP"])
    assert list(result.scores) == list(expected)
    assert result.scores == pytest.approx({name: sum(values) / len(values) for name, values in expected.items()})
    assert options.changed(queries=6).build()(train, test).numbers["queries"] <= 6
    left_out = by_loops(train, train, leave_one_out=True)["mAP"]
    assert result.choice == (pytest.approx(sum(left_out) / len(left_out)),)


def test_queries_without_relevant_images_are_an_error():
    test = images(2, 1)
    test.labels[:] = 7
    with pytest.raises(UserError, match=r"\bretrieval\b"):
        Retrieval(k=1).build()(images(5, 0), test)
