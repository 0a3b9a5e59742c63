"""Measure the speed of inference by an encoder on this machine."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from ssvit.errors import aligned
from ssvit.kernels import inference, operators
from ssvit.models.encoder import Encoder

Function = Callable[[torch.Tensor], object]
_SECONDS = 0.2  # minimum time of the first function in a round


class Latency(NamedTuple):
    """Speed of an encoder in one setting.

    Attributes:
        path: Name of the function, for ssvit precision and layers: 32, bf16 or bf16 by kernels.
        image_size: Height and width of the images in pixels.
        batch_size: Images in a forward pass.
        threads: Threads of torch.
        images_per_second: Images per second of wall-clock time, from the median time.
        median: Median time of a forward pass in milliseconds.
        slow: 95th percentile of the time of a forward pass in milliseconds.
        ratio: Median over the rounds of the speed relative to the first function.
    """

    path: str
    image_size: tuple[int, int]
    batch_size: int
    threads: int
    images_per_second: float
    median: float
    slow: float
    ratio: float


def paths(encoder: Encoder, device: torch.device) -> dict[str, Function]:
    """Return the features of images (b, c, h, w) by each path, as `ssvit embed` computes them.

    Args:
        encoder: The encoder, which is moved to the device.
        device: The device.
    """
    encoder = encoder.to(device).eval()
    models = {"32": encoder, "bf16": inference.prepared(encoder, "bf16", by_kernels=False)}
    if device.type == "cpu" and operators.library() is not None:
        models["bf16, kernels"] = inference.prepared(encoder, "bf16")

    def features(path: str, images: torch.Tensor) -> torch.Tensor:
        model = models[path]
        with inference.autocast(32 if path == "32" else "bf16", device):
            return model.pooled(model.norm(model.last_layer(images)), model.pooling, images)

    return {path: partial(features, path) for path in models}


@torch.inference_mode()
def latencies(
    functions: Mapping[str, Function],
    shape: tuple[int, int, int],
    *,
    batch_sizes: Sequence[int],
    threads: Sequence[int],
    rounds: int,
    device: torch.device,
) -> Iterator[Latency]:
    """Measure forward passes of functions alternately.

    Args:
        functions: The functions by name; the first is the reference.
        shape: Channels, height and width of the images.
        batch_sizes: Numbers of images in a forward pass.
        threads: Numbers of threads.
        rounds: Number of rounds, after one that does not count.
        device: The device.
    """

    def seconds(function: Function, images: torch.Tensor) -> float:
        began = time.perf_counter()
        function(images)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    before = torch.get_num_threads()
    try:
        for count, size in product(threads, batch_sizes):
            torch.set_num_threads(count)
            images = torch.randint(0, 256, (size, *shape), dtype=torch.uint8).to(device)
            first = next(iter(functions.values()))
            passes = max(1, round(_SECONDS / max(seconds(first, images) for _ in range(2))))
            times: dict[str, list[list[float]]] = {name: [] for name in functions}
            for _ in range(rounds + 1):
                for name, function in functions.items():
                    times[name].append([seconds(function, images) for _ in range(passes)])
            medians = {name: [statistics.median(each) for each in of[1:]] for name, of in times.items()}
            reference = next(iter(medians.values()))
            for name, of in times.items():
                every = sorted(1000 * each for part in of[1:] for each in part)
                middle, slow = statistics.median(every), every[min(len(every) - 1, int(0.95 * len(every)))]
                ratio = statistics.median(a / b for a, b in zip(reference, medians[name], strict=True))
                yield Latency(name, shape[1:], size, count, 1000 * size / middle, middle, slow, ratio)
    finally:
        torch.set_num_threads(before)


def latency_table(title: str, rows: Sequence[Latency]) -> str:
    """Return the results as an aligned table."""
    head = ["path", "pixels", "batch", "threads", "images/s", "median ms", "95 % ms", f"relative to {rows[0].path}"]
    lines = [
        [
            row.path, "x".join(map(str, row.image_size)), str(row.batch_size), str(row.threads),
            f"{row.images_per_second:,.1f}", f"{row.median:.2f}", f"{row.slow:.2f}", f"{row.ratio:.2f} x",
        ]
        for row in rows
    ]  # fmt: skip
    return "\n".join([title, *(f"  {line}".rstrip() for line in aligned([head, *lines]))])
