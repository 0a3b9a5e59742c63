"""Find pictures that look alike: python tools/retrieve.py action=index|add|query store=FOLDER PICTURES…"""

import json
from pathlib import Path
from typing import Any

from launch import launch
from omegaconf import DictConfig

from ssvit.evaluation import features_rules, gallery_rules
from ssvit.options import OptionError, within
from ssvit.training import manifest


def main(config: DictConfig, plain: dict[str, Any]) -> None:
    """Make a store of pictures, add to it, or ask it; files that cannot be read are named and left out."""
    checked = ("action", "store", "k", "batch_size", "workers", "ranking", "sheet", "output")
    gallery_rules.check(**{name: plain[name] for name in checked})
    pictures = gallery_rules.pictures(plain["images"])
    checkpoint = manifest.find(plain["checkpoint"], outputs=plain["outputs"], stage=manifest.PRETRAIN)
    facts = manifest.read(checkpoint)
    own = {"depth": facts["encoder"]["depth"], "class_token": facts["encoder"]["class_token"]}
    with within("features"):
        found = features_rules.readings(**own, **plain["features"])
    if len(found) > 1:
        raise OptionError("features.layer", plain["features"]["layer"], "must be one: a store has those of one layer")

    from hydra.utils import instantiate

    from ssvit.data.transforms import CenterCrop
    from ssvit.evaluation import gallery
    from ssvit.evaluation.features import Frozen
    from ssvit.training.checkpoint import load_encoder

    kind = instantiate(config.index)
    frozen = Frozen(load_encoder(checkpoint), found, identity=facts["seal"][:16])
    view = CenterCrop(**facts.get("view", {"size": facts["encoder"]["image_size"]}))
    describe = gallery.Describer(frozen, view, batch_size=plain["batch_size"], workers=plain["workers"])
    if plain["action"] == gallery_rules.INDEX:
        told = gallery.index(plain["store"], pictures, describe)
    elif plain["action"] == gallery_rules.ADD:
        told = gallery.add(plain["store"], pictures, describe)
    else:
        answer = gallery.query(plain["store"], pictures, describe, kind, plain["k"])
        if plain["output"] is not None:
            Path(plain["output"]).write_text(json.dumps(answer.records(), indent=1) + "\n")
        if plain["sheet"] is not None:
            answer.sheet().savefig(plain["sheet"], format="png")
        told = answer.told(ranking=plain["ranking"])
    print(told)
    print(describe.told)


if __name__ == "__main__":
    launch("retrieve", main, positional="images")
