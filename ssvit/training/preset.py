"""preset=auto: model, image size and schedule for a folder of photographs, from their number and size.

They follow what was measured on CPUs with small images (docs/methods.md, docs/optimizers.md), and are the same on GPUs.
"""

import json
import os
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

from ssvit import processes
from ssvit.checkpoints.configuration import Configuration
from ssvit.config.command_line import CommandLine
from ssvit.data import folder, shard_folder
from ssvit.data.datasets_options import Csv
from ssvit.data.folder import IMAGE_SUFFIXES, NPY
from ssvit.options import OptionError, UserError, within

AUTO = "auto"
_DEFAULT = "masked_patch"  # of the command
OBJECTIVE = "mae"  # the first by most measures of docs/methods.md
_SAMPLED = 64  # images that are read
_GPU_DRIVER = "/proc/driver/nvidia/version"  # present with an NVIDIA GPU; torch would take seconds to load
_PIXELS = ("data.channels", "data.range", "data.mean", "data.std")
_OF_ENCODER = ("encoder", "encoder.patch_size", "data.image_size", *_PIXELS)  # which a checkpoint brings


def choose(
    images: int, side: int, *, cores: int, processes: int = 1, given: Mapping[str, int] | None = None
) -> Mapping[str, object]:
    """Return the options for a set of images.

    Args:
        images: Number of training images.
        side: Median of their shorter sides in pixels.
        cores: CPU cores of this machine.
        processes: Processes that train.
        given: The numbers of the command line, by the names of their options. Others are adapted to them.
    """
    given = given or {}
    size = given.get("data.image_size", 32 if side < 48 else 64)
    share = max(1, min(64, images // 4) // processes)  # of each process
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


def options(line: CommandLine) -> Sequence[str]:
    """The options that preset=auto adds to those that are typed, which win; none without it.

    A run that began with it keeps what was chosen then. OptionError if the images are not in a folder.
    """
    typed = line.typed
    wanted = typed.get("preset", "null")
    if wanted in ("null", "") or "experiment" in typed:  # which is a preset of its own
        return ()
    if wanted != AUTO:
        raise OptionError("preset", wanted, "must be auto or null")
    read = _SETS.get(typed.get("data", ""))
    if read is None or not {"data.root", "data.table"} & typed.keys():
        raise OptionError("preset", wanted, "needs a folder of images or of shards, or a table: data=PATH")
    brought = _OF_ENCODER if typed.get("checkpoint", "null") != "null" else ()
    chosen = _as_it_began(typed)
    if chosen is None:
        images, side, grey = read(typed)
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
    """Whether an option is of a method, as target=pixels: the objective is then the user's, or the default."""
    return any(name.partition(".")[0] in ("objective", "target") for name in typed)


def _as_it_began(typed: dict[str, str]) -> Mapping[str, object] | None:
    """What was chosen when the run of this name began; None if there is none."""
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


def _named(typed: dict[str, str], *names: str) -> dict[str, Any]:
    """The options of the data set that are typed, of these."""
    given = {name: typed[f"data.{name}"] for name in names if f"data.{name}" in typed}
    return {name: None if value == "null" else value for name, value in given.items()}


class _Sample(NamedTuple):
    """What is known of a data set from some of its images, evenly spaced.

    images: how many there are to train on. side: the median of the shorter sides. grey: if all are grey, the options
    of `_PIXELS` that they need.
    """

    images: int
    side: int
    grey: Mapping[str, object]


def _of_folder(typed: dict[str, str]) -> _Sample:
    root = typed["data.root"]
    folder.check(root, "data.root")
    return _of_files(folder.pictures(folder.splits(root, **_named(typed, *folder.Splits._fields)).train))


def _of_table(typed: dict[str, str]) -> _Sample:
    with within("data"):
        found = Csv(label=None, **_named(typed, "table", "root", "path", "split", *folder.Splits._fields))
    return _of_files([os.path.join(found.top, row.path) for row in found.rows("train")])


def _of_files(files: Sequence[str]) -> _Sample:
    sampled = files[:: max(1, len(files) // _SAMPLED)]
    return _sample(len(files), files[0], [partial(open, file, "rb") for file in sampled])


def _of_shards(typed: dict[str, str]) -> _Sample:
    """As many images a byte as the first shard has."""
    root, named = typed["data.root"], _named(typed, *shard_folder.Splits._fields)
    if shard_folder.is_remote(root):
        raise OptionError("preset", AUTO, "needs shards in a folder: set preset=null for those at an address")
    with within("data"):
        paths = [os.path.join(root, name) for name in shard_folder.splits(root, **named).train]
    try:
        with tarfile.open(paths[0], "r:") as shard:
            there = [member for member in shard if member.isreg()]
            kinds = ([one for one in there if one.name.lower().endswith(kind)] for kind in (IMAGE_SUFFIXES, NPY))
            images = next(filter(None, kinds), [])
            count = round(len(images) * sum(map(os.path.getsize, paths)) / os.path.getsize(paths[0]))
            return _sample(count, paths[0], [partial(shard.extractfile, one) for one in images[:_SAMPLED]])
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"{paths[0]}: cannot be read: {error}") from None


_SETS: Mapping[str, Callable[[dict[str, str]], _Sample]] = {
    "folder": _of_folder,
    "csv": _of_table,
    "shards": _of_shards,
}


def _sample(images: int, first: str, files: Sequence[Callable[[], Any]]) -> _Sample:
    """Read some images: the headers of all, and the pixels until one has colours.

    first: the name of the first. UserError if none can be read.
    """
    from ssvit.data import rasters

    sides: list[int] = []
    values: list[tuple[rasters.Moments, bool] | None] = []
    for opened in files:
        with suppress(Exception), opened() as file:  # the loader replaces and counts what cannot be read
            sides.append(min(rasters.size(file)))
            file.seek(0)
            values.append(None if None in values else rasters.grey(file))
    if not sides:
        raise UserError(f"{first}: cannot be read as an image, nor can others beside it")
    grey = {}
    if values and None not in values:
        moments, is_bytes = zip(*filter(None, values), strict=True)
        grey = reduce(add, moments).options(is_bytes=all(is_bytes))
    median = sorted(sides)[len(sides) // 2]
    return _Sample(images, median, {f"data.{name}": str(value).replace(" ", "") for name, value in grey.items()})
