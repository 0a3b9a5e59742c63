"""Look into an encoder: python tools/visualize.py checkpoint=PATH PICTURES…"""

from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from ssvit.analysis.options import Visualize, drawn
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.cli import compared
from ssvit.cli.launch import announce, launch, progress
from ssvit.cli.pretrained import offer
from ssvit.data import folder
from ssvit.options import select
from ssvit.training import preflight


def run(config: DictConfig, plain: dict[str, Any]) -> None:
    """Draw the figures and say the numbers; pictures that cannot be read are named and left out."""
    own = select(Visualize, plain)
    paths = [path for image in plain["images"] for path in folder.pictures(str(image))]
    seen = {"view": plain["data"]["view"]} if paths else plain["data"]
    encoder = preflight.encoder(preflight.parts({"encoder": plain["encoder"], "data": seen}))
    checkpoint = Checkpoint.open(plain["encoder"]["path"], plain["encoder"])
    layer, pooling = drawn(encoder, layer=own.layer, pooling=own.pooling)
    other = compared.find(plain)
    announce()

    import torch

    from ssvit.analysis import inside

    device = "cuda" if own.device == "auto" and torch.cuda.is_available() else "cpu"
    view, batch = instantiate(config.data.view, _convert_="all"), own.batch_size
    if paths:
        pictures = inside.from_files(paths, view, own.count, print)
    else:
        source = instantiate(config.data.source, _convert_="all").watched
        reading = {"batch_size": batch, "workers": own.workers, "timeout": own.loader_timeout}
        pictures = inside.held_out(source, view, own.count, **reading)
    encoder = instantiate(config.encoder, _convert_="all").to(device)
    if second := compared.build(config, plain, other):
        second[1].to(device)
    options = {"layer": layer, "pooling": pooling, "shown": own.shown, "batch_size": batch}
    found = inside.look(encoder, pictures, other=second, **options, progress=progress("images", " images"))
    found.numbers |= {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step,
        "other": plain["other"] and str(other.path if other else plain["other"]),
    }
    written = found.save(Path(own.output or checkpoint.home(plain["outputs"]) / "visualize"), checkpoint.step)
    print(*found.lines, *(f"written: {file}" for file in written), sep="\n")


def main() -> None:
    """Start the tool."""
    launch("visualize", run, before=offer, positional="images")
