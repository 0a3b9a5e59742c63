"""A sharded model has one unit per layer, its shards form the complete model, and results equal one process."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from ranks import start
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ssvit.data.batch import Batch
from ssvit.objectives.teacher import local
from ssvit.training import runtime, sharding
from ssvit.training.recipe import Recipe


def in_processes(work, folder: Path, world: int, *arguments) -> None:
    """Call a function of a module in several processes."""
    assert start(work, world, folder, *arguments) == [0] * world


@pytest.fixture
def alone():
    """A group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize(("method", "layers"), [("model", 2), ("mae", 3), ("dino", 4)])
def test_each_layer_is_a_unit_of_its_own(alone, method, layers):
    objective = getattr(tiny, method)()
    sharding.shard(objective, torch.device("cpu"), 1, half=False, compiles=False)
    units = [part for part in objective.modules() if isinstance(part, FSDPModule)]
    assert len(units) == layers + 1  # and one for all other weights
    assert all(isinstance(weight, torch.distributed.tensor.DTensor) for weight in objective.parameters())


def test_in_half_precision_gradients_are_reduced_in_float32_and_buffers_stay(alone):
    objective = tiny.model()
    before = {name: buffer.clone() for name, buffer in objective.named_buffers()}
    sharding.shard(objective, torch.device("cpu"), 1, half=True, compiles=False)
    with torch.autocast("cpu", torch.bfloat16):
        batch = Batch.of_view(tiny.pictures(2))
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
def test_copies_share_gradients_as_they_lie_and_no_buffers(alone, changes, static):
    processes = runtime.Processes(torch.device("cpu"), "32-true", world=2)
    copies = processes.prepare_model(tiny.model(), Recipe(**tiny.RECIPE | changes))
    copies = getattr(copies, "_orig_mod", copies)  # of a compiled module
    assert isinstance(copies, DistributedDataParallel)
    assert (copies.static_graph, copies.gradient_as_bucket_view) == (static, True)
    assert not getattr(copies, "forward_sync_buffers", copies.broadcast_buffers)


def count(folder: Path, optimizer: str) -> None:
    """Run one step of DINO and write the bytes of weights, moments, teacher and average in this process."""
    state, _ = tiny.state(tiny.dino(), strategy="fsdp", optimizer=optimizer)
    for weight in state.objective.parameters():
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight)
    state.optimizer.step()
    moments = [value for values in state.optimizer.state.values() for value in values.values() if value.ndim]
    teacher = [*state.objective.teacher.parameters()]
    parts = {"weights": [*state.objective.parameters()], "teacher": teacher, "average": state.average._average,
             "moments": moments}  # fmt: skip
    held = {name: sum(local(part).nbytes for part in tensors) for name, tensors in parts.items()}
    whole = {name: sum(part.numel() * part.element_size() for part in tensors) for name, tensors in parts.items()}
    Path(folder, f"{state.processes.rank}.json").write_text(json.dumps([held, whole]))
    before = dict(tiny.dino().named_parameters())
    with state.evaluating() as evaluated:  # the gradients were 0, so the average equals the initial weights
        assert all(torch.equal(weight, before[name]) for name, weight in evaluated.named_parameters())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_teacher_average_and_moments_are_shared_out(tmp_path, optimizer):
    in_processes(count, tmp_path, 2, optimizer)
    (one, whole), (other, _) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for name, everything in whole.items():
        assert one[name] + other[name] == everything
        assert max(one[name], other[name]) < 0.6 * everything, name
