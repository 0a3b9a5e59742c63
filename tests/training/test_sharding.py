"""A model shared out among processes: one unit for each layer, parts that make up the whole, numbers of one process."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from lightning_fabric import Fabric
from ranks import start
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ssvit.data.batch import Batch
from ssvit.objectives.teacher import local
from ssvit.training import runtime, sharding
from ssvit.training.recipe import Recipe
from ssvit.training.state import State


def with_one_thread(work, folder: Path) -> None:
    torch.set_num_threads(1)
    work(folder)


def spread(work, folder: Path, world: int) -> None:
    """Call a function of this module in so many processes."""
    assert start(with_one_thread, world, work, folder) == [0] * world


@pytest.fixture
def alone():
    """A group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize(("method", "layers"), [("model", 2), ("mae", 3), ("dino", 4)])
def test_each_layer_is_a_unit_of_its_own(alone, method, layers):
    objective = getattr(tiny, method)()
    sharding.strategy(half=False)._parallelize_fn(objective, alone)
    units = [part for part in objective.modules() if isinstance(part, FSDPModule)]
    assert len(units) == layers + 1  # and one for the rest
    assert all(isinstance(weight, torch.distributed.tensor.DTensor) for weight in objective.parameters())


def test_in_half_precision_gradients_are_reduced_in_float32_and_buffers_stay(alone):
    objective = tiny.model()
    before = {name: buffer.clone() for name, buffer in objective.named_buffers()}
    sharding.strategy(half=True)._parallelize_fn(objective, alone)
    with torch.autocast("cpu", torch.bfloat16):
        batch = Batch.of(tiny.pictures(2))
        objective(batch, objective.sample(batch.slots, seed=0))["loss"].backward()
    assert objective.head.weight.dtype == objective.head.weight.grad.dtype == torch.float32
    for unit in objective.modules():
        if isinstance(unit, FSDPModule):
            policy = unit._get_fsdp_state()._mp_policy
            assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    for name, buffer in objective.named_buffers():
        torch.testing.assert_close(buffer, before[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "static"), [({}, True), ({"accumulate": 2}, False), ({"backend": "compile"}, False)]
)
def test_copies_share_gradients_as_they_lie_and_no_buffers(alone, monkeypatch, changes, static):
    recipe = Recipe(**tiny.RECIPE | changes)
    chosen = runtime.strategy({"accelerator": "cpu", "devices": 2, "strategy": "auto"}, recipe, torch.device("cpu"))
    fabric = Fabric(accelerator="cpu", strategy=chosen)
    monkeypatch.setattr(fabric, "_launched", True)
    copies = runtime.spread(fabric, tiny.model(), recipe)._forward_module
    assert isinstance(copies, DistributedDataParallel)
    assert (copies.static_graph, copies.gradient_as_bucket_view) == (static, True)
    assert not getattr(copies, "forward_sync_buffers", copies.broadcast_buffers)


def count(folder: Path) -> None:
    """One step of DINO; writes the bytes that this process holds of the weights and of what follows them."""
    recipe = Recipe(**tiny.RECIPE)
    fabric = runtime.start(recipe, accelerator="cpu", strategy="fsdp")
    state = State(fabric, tiny.dino(), recipe)
    for weight in state.objective.parameters():
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight)
    state.optimizer.step()
    moments = [value for one in state.optimizer.optimizer.state.values() for value in one.values() if value.ndim]
    teacher = [*state.objective.teacher.parameters()]
    parts = {"weights": [*state.objective.parameters()], "teacher": teacher, "average": state.average._average,
             "moments": moments}  # fmt: skip
    held = {name: sum(local(part).nbytes for part in tensors) for name, tensors in parts.items()}
    whole = {name: sum(part.numel() * part.element_size() for part in tensors) for name, tensors in parts.items()}
    Path(folder, f"{fabric.global_rank}.json").write_text(json.dumps([held, whole]))


def test_weights_teacher_average_and_moments_are_shared_out(tmp_path):
    spread(count, tmp_path, 2)
    (one, whole), (other, _) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for name, everything in whole.items():
        assert one[name] + other[name] == everything
        assert max(one[name], other[name]) < 0.6 * everything, name


def build(folder: Path) -> None:
    """Build DINO with weights in the main process alone; write what all processes then have."""
    recipe = Recipe(**tiny.RECIPE)
    fabric = runtime.start(recipe, accelerator="cpu", strategy="fsdp")
    with sharding.building(fabric):
        objective = tiny.dino()
    assert all(weight.is_meta == (fabric.global_rank > 0) for weight in objective.parameters())
    assert not any(buffer.is_meta for buffer in objective.buffers())
    state = State(fabric, objective, recipe)
    weights = {name: sharding.whole(weight.detach()) for name, weight in state.objective.named_parameters()}
    with state.evaluating() as evaluated:
        assert all(torch.equal(weight, weights[name]) for name, weight in evaluated.named_parameters())
    torch.save(weights | dict(state.objective.named_buffers()), folder / f"{fabric.global_rank}.pt")


def test_the_main_process_alone_needs_memory_for_all_weights(tmp_path):
    spread(build, tmp_path, 2)
    expected = dict(tiny.dino().named_parameters()) | dict(tiny.dino().named_buffers())
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
