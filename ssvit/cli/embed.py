"""Write the features of pictures into a file: ssvit embed checkpoint=PATH data=PATH output=features.npz"""

from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ssvit.cli import describer
from ssvit.cli.launch import Plain, Tool, announce, progress
from ssvit.data import folder
from ssvit.options import select
from ssvit.retrieval.options import Embed
from ssvit.retrieval.options import pictures as named_pictures
from ssvit.training import preflight


def run(config: DictConfig, plain: Plain) -> Path:
    """Read each picture once and write names, classes and vectors; the same command continues where it stopped."""
    own = select(Embed, plain)
    preflight.parts(plain)
    called = str(HydraConfig.get().runtime.choices.get("data"))
    folders = [*plain["images"]]
    if called == "folder":  # all of its images, in whatever subfolders for training and testing
        root = plain["data"]["root"]
        roots = root if isinstance(root, list) else [root]
        folders += [part for one in roots for part in folder.splits(one) if part is not None]
    pictures = named_pictures(folders) if folders or plain["data"] is None else {}
    of_checkpoint, pixels = describer.check(plain, plain["features"])
    announce()

    from ssvit.data.decode import load
    from ssvit.retrieval import embedding, gallery

    read: gallery.Load = partial(load, pixels=pixels)
    if not pictures:
        data = describer.data_set(config.data.source, pixels)
        pictures, read = gallery.of_data_set(called, data, own.split, read)
    describe = of_checkpoint(load=read, batch_size=own.batch_size, workers=own.workers, bar=False)
    output, identity = Path(own.output), f"{describe.extractor.identity} {describe.transform}"
    print(embedding.embed(pictures, describe, output, identity=identity, progress=progress("pictures", " pictures")))
    return output


tool = Tool("embed", "write the features of pictures into a file", run, positional="images", groups={"": Embed})
