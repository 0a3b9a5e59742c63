"""Measure the speed of inference by an encoder on this machine."""

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ssvit.kernels import inference, operators
from ssvit.models.encoder import Encoder
from ssvit.options import aligned

_SECONDS = 0.2  # minimum time of a contender in a round


class Latency(NamedTuple):
    """Speed of an encoder in one setting.

    Attributes:
        path: Precision and layers: 32, bf16 or bf16 by kernels.
        image_size: Height and width of the images in pixels.
        batch_size: Images in a forward pass.
        threads: Threads of torch.
        images_per_second: Images per second of wall-clock time, from the median time.
        median: Median time of a forward pass in milliseconds.
        slow: 95th percentile of the time of a forward pass in milliseconds.
        ratio: Median over the rounds of the speed relative to path 32.
    """

    path: str
    image_size: tuple[int, int]
    batch_size: int
    threads: int
    images_per_second: float
    median: float
    slow: float
    ratio: float


@torch.inference_mode()
def latencies(
    encoder: Encoder, *, batch_sizes: Sequence[int], threads: Sequence[int], rounds: int, device: torch.device
) -> Iterator[Latency]:
    """Measure forward passes of each path alternately.

    Args:
        encoder: The encoder.
        batch_sizes: Numbers of images in a forward pass.
        threads: Numbers of threads.
        rounds: Number of rounds, after one that does not count.
        device: The device.
    """
    encoder = encoder.to(device).eval()
    paths = {"32": encoder, "bf16": inference.prepared(encoder, "bf16", by_kernels=False)}
    if device.type == "cpu" and operators.library() is not None:
        paths["bf16, kernels"] = inference.prepared(encoder, "bf16")

    def seconds(path: str, images: torch.Tensor) -> float:
        began = time.perf_counter()
        with inference.autocast(32 if path == "32" else "bf16", device):
            _features(paths[path], images)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    before = torch.get_num_threads()
    try:
        for count in threads:
            torch.set_num_threads(count)
            for size in batch_sizes:
                shape = size, encoder.channels, *encoder.image_size
                images = torch.randint(0, 256, shape, dtype=torch.uint8).to(device)
                passes = max(1, round(_SECONDS / max(seconds("32", images) for _ in range(2))))
                times: dict[str, list[list[float]]] = {path: [] for path in paths}
                for _ in range(rounds + 1):
                    for path in paths:
                        times[path].append([seconds(path, images) for _ in range(passes)])
                medians = {path: [statistics.median(each) for each in of[1:]] for path, of in times.items()}
                for path, of in times.items():
                    every = sorted(1000 * each for part in of[1:] for each in part)
                    middle, slow = statistics.median(every), every[min(len(every) - 1, int(0.95 * len(every)))]
                    ratios = [a / b for a, b in zip(medians["32"], medians[path], strict=True)]
                    yield Latency(
                        path, encoder.image_size, size, count, 1000 * size / middle, middle, slow,
                        statistics.median(ratios),
                    )  # fmt: skip
    finally:
        torch.set_num_threads(before)


def _features(encoder: Encoder, images: torch.Tensor) -> torch.Tensor:
    """Return the features of images, as `ssvit embed` does: (b, c, h, w) -> (b, d)."""
    *_, outputs = encoder.layers(images)
    return encoder.pooled(encoder.norm(outputs), encoder.pooling, images)


def table(title: str, rows: Sequence[Latency]) -> str:
    """Return the results as an aligned table."""
    head = ["path", "pixels", "batch", "threads", "images/s", "median ms", "95 % ms", "relative to 32"]
    lines = [
        [
            row.path, "x".join(map(str, row.image_size)), str(row.batch_size), str(row.threads),
            f"{row.images_per_second:,.1f}", f"{row.median:.2f}", f"{row.slow:.2f}", f"{row.ratio:.2f} x",
        ]
        for row in rows
    ]  # fmt: skip
    return "\n".join([title, *(f"  {line}".rstrip() for line in aligned([head, *lines]))])
