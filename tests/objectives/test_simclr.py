"""Contrastive learning equals lightly's loss and plain loops: views, several processes, the evaluator."""

import math
import os

import pytest
import tiny
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from ranks import child, exit_codes

from ssvit.data.batch import Batch
from ssvit.objectives.base import Objective
from ssvit.objectives.contrastive import similarities, unit


def batch() -> Batch:
    return tiny.views(tiny.simclr())


def test_the_loss_is_lightlys_and_that_of_a_plain_double_loop():
    objective = tiny.simclr()
    projections = tiny.noise(10, 8).double().requires_grad_()
    losses = objective.losses(projections)
    (gradient,) = torch.autograd.grad(losses.mean(), projections)
    theirs = NTXentLoss(temperature=0.2)(*projections.split(5))
    torch.testing.assert_close(losses.mean(), theirs, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs, projections)[0], rtol=1e-9, atol=1e-12)
    vectors = [vector / vector.norm() for vector in projections.detach()]
    for i, one in enumerate(vectors):
        weights = [math.exp(one @ other / 0.2) if j != i else 0.0 for j, other in enumerate(vectors)]
        assert losses[i].item() == pytest.approx(-math.log(weights[(i + 5) % 10] / sum(weights)))
    alike = torch.ones(10, 8)
    torch.testing.assert_close(objective.losses(alike), torch.full((10,), math.log(9)))
    assert objective.chance(5) == math.log(9)


def test_the_head_is_lightlys_with_the_same_names_of_weights():
    head = tiny.simclr(layers=3).head
    peer = SimCLRProjectionHead(head.layers[0].in_features, 16, 8, num_layers=3, batch_norm=False)
    peer.load_state_dict(head.state_dict())
    x = torch.randn(4, head.layers[0].in_features)
    torch.testing.assert_close(head(x), peer(x), rtol=0, atol=0)


def test_gradients_equal_differences():
    assert torch.autograd.gradcheck(tiny.simclr().losses, tiny.noise(6, 3).double().requires_grad_())


def test_only_kept_patches_are_encoded():
    objective, images, lengths = tiny.simclr().eval(), batch().views["global"], []
    hook = objective.encoder.blocks[0].register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    ids = objective.sample(torch.arange(4), seed=3)[0]
    assert all(len(set(row)) == 8 for view in ids.tolist() for row in view)
    objective.project(images, (ids,))
    assert lengths == [1 + 8]
    hook.remove()
    every = (torch.arange(16).expand(4, 2, -1),)
    torch.testing.assert_close(objective.project(images, every), objective.project(images), rtol=1e-4, atol=1e-5)
    assert tiny.simclr(keep=1.0).sample(torch.arange(4), seed=3) == ()
    assert tiny.simclr(keep=0.01).sample(torch.arange(4), seed=3)[0].shape[-1] == 1


def test_cosines_are_in_float32_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = similarities(unit(tiny.noise(8, 4)), unit(tiny.noise(8, 4)), 0, 0.2)
    assert logits.dtype == torch.float32
    assert not logits.equal(logits.bfloat16().float())


def of_one_layer() -> Objective:
    """Return an objective that is traced quickly."""
    objective = tiny.simclr().double()
    objective.encoder.blocks = objective.encoder.blocks[:1]
    return objective


def compiled_in_a_process(rank: int, file: str, world: int, backend: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    objective, whole = of_one_layer(), batch()
    part = slice(2 * rank, 2 * rank + 2)
    noise = objective.sample(whole.slots[part], seed=0)
    compiled = torch.compile(objective, backend=backend, fullgraph=True)
    loss = compiled(Batch({"global": whole.views["global"][part]}, None, whole.slots[part]), noise)["loss"]
    loss.backward()
    gradients = {name: one.grad for name, one in objective.named_parameters() if one.grad is not None}
    torch.save((loss.detach(), gradients), f"{file}.{rank}")
    os._exit(0)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_two_processes_have_ones_gradient_when_compiled(tmp_path, backend):
    file = str(tmp_path / "rendezvous")
    assert exit_codes(child(compiled_in_a_process, rank, file, 2, backend) for rank in range(2)) == [0, 0]
    objective = of_one_layer()
    loss = objective(batch(), objective.sample(torch.arange(4), seed=0))["loss"]
    loss.backward()
    parts = [torch.load(f"{file}.{rank}") for rank in range(2)]
    torch.testing.assert_close(sum(part[0] for part in parts) / 2, loss.detach())
    for name, gradient in parts[0][1].items():
        own = objective.get_parameter(name).grad
        torch.testing.assert_close((gradient + parts[1][1][name]) / 2, own, rtol=1e-9, atol=1e-12, msg=name)
