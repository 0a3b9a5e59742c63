"""Measurements of ssvit on a GPU by one command: ssvit benchmark part=gpu step.device=cuda

Each part works in a process of its own, and one that fails leaves its reason as a row; after each, the folder has all
tables so far as text and JSON, and rates as pictures. With step.device=cpu the same runs small, which proves the code
and says nothing of speed.

Letters: b images.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch._C._autograd import DeviceType
from torch.nn import attention
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.io import decode_jpeg, read_file

from ssvit.benchmark import step as whole_step
from ssvit.benchmark import timing
from ssvit.benchmark.data import SCALE, scenes
from ssvit.benchmark.gpu_options import Gpu
from ssvit.benchmark.step_options import OBJECTIVES, SIZES, Size, Step
from ssvit.checkpoints import manifest
from ssvit.checkpoints.run_folder import rows
from ssvit.data.augment.crop import InceptionCrop
from ssvit.data.loader import Loader
from ssvit.data.sources.files import Files
from ssvit.figures.speed import speed
from ssvit.options import OptionError

Row = dict[str, Any]
Tables = dict[str, list[Row]]
RATE = "images/s"
_PEER = "timm + head"
_KILLED, _STEPS = 12, 20  # the step after which a run is killed, and its steps
_ATTENTION = ("flash", "fmha", "attention", "sdp")  # in names of kernels


@dataclass(frozen=True)
class Setting:
    """What all parts need."""

    rounds: int
    step: Step
    gpu: Gpu

    @property
    def cuda(self) -> bool:
        return self.step.device == "cuda"

    @property
    def models(self) -> tuple[str, ...]:
        """The sizes of the step."""
        return tuple(self.gpu.models or (("s", "b", "l", "h") if self.cuda else ("small",)))

    @property
    def base(self) -> Size:
        """The size of the other parts."""
        return SIZES["b" if "b" in self.models else self.models[0]]

    def steps(self, size: Size, **changed: Any) -> whole_step.Steps:
        """ssvit's training of a size."""
        given: dict[str, Any] = {
            "objective": "masked_patch",
            "precision": self.step.precision,
            "compile": self.step.compile or self.cuda,
        }
        given |= {"device": self.step.device, "batch": self.step.batch or size.batch[self.step.device], **changed}
        return whole_step.Steps(whole_step.OURS, size, **given)


def run(gpu: Gpu, step: Step, *, rounds: int) -> None:
    """Measure all parts."""
    setting = Setting(rounds, step, gpu)
    if setting.cuda and not torch.cuda.is_available():
        raise OptionError("step.device", "cuda", "torch finds no GPU here; step.device=cpu runs all parts small")
    folder = Path(setting.gpu.folder)
    folder.mkdir(parents=True, exist_ok=True)
    found: Tables = {}
    for part in setting.gpu.parts:
        began = time.perf_counter()
        try:
            tables = apart(PARTS[part], setting)
        except Exception as error:  # whatever it is, the other parts are to be measured
            tables = {part: [{"failed": str(error)[:300]}]}
        for title, lines in tables.items():
            print(f"{table(title, lines)}\n", flush=True)
            if all(row.get(RATE) for row in lines):
                values = ([row[key] for row in lines] for key in ("what", RATE, "quartiles"))
                figure = speed(*values, title=title, unit="images per second")
                figure.savefig(folder / f"{part}_{list(tables).index(title) + 1}.png")
        print(f"{part}: {time.perf_counter() - began:.0f} s\n", flush=True)
        found |= tables
        (folder / "tables.json").write_text(json.dumps(found, indent=2) + "\n")
        (folder / "tables.txt").write_text("\n\n".join(table(*one) for one in found.items()) + "\n")


def apart(work: Callable[..., Any], *inputs: Any) -> Any:
    """What a function gives in a process of its own, with a device and settings of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_told, work, *inputs).result()


def _told(work: Callable[..., Any], *inputs: Any) -> Any:
    """What the function gives, or a RuntimeError of its own error, of which some cannot be sent to another process."""
    try:
        return work(*inputs)
    except Exception as error:
        traceback.print_exc()
        raise RuntimeError(" ".join(f"{type(error).__name__}: {error}".split())) from None


def table(title: str, lines: list[Row]) -> str:
    """Rows as aligned text, with a column for every key."""
    names = list(dict.fromkeys(name for row in lines for name in row))
    cells = [names, *([_shown(row.get(name)) for name in names] for row in lines)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(names))]
    text = ("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells)
    return "\n".join([title, *(f"  {line}" for line in text)])


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, tuple | list):
        return "-".join(map(_shown, value))
    return "" if value is None else str(value)


def resume(setting: Setting) -> Tables:
    """A run that is killed and started again beside one in a piece, and losses beside those of plain torch on a CPU."""
    device = setting.step.device
    runs = {
        "whole": (device, setting.step.precision, "auto"),
        "killed": (device, setting.step.precision, "auto"),
        "float32": (device, "32-true", "auto"),
        "reference": ("cpu", "32-true", "eager"),
    }
    with tempfile.TemporaryDirectory() as outputs:
        for name, (accelerator, precision, backend) in runs.items():
            options = [
                f"outputs={outputs}", f"name={name}", f"fabric.accelerator={accelerator}", "fabric.devices=1",
                f"recipe.precision={precision}", f"recipe.backend={backend}", f"recipe.steps={_STEPS}",
                "recipe.warmup=2", "recipe.batch_size=32", "recipe.save_every=5", f"recipe.evaluate_every={_STEPS}",
                "recipe.log_every=1", "data=synthetic", "data.images=256", "data.held_out_images=64",
                "encoder.depth=2", "probe=[]", "workers=0",
            ]  # fmt: skip
            if name == "killed":
                _pretrain(*options, kill=True)
            _pretrain(*options)
        folders = {name: Path(outputs) / name for name in runs}
        losses = {name: [row["train/loss"] for row in rows(at) if "train/loss" in row] for name, at in folders.items()}
        sums = [manifest.read(folders[name] / f"step_{_STEPS:08d}")["sha256"] for name in ("whole", "killed")]

    def beside(one: str, other: str) -> Row:
        pairs = zip(losses[one], losses[other], strict=True)
        return {"largest difference of losses": max(abs(a - b) for a, b in pairs), "last loss": losses[one][-1]}

    same = sum(sums[1].get(name) == value for name, value in sums[0].items())
    what = f"killed after step {_KILLED} and resumed, beside one in a piece"
    return {
        f"Runs of {_STEPS} steps on {device}": [
            {"what": what, "equal files": f"{same} of {len(sums[0])}", **beside("killed", "whole")},
            {"what": f"{setting.step.precision} beside plain float32 on a CPU", **beside("whole", "reference")},
            {"what": "32-true beside plain float32 on a CPU", **beside("float32", "reference")},
        ]
    }


def _pretrain(*options: str, kill: bool = False) -> None:
    """Pre-train by the command; kill: end it by SIGKILL in the midst."""
    command = [sys.executable, "-m", "ssvit", "pretrain", *options]
    home = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))}
    last: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = [*last[-3:], line.strip()]
            if kill and line.startswith(f"step {_KILLED}/"):
                process.kill()
    if process.returncode and not kill:
        raise RuntimeError(f"pretrain ended with {process.returncode}: {' | '.join(last)}")


def waits(setting: Setting) -> Tables:
    """How often the host waits for the device in 20 updates of each objective, and where."""
    lines: list[Row] = []
    for objective in OBJECTIVES:
        steps = setting.steps(SIZES["small"], objective=objective, compile=False, batch=setting.step.batch or 64)
        for _ in range(3):
            steps()
        with waiting(setting.step.device) as places:
            for _ in range(_STEPS):
                steps()
        most = places.most_common(1)
        lines.append({"what": objective, "waits": places.total(), "most at": most[0][0] if most else None})
    return {f"Waits of the host in {_STEPS} updates": lines}


@contextmanager
def waiting(device: str) -> Iterator[Counter[str]]:
    """Counts what the block makes the host wait for, by place; on a CPU, what would make it wait on a GPU."""
    places: Counter[str] = Counter()
    if device != "cuda":

        class Reads(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if torch.Tag.data_dependent_output in func.tags:
                    places[str(func)] += 1
                return func(*args, **(kwargs or {}))

        with Reads():
            yield places
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
    places.update(f"{Path(one.filename).name}:{one.lineno}" for one in told if "synchroniz" in str(one.message))


def rates(setting: Setting) -> Tables:
    """The step of each size beside timm's, with the machine's own product and the memory."""
    tables: Tables = {}
    for model in setting.models:
        for title, found in apart(_beside, setting, model).items():
            product = [rate for rate in found if "product of" in rate.name]
            peak = " and ".join(f"{rate.name}: {rate.per_work_second / 1000:,.1f} TFLOP/s" for rate in product)
            tables[f"{title}; {peak}"] = [
                {
                    "what": rate.name, RATE: rate.per_work_second, "quartiles": rate.quartiles, "share": rate.share,
                    "times ssvit": rate.ratio, "memory, MB": rate.memory,
                }
                for rate in found if rate not in product
            ]  # fmt: skip
    return tables


def _beside(setting: Setting, model: str) -> dict[str, list[timing.Rate]]:
    for name in setting.gpu.changes:
        CHANGES[name].before()
    peers, compile = setting.step.peers and (_PEER,), setting.step.compile or setting.cuda
    return whole_step.run(setting.step.changed(model=model, peers=peers, compile=compile), rounds=setting.rounds)


def profile(setting: Setting) -> Tables:
    """Where the time of a step goes, for a small batch and a large one."""
    size, lines = setting.base, []
    kernels: Tables = {}
    cuda = setting.cuda
    for batch in (64, 512) if cuda else (2, 4):
        steps = setting.steps(size, batch=batch)
        for _ in range(5):
            steps()
        if cuda:
            torch.cuda.synchronize()
        chosen = [torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU]
        count = 10 if cuda else 2
        with torch.profiler.profile(activities=chosen) as profiler:
            for _ in range(count):
                steps()
            if cuda:
                torch.cuda.synchronize()
        wanted = DeviceType.CUDA if cuda else DeviceType.CPU
        events = [event for event in profiler.events() or () if event.device_type == wanted]
        spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
        busy, last = 0.0, spans[0][0]
        for start, end, _ in spans:
            busy += max(0.0, end - max(start, last))
            last = max(last, end)
        whole = last - spans[0][0]
        of_kernel: Counter[str] = Counter()
        for start, end, name in spans:
            of_kernel[name] += end - start
        attended = [name for name, _ in of_kernel.most_common() if any(part in name.lower() for part in _ATTENTION)]
        lines.append({
            "what": f"{batch} images", "ms a step": whole / count / 1000, "idle": 1 - busy / whole,
            "launches a step": len(spans) // count, "attention": attended[0][:60] if attended else "none by that name",
        })  # fmt: skip
        kernels[f"Longest of {batch} images"] = [
            {"what": name[:80], "ms a step": spent / count / 1000, "share": spent / sum(of_kernel.values())}
            for name, spent in of_kernel.most_common(8)
        ]
    return {f"A step of width {size.width}, depth {size.depth}, on {setting.step.device}": lines, **kernels}


@dataclass(frozen=True)
class Change:
    """What might pay. on: of what a step is measured, by `VARIANTS`; before: done before the model is built."""

    on: str = ""
    before: Callable[[], None] = lambda: None
    after: Callable[[whole_step.Steps], None] = lambda steps: None


VARIANTS = ("", "float32", "hybrid")


def _flash(name: str) -> None:
    """Torch's other flash attention; RuntimeError where it is not to be had."""
    if not hasattr(attention, "activate_flash_attention_impl"):
        raise RuntimeError("this torch has one flash attention")
    attention.activate_flash_attention_impl(name)


def _channels_last(steps: whole_step.Steps) -> None:
    stem = steps.objective.encoder.stem
    assert stem is not None
    stem.to(memory_format=torch.channels_last)


def _cuda_graphs() -> None:
    from torch._inductor import config  # slow to load

    config.triton.cudagraphs = True


def _max_autotune() -> None:
    from torch._inductor import config

    config.max_autotune = True


CHANGES = {
    "tf32": Change("float32", before=lambda: torch.set_float32_matmul_precision("high")),
    "channels_last": Change("hybrid", after=_channels_last),
    "fa3": Change(before=lambda: _flash("FA3")),
    "fa4": Change(before=lambda: _flash("FA4")),
    "cuda_graphs": Change(before=_cuda_graphs),
    "max_autotune": Change(before=_max_autotune),
}


def changes(setting: Setting) -> Tables:
    """What might pay, each alone beside the step without it."""
    lines: list[Row] = []
    for on in VARIANTS:
        base = apart(_changed, setting, on, "")
        lines.append({"what": f"{on} step".strip(), "times": 1.0, **base})
        for name in (name for name, change in CHANGES.items() if change.on == on):
            try:
                found = apart(_changed, setting, on, name)
                lines.append({"what": f"{on} {name}".strip(), "times": found[RATE] / base[RATE], **found})
            except Exception as error:  # most often that it is not to be had here
                reason = str(error)[:120]
                lines.append({"what": f"{on} {name}".strip(), "not tried": reason})
    return {f"One change at a time, {setting.step.device}": lines}


def _changed(setting: Setting, on: str, name: str) -> Row:
    size, change = setting.base, CHANGES.get(name, Change())
    if on == "hybrid":
        size = replace(size, stem=(3, 4, 9) if setting.cuda else (1,))
    change.before()
    steps = setting.steps(size, **({"precision": "32-true"} if on == "float32" else {}))
    change.after(steps)
    return _timed(steps, setting)


def _timed(work: Callable[[], float], setting: Setting) -> Row:
    """Images a second of work, which gives how many it did, over rounds."""
    timed = timing.gpu_seconds if setting.cuda else timing.cpu_seconds
    count = 10 if setting.cuda else 1
    found = []
    for _ in range(1 + setting.rounds):
        images, seconds = timed(lambda: sum(work() for _ in range(count)))
        found.append(images / seconds)
    return {RATE: statistics.median(found[1:]), "quartiles": timing.quartiles(found[1:])}


def data(setting: Setting) -> Tables:
    """Images a second by the clock, of JPEG files as they are and pre-resized, and decoded by the device."""
    cuda, lines = setting.cuda, []
    count = 4096 if cuda else 64
    with tempfile.TemporaryDirectory() as folder:
        for side in ((375, 500), (256, 341)):
            paths = [f"{folder}/{side[0]}_{number:05}.jpg" for number in range(count)]
            for number, image in enumerate(scenes(32, side, seed=0)):
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(paths[number], quality=90)
            for number in range(32, count):
                os.link(paths[number % 32], paths[number])
            what = f"JPEG of {side[1]} x {side[0]}"
            for workers in (4, 8, 14) if cuda else (1,):
                loader = Loader(
                    source=Files(paths), transform=InceptionCrop(size=(224, 224), scale=SCALE), seed=0,
                    batch_size=count // 4, accumulate=8, workers=workers, timeout=0, device=setting.step.device,
                )  # fmt: skip
                rate = _by_clock(loader)
                lines.append({"what": f"{what}, {workers} workers", RATE: rate, "quartiles": (rate, rate)})
            encoded = [read_file(path) for path in paths[:256]]
            decode_jpeg(encoded[:8], device=setting.step.device)
            began = time.perf_counter()
            decode_jpeg(encoded, device=setting.step.device)
            if cuda:
                torch.cuda.synchronize()
            rate = len(encoded) / (time.perf_counter() - began)
            lines.append(
                {"what": f"{what}, decoding alone, {setting.step.device}", RATE: rate, "quartiles": (rate, rate)}
            )
    return {f"Data by the clock, {os.cpu_count()} cores": lines}


def _by_clock(loader: Loader) -> float:
    """Images a second of the second to fourth quarter of an epoch: workers have started, and do not end yet."""
    done, began, ended = 0, 0.0, 0.0
    for number, batch in enumerate(loader.batches(0, 4)):
        ended = time.perf_counter()
        if number >= loader.accumulate:
            done += len(batch.slots)
        else:
            began = ended
    return done / (ended - began)


def checkpoint(setting: Setting) -> Tables:
    """Saving and loading, and the step of a model that is sharded over one process."""
    lines: list[Row] = []
    for model in dict.fromkeys(("b", "h") if setting.cuda else setting.models):
        try:
            lines.append({"what": model, **apart(_saved, setting, SIZES[model])})
        except Exception as error:
            lines.append({"what": model, "failed": str(error)[:160]})
    sharded: list[Row] = []
    for strategy in ("auto", "fsdp"):
        try:
            sharded.append({"what": strategy, **apart(_sharded, setting, strategy)})
        except Exception as error:
            sharded.append({"what": strategy, "failed": str(error)[:160]})
    return {"Checkpoints": lines, "Strategies with one process": sharded}


def _saved(setting: Setting, size: Size) -> Row:
    steps = setting.steps(size, compile=False, batch=2)
    steps()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        steps.state.save(Path(folder), 1, {})
        saved = time.perf_counter()
        steps.state.restore(Path(folder), {}, print)
        loaded = time.perf_counter()
        size_of = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors")) / 1e9
    return {
        "GB": size_of, "s to save": saved - began, "GB/s saved": size_of / (saved - began),
        "s to load": loaded - saved, "GB/s loaded": size_of / (loaded - saved),
    }  # fmt: skip


def _sharded(setting: Setting, strategy: str) -> Row:
    if strategy == "fsdp":
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.setdefault("MASTER_PORT", "29511")
    found = _timed(setting.steps(setting.base, strategy=strategy), setting)
    memory = torch.cuda.max_memory_allocated() / 1e6 if setting.cuda else None
    return {**found, "memory, MB": memory}


PARTS: dict[str, Callable[[Setting], Tables]] = {
    "resume": resume, "waits": waits, "step": rates, "profile": profile, "changes": changes, "data": data,
    "checkpoint": checkpoint,
}  # fmt: skip
