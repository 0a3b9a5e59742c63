"""Find pictures that look alike: python tools/retrieve.py action=index|add|query store=FOLDER PICTURES…|data=SET"""

from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ssvit.checkpoints import manifest
from ssvit.checkpoints.options import eval_transform
from ssvit.cli.launch import announce, launch, say
from ssvit.evaluation.options import readings
from ssvit.options import OptionError, within
from ssvit.retrieval import gallery_rules
from ssvit.training import preflight


def run(config: DictConfig, plain: dict[str, Any]) -> None:
    """Make a store of pictures, add to it, or ask it; files that cannot be read are named and left out."""
    checked = ("action", "store", "split", "k", "batch_size", "workers", "ranking", "sheet", "output")
    gallery_rules.check(**{name: plain[name] for name in checked})
    preflight.parts(plain)
    of_a_set = plain["data"] is not None
    pictures = gallery_rules.pictures(plain["images"]) if plain["images"] or not of_a_set else {}
    checkpoint = manifest.find(plain["checkpoint"], outputs=plain["outputs"], stage=manifest.PRETRAIN, say=say)
    with within("encoder"):
        facts = manifest.read(checkpoint, plain["encoder"])
    features = gallery_rules.features(plain["features"], action=plain["action"], store=plain["store"])
    with within("features"):
        found = readings(facts["encoder"], **features)
    if len(found) > 1:
        raise OptionError("features.layer", features["layer"], "must be one: a store has those of one layer")
    transform = eval_transform(checkpoint, facts)

    from hydra.utils import instantiate

    from ssvit.checkpoints.checkpoint import load_encoder
    from ssvit.data.augment.crop import CenterCrop
    from ssvit.data.decode import load
    from ssvit.evaluation.features import Frozen
    from ssvit.retrieval import gallery

    kind = instantiate(config.index)
    frozen = Frozen(load_encoder(checkpoint, **plain["encoder"]), found, identity=facts["seal"][:16])
    view = CenterCrop(**vars(transform))
    if of_a_set:
        called = HydraConfig.get().runtime.choices.data
        split, load = gallery.of_data_set(called, instantiate(config.data.source, _convert_="all"), plain["split"])
        pictures = pictures or split
    describe = gallery.Describer(frozen, view, load=load, **{name: plain[name] for name in ("batch_size", "workers")})
    write = {gallery_rules.INDEX: gallery.index, gallery_rules.ADD: gallery.add}.get(plain["action"])
    if write is not None:
        told = write(plain["store"], pictures, describe)
    else:
        answer = gallery.query(plain["store"], pictures, describe, kind, plain["k"])
        answer.write(sheet=plain["sheet"], output=plain["output"])
        told = answer.told(ranking=plain["ranking"])
    announce()
    print(told, describe.told, sep="\n")


def main() -> None:
    """Start the tool."""
    launch("retrieve", run, positional="images")
