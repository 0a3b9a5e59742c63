"""Plot the inside of an encoder: ssvit visualize checkpoint=PATH PICTURES…"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssvit.analysis.options import Visualize, plotted
from ssvit.checkpoints.checkpoint import FINETUNE, Checkpoint
from ssvit.checkpoints.finding import find, open_checkpoint
from ssvit.checkpoints.loading_options import LoadEncoder, pixel_format
from ssvit.cli.launch import Tool, progress
from ssvit.cli.pretrained import SCRATCH, from_scratch, offer
from ssvit.config.composed import Config
from ssvit.config.declaration import select
from ssvit.data import folder
from ssvit.models.build_options import vit
from ssvit.options import OptionError, print_lines
from ssvit.training import preflight


def run(config: Config) -> None:
    """Plot the figures and print the numbers; pictures that cannot be read are named and left out."""
    plain = config.values
    own = select(Visualize, plain)
    paths = [path for image in plain["images"] for path in folder.pictures(str(image))]
    seen = {"view": plain["data"]["view"]} if paths else plain["data"]
    preflight.encoder(preflight.parts({"encoder": plain["encoder"], "data": seen}))
    checkpoint = open_checkpoint(plain["encoder"]["path"], plain["encoder"])
    layer, pooling = plotted(vit(checkpoint.encoder), layer=own.layer, pooling=own.pooling)
    sizes = {name: plain["encoder"][name] for name in ("resize", "image_size")}
    other = None
    if plain["other"] not in (None, SCRATCH):
        other = find_other(config, sizes, checkpoint.encoder["channels"])
    config.line.announce()

    import torch

    from ssvit.analysis import inside
    from ssvit.checkpoints.loading import load_encoder
    from ssvit.figures.display import use_bands
    from ssvit.randomness import key

    device = "cuda" if own.device == "auto" and torch.cuda.is_available() else "cpu"
    use_bands(plain["data"])
    view, batch = config.build("data.view"), own.batch_size
    if paths:
        pictures = inside.from_files(paths, view, own.count, print_lines, pixel_format(checkpoint))
    else:
        source = config.build("data.source").watched
        pictures = inside.held_out(
            source, view, own.count, batch_size=batch, workers=own.workers, timeout=own.loader_timeout
        )
    encoder = config.build("encoder").to(device)
    second = None
    if plain["other"] == SCRATCH:
        torch.manual_seed(key(0, "weights"))
        second = "random weights", from_scratch(config).build("encoder").eval().to(device)
    elif other is not None:
        second = other.name, load_encoder(other.path, announce=True, **sizes).to(device)
    found = inside.look(
        encoder, pictures, other=second, layer=layer, pooling=pooling, shown=own.shown, batch_size=batch,
        progress=progress("images", " images"),
    )  # fmt: skip
    found.numbers |= {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        "other": plain["other"] and str(other.path if other else plain["other"]),
    }
    written = found.save(Path(own.output or checkpoint.home(plain["outputs"]) / "visualize"), checkpoint.step)
    print_lines(*found.lines, *(f"written: {file}" for file in written))


def find_other(config: Config, sizes: Mapping[str, Any], channels: int) -> Checkpoint:
    """The checkpoint of the second encoder. OptionError unless its images have so many channels."""
    plain = config.values
    other = plain["other"]
    try:
        found = find(other, outputs=plain["outputs"], stage=FINETUNE, say=config.line.say)
        LoadEncoder(path=found.path, **sizes).encoder()
        theirs = vit(found.encoder).channels
    except OptionError as error:
        where = "" if error.name == "checkpoint" else f"{error.name}={error.value}: "
        raise OptionError("other", other, f"{where}{error.right}") from None
    if theirs != channels:
        right = f"must take images of {channels} channels, as the checkpoint does, not of {theirs}"
        raise OptionError("other", other, right)
    return found


tool = Tool(
    "visualize",
    "plot filters, positions, attention and the similarity of layers",
    run,
    before=offer,
    positional="images",
    options=Visualize,
)
