"""Write sharded checkpoints in the background: each process writes its shards while training continues.

torch.distributed.checkpoint plans the shards of each process and copies them to host memory. A part is a safetensors
file with the layout of torch's HuggingFaceStorageWriter: its header contains the offsets of the shards in the full
tensors. The manifest is written last, so that a process that is killed leaves no incomplete checkpoint, and earlier
checkpoints are unchanged.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from ssvit.checkpoints import storage
from ssvit.checkpoints.manifest import CheckpointError


def save(
    folder: Path,
    step: int,
    states: Mapping[str, Mapping[str, Tensor]],
    entries: Mapping[str, object],
    group: ProcessGroup | None,
) -> Callable[[], None]:
    """Start writing a sharded checkpoint in the background.

    All processes must call this function. The states are copied before it returns, so they may change afterwards.

    Args:
        folder: The run folder.
        step: Number of complete updates.
        states: As for `storage.save`, with tensors that may be sharded.
        entries: Entries of the manifest.
        group: A gloo process group that is used for nothing else.

    Returns:
        A function that waits until the checkpoint is complete, and raises CheckpointError in all processes if one of
        them could not write its part.
    """
    flat = {f"{state}/{name}": tensor for state, tensors in states.items() for name, tensor in tensors.items()}
    writer = _Writer(storage.Pending(folder, step, entries))
    future = cast("Future[Metadata]", async_save(flat, storage_writer=writer, process_group=group))

    def wait() -> None:
        try:
            future.result()
        except CheckpointException as error:
            raise CheckpointError(str(error.failures[min(error.failures)][0])) from None

    return wait


class _Writer(StorageWriter):
    def __init__(self, pending: storage.Pending) -> None:
        self._pending = pending

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None:
        if is_coordinator:
            self._pending.begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=number) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "torch.futures.Future[list[WriteResult]]":
        tensors = {item.index.fqn: cast(Tensor, planner.resolve_data(item)) for item in plan.items}
        shard_offsets = {
            item.index.fqn: {"saved_offsets": list(item.index.offset or [0] * tensors[item.index.fqn].ndim)}
            for item in plan.items
        }
        for name, tensor in tensors.items():
            state, _, key = name.partition("/")
            storage.check_finite(self._pending.step, state, {key: tensor})
        file, checksum = f"part_{plan.storage_data:05d}.safetensors", ""
        if tensors:
            checksum = self._pending.add(file, tensors, {storage.PLACES: json.dumps(shard_offsets)})
        results = [WriteResult(item.index, tensors[item.index.fqn].nbytes, (file, checksum)) for item in plan.items]
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._pending.complete(dict(result.storage_data for part in results for result in part))
