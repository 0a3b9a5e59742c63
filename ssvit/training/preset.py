"""Choose model, image size and schedule for a folder of photographs from their number and size (preset=auto).

The choices follow measurements on CPUs with small images (docs/methods.md, docs/optimizers.md); GPUs use the same.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import add
from pathlib import Path
from typing import NamedTuple

from ssvit import processes
from ssvit.checkpoints.configuration import Configuration
from ssvit.config import composition
from ssvit.config.command_line import CommandLine
from ssvit.data import arguments
from ssvit.data.sources.base_options import DataSet
from ssvit.options import OptionError, UserError
from ssvit.training.options import Pretrain

AUTO = "auto"
_DEFAULT = "masked_patch"  # default objective of `ssvit pretrain`
OBJECTIVE = "mae"  # ranks first by most metrics of docs/methods.md
_SAMPLED = 64  # number of images to read
_GPU_DRIVER = "/proc/driver/nvidia/version"  # exists with an NVIDIA GPU; importing torch would take seconds
_NEEDED = "needs a folder of images or of shards, or a table: data=PATH; null for other images"
_PIXELS = ("data.channels", "data.range", "data.mean", "data.std")
_OF_ENCODER = ("encoder", "encoder.patch_size", "data.image_size", *_PIXELS)  # determined by a checkpoint


def choose(
    images: int, side: int, *, cores: int, processes: int = 1, given: Mapping[str, int] | None = None
) -> Mapping[str, object]:
    """Return the options for a set of images.

    Args:
        images: Number of training images.
        side: Median of their shorter sides in pixels.
        cores: CPU cores of this machine.
        processes: Number of training processes.
        given: Numeric options of the command line by name, which the chosen options are adapted to.
    """
    given = given or {}
    size = given.get("data.image_size", 32 if side < 48 else 64)
    share = max(1, min(64, images // 4) // processes)  # images per process
    batch_size = given.get("recipe.batch_size", share * processes)
    seen = min(max(100 * images, 256_000), 1_280_000)
    # A multiple of 100, so that logging, evaluation and checkpoints divide it.
    steps = given.get("recipe.steps", max(100, int(round(seen / batch_size, -2))))
    return {
        "objective": OBJECTIVE,
        "encoder": "small",
        "data.image_size": size,
        "encoder.patch_size": max(1, size // 8),
        "recipe.steps": steps,
        "recipe.batch_size": batch_size,
        "recipe.optimizer": "muon",
        "recipe.lr": 2e-3,
        "recipe.warmup": steps // 20,
        "recipe.evaluate_every": max(1, steps // 10),
        "recipe.save_every": max(1, steps // 10),
        "recipe.log_every": max(1, steps // 100),
        "workers": min(16, cores - 1),
    }


def expand_images(line: CommandLine) -> None:
    """Replace data=PATH by the options for that path, with preset=auto for a user's images."""
    arguments.expand(line, additions=("preset=auto",))


def expand(line: CommandLine) -> None:
    """Add the options that preset=auto chooses to the command line."""
    line.added += options(line)


def options(line: CommandLine) -> Sequence[str]:
    """Return the options that preset=auto adds to the typed ones, which take precedence; none without preset=auto.

    A continued run keeps the options that were chosen when it started.

    Raises:
        OptionError: The images are not in a folder, or the preset has another name.
    """
    typed = line.typed
    wanted = typed.get("preset", "null")
    if wanted in ("null", "") or "experiment" in typed:  # an experiment sets all of these options
        return ()
    if wanted != AUTO:
        raise OptionError("preset", wanted, "must be auto or null")
    if "data" not in typed:
        raise OptionError("preset", wanted, _NEEDED)
    brought = _OF_ENCODER if typed.get("checkpoint", "null") != "null" else ()
    chosen = _as_it_began(typed)
    if chosen is None:
        images, side, grey = _summary(line)
        cores = len(os.sched_getaffinity(0))
        given = {name: int(value) for name, value in typed.items() if value.isdecimal() and int(value)}
        # Without an option or a launcher, one process is assumed.
        count = processes.count(given.get("fabric.devices", 1), given.get("fabric.num_nodes", 1)) or 1
        chosen = {**choose(images, side, cores=cores, processes=count, given=given)}
        if typed.get("data.channels", "1") == "1" and "data.range" not in typed:
            chosen |= grey
        kind = "grey images" if grey else "images"
        size, patch = (int(str(chosen[name])) for name in ("data.image_size", "encoder.patch_size"))
        larger, reduced = min(2 * size, side - side % (size // patch)), ""
        if "data.image_size" not in (*typed, *brought) and larger > size:
            reduced = f" reduced to {size} (data.image_size={larger} keeps more detail),"
        if os.path.exists(_GPU_DRIVER) and typed.get("fabric.accelerator") != "cpu":
            line.say("preset=auto: its settings were measured on CPUs, not on GPUs")
        line.say(f"preset=auto: {images:,} {kind} of {side} pixels in the median,{reduced} {cores} CPU cores:")
    else:
        line.say("preset=auto: as the run began:")
    method = ("objective",) if _names_method(typed) else ()
    own = {name: value for name, value in chosen.items() if name not in (*typed, *brought, *method)}
    line.say(f"  {' '.join(f'{name}={value}' for name, value in own.items())}")
    kept = [f"{name}={value}" for name, value in chosen.items()]
    return [*(f"{name}={value}" for name, value in own.items()), f"preset={json.dumps(kept)}"]


def _names_method(typed: Mapping[str, str]) -> bool:
    """Return whether an option selects a method, such as target=pixels, so that the preset chooses no objective."""
    return any(name.partition(".")[0] in ("objective", "target") for name in typed)


def _as_it_began(typed: dict[str, str]) -> Mapping[str, object] | None:
    """Return the options chosen when the run of this name started; None if there is no such run."""
    if typed.get("overwrite") == "true":
        return None
    objective = typed.get("objective", _DEFAULT if _names_method(typed) else OBJECTIVE)
    name = typed.get("name", f"{objective}_{typed['data']}")
    try:
        kept = Configuration.read(Path(typed.get("outputs", "outputs"), name, "config.yaml")).values.get("preset")
    except (UserError, OSError):
        return None
    if not isinstance(kept, list):
        return None
    return dict(str(option).split("=", 1) for option in kept)


class _Summary(NamedTuple):
    """Properties of a data set from which options are chosen.

    Attributes:
        images: Number of training images.
        side: Median of the shorter sides of a sample, in pixels.
        grey: Options of `_PIXELS` for grey images; empty if an image of the sample has colours.
    """

    images: int
    side: int
    grey: Mapping[str, object]


def _summary(line: CommandLine) -> _Summary:
    """Read a sample of training images: the headers of all, and the pixels until one image has colours.

    Raises:
        OptionError: The data set cannot be sampled.
        UserError: No image can be read.
    """
    from ssvit.data.sources import rasters

    named = ((option.partition("=")[0], option) for option in line.options)
    source = ((name, option) for name, option in named if name.split(".")[0] == "data")
    data = [option for name, option in source if name not in _PIXELS and name.split(".")[1:2] != ["augment"]]
    config = composition.compose("pretrain", line.changed(data), Pretrain)
    source = config.options.data.source
    sample = source.sample(_SAMPLED) if isinstance(source, DataSet) else None
    if sample is None:
        raise OptionError("preset", AUTO, _NEEDED)
    sides: list[int] = []
    values: list[tuple[rasters.Moments, bool] | None] = []
    for opened in sample.files:
        with suppress(Exception), opened() as file:  # the loader replaces unreadable images
            sides.append(min(rasters.size(file)))
            file.seek(0)
            values.append(None if None in values else rasters.grey(file))
    if not sides:
        raise UserError(f"{sample.first}: cannot be read as an image, nor can others beside it")
    grey = {}
    if values and None not in values:
        moments, is_bytes = zip(*filter(None, values), strict=True)
        grey = reduce(add, moments).options(is_bytes=all(is_bytes))
    pixels = {f"data.{name}": str(value).replace(" ", "") for name, value in grey.items()}
    return _Summary(sample.images, sorted(sides)[len(sides) // 2], pixels)
