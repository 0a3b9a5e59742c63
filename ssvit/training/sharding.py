"""Sharded models (FSDP2): each process holds a shard of every weight, of its gradient and of the optimiser's state.

The weights of a layer are gathered only while the layer computes. The weights are DTensors with a local shard.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ssvit.models.block import Block
from ssvit.objectives.base import Objective


def is_sharded(fabric: Fabric) -> bool:
    """Return whether the strategy shards the model."""
    return isinstance(fabric.strategy, ModelParallelStrategy)


def strategy(*, half: bool) -> ModelParallelStrategy:
    """Return Fabric's strategy for a sharded model. Buffers are not sharded and keep their data type.

    Args:
        half: Whether layers compute in bfloat16; gradients are always reduced in float32.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if half:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)

    def shard(objective: nn.Module, nodes: DeviceMesh) -> nn.Module:
        mesh = init_device_mesh(nodes.device_type, (nodes.size(),))
        layers = [part for part in objective.modules() if isinstance(part, Block)]
        for unit in (*layers, objective):
            sharded = fully_shard(unit, mesh=mesh, mp_policy=policy)
            # gloo returns the sum when the mean is requested (torch's issue 162338).
            sharded.set_force_sum_reduction_for_comms(mesh.device_type == "cpu")
        return objective

    return ModelParallelStrategy(shard)


def compile_layers(objective: Objective) -> None:
    """Compile each layer, in place, before the model is sharded.

    The graphs exclude the hooks that gather the weights of a layer: torch 2.11 fails to compile these on a GPU.
    """
    for part in objective.modules():
        if isinstance(part, Block):
            part.forward = torch.compile(part.forward)  # type: ignore[method-assign]


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor in every process. All processes must call this function."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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
