"""Find pictures that look alike: ssvit retrieve action=index|add|query store=FOLDER PICTURES…|data=SET"""

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ssvit.checkpoints.checkpoint import PRETRAIN, find
from ssvit.checkpoints.options import eval_transform
from ssvit.cli.launch import Plain, Tool, announce, say
from ssvit.evaluation.options import readings
from ssvit.options import OptionError, select, within
from ssvit.retrieval.options import ADD, INDEX, Retrieve
from ssvit.retrieval.options import pictures as named_pictures
from ssvit.training import preflight


def run(config: DictConfig, plain: Plain) -> None:
    """Make a store of pictures, add to it, or query it; files that cannot be read are named and left out."""
    own = select(Retrieve, plain)
    preflight.parts(plain)
    of_a_set = plain["data"] is not None
    pictures = named_pictures(plain["images"]) if plain["images"] or not of_a_set else {}
    checkpoint = find(plain["checkpoint"], outputs=plain["outputs"], stage=PRETRAIN, options=plain["encoder"], say=say)
    features = own.features(plain["features"])
    with within("features"):
        found = readings(checkpoint.encoder, **features)
    if len(found) > 1:
        raise OptionError("features.layer", features["layer"], "must be one: a store has those of one layer")
    transform = eval_transform(checkpoint)

    from hydra.utils import instantiate

    from ssvit.checkpoints.storage import load_encoder
    from ssvit.data.augment.crop import CenterCrop
    from ssvit.data.decode import load
    from ssvit.evaluation.features import Frozen
    from ssvit.retrieval import gallery

    kind = instantiate(config.index)
    frozen = Frozen(load_encoder(checkpoint.path, **plain["encoder"]), found, identity=checkpoint.checksum[:16])
    read: gallery.Load = load
    if of_a_set:
        called = HydraConfig.get().runtime.choices["data"]
        split, read = gallery.of_data_set(called, instantiate(config.data.source, _convert_="all"), own.split)
        pictures = pictures or split
    crop = CenterCrop(**vars(transform))
    describe = gallery.Describer(frozen, crop, load=read, batch_size=own.batch_size, workers=own.workers)
    if own.action in (INDEX, ADD):
        write = gallery.index if own.action == INDEX else gallery.add
        report = write(own.store, pictures, describe)
    else:
        answer = gallery.query(own.store, pictures, describe, kind, own.k)
        answer.write(sheet=own.sheet, output=own.output)
        report = answer.report(ranking=own.ranking)
    announce()
    print(report, describe.report, sep="\n")


tool = Tool("retrieve", "find pictures that look alike", run, positional="images")
