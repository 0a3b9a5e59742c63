"""Choose model, image size and schedule for a folder of photographs from their number and size (preset=auto).

The choices follow measurements on CPUs with small images (docs/methods.md, docs/optimizers.md); GPUs use the same.
"""

import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from operator import add
from pathlib import Path

from ssvit.checkpoints.checkpoint import checkpoint_folder
from ssvit.choices import options_of
from ssvit.config import composition
from ssvit.config.command_line import CommandLine
from ssvit.data import arguments
from ssvit.data.sources.base_options import DataSet
from ssvit.engine import processes
from ssvit.errors import OptionError, UserError
from ssvit.loading.pretrained import safe_options
from ssvit.training.budget import schedule
from ssvit.training.options import Pretrain

AUTO = "auto"
OBJECTIVE = "mae"  # ranks first by most metrics of docs/methods.md
_SAMPLED = 64  # number of images to read
_FEW = 20_000  # images, below which the features of existing weights are likely to be better
_NEEDED = "requires a folder of images or of shards, or a table (data=PATH); must be null for other images"
_PIXELS = ("data.channels", "data.range", "data.mean", "data.std")
_OF_ENCODER = ("encoder", "encoder.patch_size", "data.image_size")  # determined by a checkpoint


def choose(
    images: int, side: int, *, cores: int, processes: int = 1, typed: Mapping[str, int] | None = None
) -> dict[str, object]:
    """Return the options for a set of images.

    Args:
        images: Number of training images.
        side: Median of their shorter sides in pixels.
        cores: CPU cores of this machine.
        processes: Number of training processes.
        typed: Numeric options of the command line by name, which the chosen options are adapted to.
    """
    typed = typed or {}
    size = typed.get("data.image_size", 32 if side < 48 else 64)
    parts = processes * typed.get("recipe.accumulate", 1)
    batch_size = typed.get("recipe.batch_size", max(1, min(64, images // 4) // parts) * parts)
    samples = min(max(100 * images, 256_000), 1_280_000)
    # A multiple of 100, so that logging, evaluation and checkpoints divide it.
    steps = typed.get("recipe.steps", max(100, int(round(samples / batch_size, -2))))
    return {
        "objective": OBJECTIVE,
        "encoder": "small",
        "data.image_size": size,
        "encoder.patch_size": next(side for side in range(max(1, size // 8), 0, -1) if size % side == 0),
        **{f"recipe.{name}": value for name, value in schedule(steps).items()},
        "recipe.batch_size": batch_size,
        "recipe.optimizer": "muon",
        "recipe.lr": 2e-3,
        "workers": min(16, cores - 1),
    }


def expand_images(line: CommandLine) -> None:
    """Replace data=PATH by the options for that path, with preset=auto for a user's images."""
    arguments.expand(line, additions={"preset": AUTO})


def expand(line: CommandLine) -> None:
    """Add the options that preset=auto chooses to a command line, except those that are typed.

    Args:
        line: The command line, which is modified.

    Raises:
        OptionError: The images are not in a folder or a table.
        UserError: No image can be read.
    """
    typed = line.typed
    if typed.get("preset") != AUTO or "experiment" in typed:  # an experiment sets all of these options
        return
    if "data" not in typed:
        raise OptionError("preset", AUTO, _NEEDED)
    images, side, grey = _summary(line)
    cores = len(os.sched_getaffinity(0))
    numbers = {name: value for name, value in typed.items() if type(value) is int and value > 0}
    # Without an option or a launcher, one process is assumed.
    count = processes.count(numbers.get("launch.devices", 1), numbers.get("launch.num_nodes", 1)) or 1
    chosen = choose(images, side, cores=cores, processes=count, typed=numbers)
    if typed.get("data.channels", 1) == 1 and "data.range" not in typed:
        chosen |= grey
    fixed = set(typed)
    checkpoint = line.text("checkpoint")
    if checkpoint is not None:
        fixed.update(_OF_ENCODER, () if "data.channels" in typed else _PIXELS)
        fixed.update(safe := safe_options(line), ("recipe.optimizer",) if safe else ())
        if checkpoint_folder(Path(checkpoint)) is None:  # of another project, for which it has a recipe
            fixed.update(("recipe.optimizer", "recipe.lr"))
    encoder = options_of(line.part("encoder", typed.get("encoder", "small")))
    if encoder is not None and "patch_size" not in encoder.model_fields:
        fixed.add("encoder.patch_size")
    if "budget" in typed:
        fixed.update(f"recipe.{name}" for name in schedule(1))
    if "continuation" in typed or typed.get("objective", OBJECTIVE) != OBJECTIVE:  # these have their own recipes
        fixed.update(("recipe.optimizer", "recipe.lr"))
    if any(name.partition(".")[0] in ("objective", "target") for name in typed):  # such as target=pixels
        fixed.add("objective")
    size, patch = (int(str(chosen[name])) for name in ("data.image_size", "encoder.patch_size"))
    larger = min(2 * size, side - side % (size // patch))
    resized = ""
    if "data.image_size" not in fixed and larger > size:
        resized = f" resized to {size} (data.image_size={larger} keeps more detail),"
    noun = "grey images" if grey else "images"
    options = {name: value for name, value in chosen.items() if name not in fixed}
    if options:
        line.say(f"preset=auto: {images:,} {noun} with a median side of {side} pixels,{resized} {cores} CPU cores:")
        line.say(f"  {' '.join(line.written(options))}")
    line.implied |= options
    if images < _FEW and checkpoint is None:
        path = shlex.quote(line.text("data.root") or "PATH")
        line.say(
            f"preset=auto: with fewer than {_FEW:,} images, existing weights are likely to give better features than "
            f"random weights (ssvit evaluate checkpoint=WEIGHTS data={path})"
        )


def _summary(line: CommandLine) -> tuple[int, int, Mapping[str, object]]:
    """Read a sample of training images: the headers of all, and the pixels until one image has colours.

    Returns:
        The number of training images, the median of the shorter sides of the sample in pixels, and options of `_PIXELS`
        for grey images, which are empty if an image of the sample has colours, or 8-bit and 16-bit images are mixed.

    Raises:
        OptionError: The data set cannot be sampled.
        UserError: No image can be read.
    """
    from ssvit.data.sources import rasters

    names = (name for name in line.typed if re.match(r"data(?!\.augment)\b", name) and name not in _PIXELS)
    data = {name: line.typed[name] for name in names}
    config = composition.compose("pretrain", line.changed(data), Pretrain)
    source = config.options.data
    sample = source.sample(_SAMPLED) if isinstance(source, DataSet) else None
    if sample is None:
        expected = "must be a folder of images or of shards, or a table, for preset=auto"
        raise OptionError("data", line.typed["data"], expected)
    side = rasters.median_side(sample)
    if side is None:
        others = f", and neither can {len(sample.files) - 1} others" if len(sample.files) > 1 else ""
        raise UserError(f"{sample.first}: cannot be read as an image{others}")
    values: list[tuple[rasters.Moments, bool] | None] = []
    for opened in sample.files:
        with suppress(Exception), opened() as file:  # the loader replaces unreadable images
            values.append(rasters.grey(file, getattr(source, "background", None)))
        if None in values:
            break
    grey = {}
    if values and None not in values:
        moments, is_bytes = zip(*filter(None, values), strict=True)
        if len({*is_bytes}) == 1:  # 8-bit images would be black in the range of 16-bit ones
            grey = reduce(add, moments).options(is_bytes=is_bytes[0])
    return sample.images, side, {f"data.{name}": value for name, value in grey.items()}
