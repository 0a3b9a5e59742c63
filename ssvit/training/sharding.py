"""Sharded models (FSDP2): each process holds a shard of every weight, of its gradient and of the optimiser's state.

The weights of a layer are gathered only while the layer computes. The weights are DTensors with a local shard.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ssvit.models.block import Block
from ssvit.objectives.base import Objective
from ssvit.objectives.teacher import whole


def shard(objective: Objective, device: torch.device, processes: int, *, half: bool, compiles: bool) -> Objective:
    """Shard an objective in place and return it. Buffers are not sharded and keep their data type.

    Args:
        objective: The objective.
        device: The device of this process.
        processes: Number of processes.
        half: Whether layers compute in bfloat16; gradients are always reduced in float32.
        compiles: Whether to compile each layer. The graphs exclude the hooks that gather the weights of a layer: torch
            2.11 fails to compile these on a GPU.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if half:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(device.type, (processes,))
    layers = [part for part in objective.modules() if isinstance(part, Block)]
    for layer in layers if compiles else ():
        layer.forward = torch.compile(layer.forward)  # type: ignore[method-assign]
    for unit in (*layers, objective):
        sharded = fully_shard(unit, mesh=mesh, mp_policy=policy)
        # gloo returns the sum when the mean is requested (torch's issue 162338).
        sharded.set_force_sum_reduction_for_comms(mesh.device_type == "cpu")
    return objective


def shard_of(full: Tensor, like: Any) -> Tensor:
    """Return this process's shard of a full tensor, sharded like another one; the tensor itself without shards."""
    if not hasattr(like, "device_mesh"):
        return full
    from torch.distributed.tensor import distribute_tensor

    # All processes have the full tensor; each takes its shard.
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).to_local()


class Twin:
    """Copy an objective before sharding, without its weights and with shared buffers.

    The hooks of a sharded model wait for all processes; the copy has no hooks, so that a single process can use it.

    Args:
        objective: The objective before sharding.
        device: Device of the weights.
    """

    def __init__(self, objective: Objective, device: torch.device) -> None:
        empty = {
            id(weight): nn.Parameter(weight.new_empty(0, device=device), weight.requires_grad)
            for weight in objective.parameters()
        }
        self.objective = copy.deepcopy(objective, empty | {id(buffer): buffer for buffer in objective.buffers()})

    @contextmanager
    def filled(self, objective: Objective) -> Iterator[Objective]:
        """Yield the copy with the gathered weights and the buffers of the sharded objective, in its precision."""
        for copied, part in zip(self.objective.modules(), objective.modules(), strict=True):
            copied._buffers.update(part._buffers)
        weights = dict(self.objective.named_parameters())
        for name, sharded in objective.named_parameters():
            weights[name].data = whole(sharded.detach())
        try:
            yield self.objective
        finally:
            for weight in weights.values():
                weight.data = weight.new_empty(0)
