"""Plot internal representations of an encoder.

Usage: ssvit visualize checkpoint=PATH IMAGES….
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ssvit.analysis.options import Visualize, plotted
from ssvit.checkpoints.checkpoint import FINETUNE, SCRATCH, Checkpoint
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Run
from ssvit.data.sources import folder
from ssvit.data.sources.base_options import SHORT_FORMS
from ssvit.loading.encoder_options import LoadEncoder, pixel_format
from ssvit.loading.finding import find
from ssvit.loading.pretrained import offer, stand_in
from ssvit.models.timm_options import vit
from ssvit.options import OptionError, print_lines
from ssvit.progress import progress


def run(config: Config) -> None:
    """Plot the figures and print the numbers; unreadable images are reported and skipped."""
    options: Visualize = config.options
    paths = [path for image in options.images for path in folder.pictures(image)]
    Run(options.changed(data=None) if paths else options).check()
    checkpoint = options.encoder.checkpoint()
    layer, pooling = plotted(vit(checkpoint.encoder), layer=options.layer, pooling=options.pooling)
    sizes = {"resize": options.encoder.resize, "image_size": options.encoder.image_size}
    other = None
    if options.other not in (None, SCRATCH):
        other = find_other(options, sizes, checkpoint.encoder["channels"], config.line.say)
    config.line.announce()

    import torch

    from ssvit.analysis import inside
    from ssvit.figures.display import Display
    from ssvit.loading.encoder import load_encoder
    from ssvit.randomness import key

    device = "cuda" if options.device == "auto" and torch.cuda.is_available() else "cpu"
    view, batch = config.build("data.view"), options.batch_size
    if paths:
        pictures = inside.from_files(paths, view, options.count, print_lines, pixel_format(checkpoint))
    else:
        source = config.build("data.source").watched
        pictures = inside.held_out(
            source, view, options.count, batch_size=batch, workers=options.workers, timeout=options.loader_timeout
        )
    encoder = config.build("encoder").to(device)
    second = None
    if options.other == SCRATCH:
        torch.manual_seed(key(0, "weights"))
        second = "random weights", options.encoder.loaded().build().eval().to(device)
    elif other is not None:
        second = other.name, load_encoder(LoadEncoder(path=other.path, announce=True, **sizes)).to(device)
    found = inside.look(
        encoder, pictures, other=second, layer=layer, pooling=pooling, shown=options.shown, batch_size=batch,
        display=Display.of(options.data), progress=progress("images", " images"),
    )  # fmt: skip
    found.numbers |= {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        "other": options.other and str(other.path if other else options.other),
    }
    written = found.save(Path(options.output or checkpoint.home(options.outputs) / "visualize"), checkpoint.step)
    print_lines(*found.lines, *(f"written: {file}" for file in written))


def find_other(options: Visualize, sizes: Mapping[str, Any], channels: int, say: Callable[[str], None]) -> Checkpoint:
    """Return the checkpoint of the second encoder.

    Args:
        options: Options of the command.
        sizes: Options of the encoder's image size.
        channels: Number of channels of the first encoder.
        say: Function that prints a line.

    Raises:
        OptionError: There is no such checkpoint, or its number of channels differs.
    """
    other = str(options.other)
    try:
        found = find(other, outputs=options.outputs, stage=FINETUNE, say=say)
        LoadEncoder(path=found.path, **sizes).loaded()
        theirs = vit(found.encoder).channels
    except OptionError as error:
        where = "" if error.name == "checkpoint" else f"{error.name}={error.value}: "
        raise OptionError("other", other, f"{where}{error.expectation}") from None
    if theirs != channels:
        right = f"must take images of {channels} channels, as the checkpoint does, not of {theirs}"
        raise OptionError("other", other, right)
    return found


command = Command(
    "visualize",
    run,
    expansions=SHORT_FORMS,
    before=offer,
    stand_in=stand_in,
    positional="images",
    options=Visualize,
)
