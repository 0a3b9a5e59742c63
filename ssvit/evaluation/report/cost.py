"""Estimate the time of an evaluation before it starts, and reduce its images to a budget. This module imports torch."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.data.sources.base import Source, is_multi_label
from ssvit.engine.clock import clock
from ssvit.engine.progress import duration
from ssvit.errors import OptionError, UserError, print_lines
from ssvit.evaluation.features import Features, Frozen, is_cached, timed
from ssvit.evaluation.probes.base import Probe, check_labels
from ssvit.evaluation.report.frozen import Evaluated, fewer, view_of
from ssvit.evaluation.report.options import Evaluate
from ssvit.kernels.inference import resolved
from ssvit.models.encoder_options import PATCHES

_TRAIN, _TEST, _WIDTH = 2000, 1000, 384  # largest synthetic features by which the fits of probes are timed
# Cost of the fits as a power of the width, which fits all probes together for widths of 384 to 3072.
_POWER = 1.4
_CLASS = 30  # images of a class of synthetic features, at least
_FIGURES, _PAGE = 5.0, 1.0  # CPU seconds


@dataclass(frozen=True)
class Cost:
    """Store the estimated time of an evaluation in seconds.

    Attributes:
        passes: Time in which all encoders read and process the images.
        fits: Time of all probes of whole images.
        rest: Time that does not depend on the number of images.
        clock: Ratio of the time by the clock to CPU time; None if another device computes.
    """

    passes: float
    fits: float
    rest: float
    clock: float | None

    @property
    def line(self) -> str:
        """Return the estimate as a line of text."""
        total = self.passes + self.fits + self.rest
        parts = {"features": self.passes, "probes": self.fits, "report": self.rest}
        listed = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts.items())
        return f"estimated: {duration(total, self.clock)} ({listed})"

    def share(self, budget: float) -> float:
        """Return the share of the images, at most 1, whose evaluation takes a time of `budget` seconds."""
        return max(0.0, min(1.0, (budget - self.rest) / max(self.passes + self.fits, 1e-9)))


def estimate(
    options: Evaluate, encoders: Sequence[Evaluated], probes: Mapping[str, Probe], device: torch.device
) -> Cost:
    """Estimate the time of an evaluation from the cost of a few images and of probes of synthetic features.

    Args:
        options: Options of the evaluation.
        encoders: The encoders, as `frozen.encoders_of` returns them.
        probes: The probes by name. Fits of probes of patches are not included.
        device: The device.
    """
    began, by_clock = clock(device), time.perf_counter()
    of_images = [probe for probe in probes.values() if probe.features != PATCHES]
    of_patches = len(probes) - len(of_images)
    passes, fits = 0.0, 0.0
    of_width: dict[int, float] = {}
    for encoder in encoders:
        if isinstance(encoder.function, Frozen):
            encoder.function.prepare(device, resolved(options.precision, device))
        train, test = encoder.data.train, encoder.data.test_or_validation[1]
        transform = encoder.view.build()
        seconds, features = timed(encoder.function, train, transform, batch_size=options.batch_size, device=device)
        new = [part for part in (train, test) if not _is_cached(options, encoder, part)]
        passes += seconds * sum(map(len, new)) * bool(of_images) + seconds * (len(train) + len(test)) * of_patches
        for values in features.values.values():
            width = min(values.shape[1], _WIDTH)
            if width not in of_width:
                of_width[width] = sum(_fit(probe, width, train, test) for probe in of_images)
            fits += of_width[width] * (values.shape[1] / width) ** _POWER
    ratio = (time.perf_counter() - by_clock) / max(clock(device) - began, 1e-9)
    rest = clock(device) - began + (_PAGE + _FIGURES * (options.figures != "none")) * options.report
    return Cost(passes, fits, rest, ratio if device.type == "cpu" else None)


def planned(
    options: Evaluate, encoders: Sequence[Evaluated], probes: Mapping[str, Probe], device: torch.device, *, world: int
) -> Sequence[Evaluated]:
    """Print the estimate, and return the encoders with as many images as the budget allows.

    Args:
        options: Options of the evaluation.
        encoders: The encoders.
        probes: The probes by name.
        device: The device.
        world: Number of processes. In several of them, nothing is estimated.

    Raises:
        OptionError: There is a budget, and there are several processes.
    """
    if world > 1:
        if options.budget is not None:
            raise OptionError("budget", options.budget, "requires a single process, in which images are timed")
        return encoders
    cost = estimate(options, encoders, probes, device)
    share = 1.0 if options.budget is None else cost.share(options.budget)
    print_lines(replace(cost, passes=share * cost.passes, fits=share * cost.fits).line)
    if options.budget is None or share == 1:
        return encoders
    sources = encoders[0].data.train, encoders[0].data.test_or_validation[1]
    least = max(2, 2 * len(sources[0].classes))
    train, test = (max(min(len(source), least), _rounded(share * len(source))) for source in sources)
    line = f"{train} training and {test} test images"
    encoders = [encoder._replace(data=fewer(encoder.data, train, test)) for encoder in encoders]
    labels, of_test = encoders[0].data.train.labels, encoders[0].data.test_or_validation[1].labels
    if labels is not None and of_test is not None:
        for probe in probes.values():
            try:
                check_labels(probe, labels, of_test, sources[0].classes)
            except UserError as error:
                raise OptionError("budget", options.budget, f"is enough for {line}: {probe.title}: {error}") from None
    print_lines(f"budget={options.budget:g}s: {line}")
    return encoders


def _rounded(value: float) -> int:
    """Return a number rounded down to two digits, so that it rarely differs between repetitions."""
    unit = 10 ** max(0, len(str(int(value))) - 2)
    return int(value) // unit * unit


def _is_cached(options: Evaluate, encoder: Evaluated, source: Source) -> bool:
    folder = options.cache_folder
    return folder is not None and is_cached(folder, encoder.function, source, transform_options=view_of(encoder))


def _fit(probe: Probe, width: int, train: Source, test: Source) -> float:
    """Return the CPU seconds of a probe for one feature set, from a fit to synthetic features."""
    generator = torch.Generator().manual_seed(0)
    rows = min(len(train), _TRAIN), min(len(test), _TEST)
    classes = max(2, min(len(train.classes), rows[0] // _CLASS))
    centers = torch.randn(classes, width, generator=generator)

    def features(count: int) -> Features:
        labels: Tensor = torch.arange(count) % classes
        values = torch.randn(count, width, generator=generator) + 0.15 * centers[labels]
        if train.labels is not None and is_multi_label(train.labels):
            labels = F.one_hot(labels, classes).bool()
        return Features(values, labels, [str(number) for number in range(classes)])

    sets = [features(count) for count in rows]
    seconds = 0.0
    with contextlib.suppress(UserError, RuntimeError):  # too few images, or no convergence
        for _ in range(2):  # the first fit initialises libraries
            began = time.process_time()
            probe(*sets, choose=True)
            seconds = time.process_time() - began
    return seconds * (len(train) + len(test)) / sum(rows)
