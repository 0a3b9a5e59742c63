"""A batch carries views, labels, slots and targets together: to a device, in parts, and joined from parts."""

import pytest
import torch

from ssvit.data.batch import Batch


def batch(count: int, first: int = 0, *, labelled: bool = True, targets: bool = True, indexed: bool = True) -> Batch:
    """Return a batch in which every tensor is a function of the slots."""
    slots = torch.arange(first, first + count)
    views = {
        "global": slots.view(-1, 1, 1, 1, 1).expand(-1, 2, 3, 4, 4).byte(),
        "local": slots.view(-1, 1, 1, 1, 1).byte(),
    }
    masks, boxes = slots.view(-1, 1, 1).expand(-1, 4, 4).byte(), slots.view(-1, 1, 1).expand(-1, 2, 4).float()
    further = {"masks": masks, "boxes": boxes} if targets else None
    return Batch(views, slots * 2 if labelled else None, slots, further, indices=slots * 3 if indexed else None)


def same(one: Batch, other: Batch) -> bool:
    pairs = zip(one.tensors, other.tensors, strict=True)
    names = [
        (list(each.views), each.labels is None, each.targets and list(each.targets), each.indices is None)
        for each in (one, other)
    ]
    return names[0] == names[1] and all(a.dtype == b.dtype and a.equal(b) for a, b in pairs)


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("targets", [True, False])
@pytest.mark.parametrize("labelled", [True, False])
def test_all_tensors_of_a_batch_go_together(labelled, targets, indexed):
    kind = {"labelled": labelled, "targets": targets, "indexed": indexed}
    whole, parts = batch(150, **kind), [batch(64, **kind), batch(64, 64, **kind), batch(22, 128, **kind)]
    assert len(whole.tensors) == 3 + labelled + 2 * targets + indexed
    assert same(Batch.joined(parts), whole)
    assert same(whole.map(lambda tensor: tensor[64:128]), parts[1])
    moved = whole.to("meta")
    assert {tensor.device.type for tensor in moved.tensors} == {"meta"}
    assert (moved.targets is None) == (not targets)
