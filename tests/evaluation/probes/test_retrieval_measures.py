"""Retrieval metrics equal their definitions in plain loops."""

import pytest
import torch
import torch.nn.functional as F

from ssvit.evaluation.probes.retrieval import measure
from ssvit.options import UserError


def unit(count: int, seed: int) -> torch.Tensor:
    return F.normalize(torch.randn(count, 16, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("inside", [False, True], ids=["other queries", "queries among the images"])
def test_metrics_equal_loops(inside, monkeypatch):
    monkeypatch.setattr("ssvit.evaluation.probes.retrieval._BLOCK", 500)  # a few queries at a time
    images, labels = unit(120, 6), torch.randint(8, (120,), generator=torch.Generator().manual_seed(5))
    labels[labels == 7] = 6
    labels[17] = 7  # the only one of its class
    rows = torch.tensor([17, 3, 60, 100, 5])
    queries, query_labels = (images[rows], labels[rows]) if inside else (unit(5, 7), torch.tensor([9, 0, 3, 6, 7]))
    expected: dict[str, list[float]] = {}
    for row, label, cosines in zip(rows.tolist(), query_labels.tolist(), (queries @ images.T).tolist(), strict=True):
        order = sorted((i for i in range(120) if not inside or i != row), key=lambda i: (-cosines[i], i))
        hits = [labels[i].item() == label for i in order]
        if any(hits):
            precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits)) if hits[i]]
            values = {"mAP": sum(precisions) / sum(hits)}
            for k in (1, 20):
                values |= {f"recall@{k}": float(any(hits[:k])), f"precision@{k}": sum(hits[:k]) / k}
            for name, value in values.items():
                expected.setdefault(name, []).append(value)
    found = measure(queries, query_labels, images, labels, ks=(1, 20), excluded=rows if inside else None)
    assert len(expected["mAP"]) == 4
    assert {name: values.tolist() for name, values in found.items()} == {
        name: pytest.approx(values) for name, values in expected.items()
    }


def test_queries_without_relevant_images_are_an_error():
    with pytest.raises(UserError):
        measure(unit(2, 1), torch.tensor([3, 4]), unit(5, 0), torch.zeros(5, dtype=torch.int64), ks=(1,))
