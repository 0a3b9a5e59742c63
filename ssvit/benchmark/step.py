"""A complete training step of a method, compared with the same method of other projects.

Each contender is trained by ssvit's own loop: the same sizes, precision, clipping and fused AdamW, one after the other
in every round, on the same images. `share` is the useful work of a step in a second over the machine's own matrix
products, measured in the same rounds; for all contenders it is the matrix products of ssvit's step.

Letters: b images.
"""

import itertools
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ssvit.benchmark.methods import batch_of, ours
from ssvit.benchmark.peers import PEERS
from ssvit.benchmark.step_options import LIBRARIES, SIZES, Size, Step
from ssvit.benchmark.timing import Rate, compare, threads
from ssvit.kernels import fused
from ssvit.options import OptionError
from ssvit.private import HAS_ONEDNN
from ssvit.training import runtime
from ssvit.training.cost import flops
from ssvit.training.loop import update
from ssvit.training.recipe import Recipe
from ssvit.training.state import State

OURS = "ssvit"
_PEAK = {"cpu": 2048, "cuda": 8192}  # rows and columns of the matrices that the machine's peak is measured on


def run(options: Step, *, rounds: int = 7) -> dict[str, list[Rate]]:
    """The rates in images a second, and of the machine's matrix products in GFLOP a second, by title."""
    size, precision, device = SIZES[options.model], options.precision, options.device
    b = options.batch or size.batch[device]
    build = partial(
        Steps,
        size=size,
        objective=options.objective,
        precision=precision,
        compile=options.compile,
        device=device,
        batch=b,
    )
    every = PEERS[options.objective]
    wanted = (*every, *LIBRARIES) if options.peers is True else options.peers or ()
    peers = [name for name in every if name in wanted or any(one in name for one in LIBRARIES if one in wanted)]
    if wanted and every and not peers:
        raise OptionError("peers", wanted, f"must be among the peers of {options.objective}: {', '.join(every)}")
    missing = sorted({name.split()[0] for name in peers if not installed(name)})
    names = [OURS, *filter(installed, peers)]
    with threads(options.threads):
        contenders: dict[str, Callable[[], float]] = {name: build(name) for name in names}
        if options.threads > 1:
            contenders[f"{OURS}, 1 thread"] = threads(1)(contenders[OURS])
        products = _products(precision, device)
        rates = compare(contenders | products, reference=OURS, rounds=rounds, device=device)
    peak = max(rate.per_work_second for rate in rates if rate.name in products)
    gflop = useful(size, options.objective) / 1e9
    for place, rate in enumerate(rates):
        if rate.name not in products:
            rates[place] = rate = replace(rate, share=rate.per_work_second * gflop / peak)
        if rate.name in names and options.memory:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                rates[place] = replace(rate, memory=pool.submit(_memory, partial(build, rate.name), device).result())
    way, cores = "compiled" if options.compile else "eager", f"{options.threads} thread{'s' * (options.threads > 1)}"
    what = f"{options.objective}, {options.model}, {size.image_size} px, {b} images a step, {gflop:.2f} GFLOP an image"
    without = f"; not installed: {', '.join(missing)}" if missing else ""
    return {f"{what}, {precision}, {way}, {device}, {cores}{without}": rates}


def installed(name: str) -> bool:
    """Whether a peer can be measured: its name begins with the package that it needs."""
    return find_spec(name.split()[0].replace("-", "_")) is not None


class Steps:
    """The training of one contender, from its start on: each call is one step, and returns how many images it took."""

    def __init__(
        self,
        name: str,
        size: Size,
        *,
        objective: str,
        precision: str,
        compile: bool,
        device: str,
        batch: int,
        strategy: str = "auto",
    ) -> None:
        backend = "eager" if name != OURS else "compile" if compile else "kernels"
        numbers: dict[str, Any] = {"precision": precision, "backend": backend, "batch_size": batch}
        self.recipe = Recipe(steps=1_000_000, warmup=0, decay="constant", **numbers)
        self.fabric = runtime.start(self.recipe, accelerator=device, devices=1, strategy=strategy)
        self.objective = ours(size, objective) if name == OURS else PEERS[objective][name](size)
        if compile and name != OURS:
            self.objective.compile()  # without our kernels, which are none of theirs
        images = batch_of(size, objective, batch).to(self.fabric.device)
        if name != OURS:
            images = images._replace(views={key: view / 255 for key, view in images.views.items()})
        slots = (torch.arange(first, first + batch) for first in itertools.count(step=batch))
        self.batches = (images._replace(slots=step_slots) for step_slots in slots)
        self.state = State(self.fabric, self.objective, self.recipe)
        self.step = 0

    def __call__(self) -> int:
        self._numbers = update(self.state, self.batches, self.step)
        self.step += 1
        return self.recipe.batch_size

    @property
    def loss(self) -> float:
        """Of the newest step, for which the host waits."""
        return self._numbers.values[self._numbers.names.index("loss")].item()


def useful(size: Size, name: str) -> float:
    """FLOPs of one image's step in matrix products, two for a multiplication and its addition, of an objective."""
    b = 2
    return flops(ours(size, name), [batch_of(size, name, b)]) / b


def _products(precision: str, device: str) -> dict[str, Callable[[], float]]:
    """The machine's peak: a product of large matrices, by torch and, where float32 has it, by oneDNN."""
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    side = _PEAK[device]
    matrix = torch.randn(side, side, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    giga = 2 * side**3 / 1e9
    products = {f"torch product of {side}": lambda: (matrix @ matrix, giga)[1]}
    if device == "cpu" and dtype == torch.float32 and HAS_ONEDNN:
        products[f"oneDNN product of {side}"] = lambda: (fused.product(matrix, matrix), giga)[1]
    return products


def _memory(build: "Callable[[], Steps]", device: str) -> float | None:
    """Megabytes that two steps take at the highest, weights and optimiser included: of the GPU, or of the process
    beyond what it has before the model is built; None where the system does not tell.
    """
    torch.set_num_threads(1)
    before = _resident("VmRSS")
    steps = build()
    for _ in range(2):
        steps()
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    highest = _resident("VmHWM")
    return None if before is None or highest is None else highest - before


def _resident(kind: str) -> float | None:
    """Of this process, in megabytes: VmRSS now, VmHWM at the highest."""
    status = Path("/proc/self/status")
    found = re.search(rf"{kind}:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return None if found is None else int(found[1]) * 1024 / 1e6
