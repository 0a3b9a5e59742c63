"""Predict the memory of each process of a sharded run without GPUs: python -m benchmarks.memory encoder=h …

Usage: python -m benchmarks.memory encoder=h data.image_size=224 recipe.optimizer=adamw recipe.precision=bf16-mixed
ranks=[8,512] images=[64]. All options of `ssvit pretrain` apply. For each case, rank 0 runs two steps of ssvit's loop
on fake tensors (shapes without data) in torch's fake process group (collectives that return immediately). torch's
memory tracker for FSDP2 counts the storages that are alive in the second step.

With measure=true, gloo processes also run the same steps on this machine's CPU. Their memory is measured without the
tracker: by the events of torch's allocator, and by the operating system.

The fake tensors are on the CPU, since autograd requires a CUDA driver for tensors on a GPU. Attention and layer norms
are computed as on a GPU under autocast: attention by the fused operator, layer norms in float32. The prediction does
not include the CUDA context, buffers of NCCL and cuBLAS, fragmentation, and changes by torch.compile.
"""

import gc
import json
import multiprocessing
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from ssvit.cli import benchmark
from ssvit.config.composed import Config
from ssvit.config.declaration import Count, Name
from ssvit.data.batch import Batch, named
from ssvit.errors import OptionError, aligned, file_to_write
from ssvit.models import block
from ssvit.objectives.teacher import local
from ssvit.training import launch
from ssvit.training.benchmark import Steps
from ssvit.training.options import Pretrain
from ssvit.training.session import build_objective

T = TypeVar("T")
# The freed blocks of a measured process return to the operating system at once.
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_BUFFERS = ("Unsharded Param", "Unsharded Grad", "All Gather", "Reduce Scatter", "Buffer", "Inputs")


class Memory(Pretrain):
    """The sharded training step whose memory is predicted."""

    ranks: Sequence[Count] = (1, 8, 64, 512)
    """Numbers of processes."""
    images: Sequence[Count] = (64,)
    """Images of a micro-batch in each process; the global batch has this number times ranks and recipe.accumulate."""
    measure: bool = False
    """Measure real processes on this machine's CPU, too, as many as `ranks`."""
    output: Name | None = None
    """JSON file for the bytes; None: no file."""


@dataclass(frozen=True)
class Prediction:
    """Memory of rank 0, which has the largest shards, in bytes.

    Attributes:
        weights: Shards of the weights.
        gradients: Shards of the gradients at the start of the optimiser's update.
        optimizer: Shards of the optimiser's state.
        activations: Activations and temporary tensors at the peak.
        buffers: Gathered weights, unsharded gradients, buffers of collectives, averaged weights and images at the peak.
        peak: Maximum of the sum of all tensors in a step. It can be less than the sum of all values above, since most
            activations are freed before the last gradient is computed.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    peak: int


@dataclass(frozen=True)
class Measurement:
    """Peak memory of rank 0 in a real step, in bytes.

    Attributes:
        allocated: Size of the tensors that exist between steps plus the peak of the allocator's events in a step.
        resident: Peak resident memory without mapped files, minus the value before the model was built.
    """

    allocated: int
    resident: int


def cases(config: Config) -> list[Config]:
    """Return a configuration for each number of processes and of images."""
    options: Memory = config.options
    if options.objective.needs_labels:
        raise OptionError("objective", config.choices["objective"], "must be an objective without labels")
    return [
        config.changed(
            {
                "recipe.batch_size": images * ranks * options.recipe.accumulate,
                "recipe.backend": "eager",
                "launch.accelerator": "cpu",
                "launch.devices": ranks,
                "launch.strategy": "fsdp",
            }
        )
        for ranks in options.ranks
        for images in options.images
    ]


def in_processes(work: Callable[..., T], config: Config, count: int) -> T:
    """Call work(rank, port=…, config=…) in new processes and return the result of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context, max_tasks_per_child=1) as pool:
        first, *_ = pool.map(partial(work, port=port, config=config), range(count))
        return first


def join(rank: int, port: int, config: Config) -> None:
    """Describe this process as torchrun would."""
    ranks = str(config.options.launch.devices)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="memory")
    torch.set_num_threads(1)


def use_operators_of_gpus() -> None:
    """Replace attention and layer norms by the operators of a GPU under autocast, until this process ends."""

    def forward(self: nn.LayerNorm, input: Tensor) -> Tensor:
        weight, bias = (None if value is None else value.float() for value in (self.weight, self.bias))
        return F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps)

    block.attend = F.scaled_dot_product_attention  # type: ignore[assignment]  # the same positional arguments
    nn.LayerNorm.forward = forward  # type: ignore[method-assign]


def build(config: Config, mode: FakeTensorMode | None) -> tuple[Steps, list[Tensor]]:
    """Build the training steps of a sharded model.

    Args:
        config: One of `cases`.
        mode: Mode of fake tensors; None: real tensors.

    Returns:
        The steps, and the tensors of the micro-batch and of the moving average.
    """
    use_operators_of_gpus()
    recipe = config.options.recipe
    processes = launch.start(recipe, config.options.launch)
    objective = build_objective(config.options)
    encoder = objective.encoder
    pixels = torch.zeros(1, encoder.channels, *encoder.image_size, dtype=torch.uint8)
    views = named(config.options.build_part("data.augment")(pixels, torch.arange(1), recipe.seed))
    count = recipe.batch_size // (processes.world * recipe.accumulate)
    with mode or nullcontext():
        if mode is not None:  # the initialisation depends on values, which fake tensors do not have
            objective.to_empty(device=processes.device)
        views = {name: view.new_zeros(count, *view.shape[1:]) for name, view in views.items()}
        batch = Batch(views, None, torch.arange(count))
    steps = Steps(processes, objective, recipe, batch)
    average = steps.state.average
    return steps, [*batch.tensors, *(() if average is None else average.by_name.values())]


def predict(rank: int, port: int, config: Config) -> Prediction:
    """Predict the memory of rank 0 by two steps on fake tensors. The process must be new."""
    join(rank, port, config)
    ranks = config.options.launch.devices
    torch.distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    steps, inputs = build(config, mode)
    optimizer = steps.state.optimizer
    tracker = FSDPMemTracker(steps.state.objective, optimizer)
    tracker.track_inputs(tuple(inputs))
    snapshots: list[dict[str, int]] = []

    def read(moment: str) -> None:
        (sizes,) = tracker.get_tracker_snapshot(moment).values()
        snapshots.append({getattr(kind, "value", kind): size for kind, size in sizes.items()})

    for _ in range(2):  # the first step creates the optimiser's state, and DTensor infers its shapes with full tensors
        with mode, tracker:  # entering the tracker resets its peak
            # Its statistics of modules are those of one forward pass, and an update may have several micro-batches.
            handles = [
                steps.state.objective.register_forward_pre_hook(lambda *_: tracker.reset_mod_stats(), prepend=True),
                optimizer.register_step_pre_hook(lambda *_: read("current")),
            ]
            steps()
            for handle in handles:
                handle.remove()
    read("peak")
    *_, update, peak = snapshots
    return Prediction(
        weights=update["Sharded Param"],
        gradients=update["Sharded Grad"],
        optimizer=update["OptState"],
        activations=peak["Activation"] + peak["Temp"],
        buffers=sum(peak[kind] for kind in _BUFFERS),
        peak=peak["Total"],
    )


def measure(rank: int, port: int, config: Config) -> Measurement:
    """Measure the memory of a real process, in the second and the third step."""
    join(rank, port, config)
    before = _resident("RssAnon")
    steps, inputs = build(config, None)
    steps()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    steps()
    resident = _resident("VmHWM") - _resident("RssFile") - before
    objective, optimizer = steps.state.objective, steps.state.optimizer
    moments = [value for values in optimizer.state.values() for value in values.values()]
    kept = (*objective.parameters(), *objective.buffers(), *moments, *inputs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        steps()
    recorded = profiler.profiler and profiler.profiler.kineto_results
    assert recorded
    events = [event for event in recorded.events() if event.name() == "[memory]"]
    added = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    launch.destroy_process_group()
    return Measurement(allocated=sum(local(tensor).nbytes for tensor in kept) + added, resident=resident)


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def run(config: Config) -> None:
    """Predict the memory of each case, measure it if requested, and print a table."""
    options: Memory = config.options
    if options.output is not None:
        file_to_write("output", options.output)
    os.environ.update(_MALLOC)
    rows: list[dict[str, int]] = []
    for case in cases(config):
        ranks, recipe = case.options.launch.devices, case.options.recipe
        row = {"ranks": ranks, "images": recipe.batch_size // (ranks * recipe.accumulate)}
        row |= asdict(in_processes(predict, case, 1))
        if options.measure:
            row |= asdict(in_processes(measure, case, ranks))
        rows.append(row)
    print(f"memory of a process in MB, {config.choices['objective']}, encoder={config.choices['encoder']}")
    print("\n".join(table(rows)))
    if options.output is not None:
        Path(options.output).write_text(json.dumps(rows, indent=2) + "\n")


def table(rows: Sequence[dict[str, int]]) -> list[str]:
    """Return the lines of a table in megabytes; a measured value is followed by the error of the predicted peak."""
    header, *_ = rows
    lines = [[f"{name} (error)" if name in Measurement.__annotations__ else name for name in header]]
    for row in rows:
        line = []
        for name, value in row.items():
            cell = str(value) if name in ("ranks", "images") else f"{value / 1e6:,.1f}"
            line.append(f"{cell} ({row['peak'] / value - 1:+.1%})" if name in Measurement.__annotations__ else cell)
        lines.append(line)
    return aligned(lines)


command = replace(benchmark.command, run=run, options=Memory, common=("ranks", "images", "measure", "output"))

if __name__ == "__main__":
    command.main(sys.argv[1:])
