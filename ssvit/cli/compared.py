"""The option other=: a second encoder, to be compared with that of the checkpoint on the same images.

`find` comes before torch is loaded; `build` loads it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from ssvit.checkpoints import checkpoint
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.options import LoadEncoder
from ssvit.cli.launch import say
from ssvit.cli.pretrained import SCRATCH, from_scratch
from ssvit.options import OptionError

if TYPE_CHECKING:
    from ssvit.models.vit import ViT


def find(plain: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint of the second encoder, None if there is none. OptionError unless it can see the same images."""
    other, first = plain["other"], plain["encoder"]
    if other in (None, SCRATCH):
        return None
    try:
        found = checkpoint.find(other, outputs=plain["outputs"], stage=checkpoint.FINETUNE, say=say)
        own = LoadEncoder(path=found.path, resize=first["resize"], image_size=first["image_size"]).encoder().channels
    except OptionError as error:
        where = "" if error.name == "checkpoint" else f"{error.name}={error.value}: "
        raise OptionError("other", other, f"{where}{error.right}") from None
    right = Checkpoint.open(first["path"], first).encoder["channels"]
    if own != right:
        raise OptionError("other", other, f"must take images of {right} channels, as the checkpoint does, not of {own}")
    return found


def build(config: DictConfig, plain: Mapping[str, Any], other: Checkpoint | None) -> "tuple[str, ViT] | None":
    """What the second encoder is called, and itself in eval mode; other: what `find` found."""
    import torch

    from ssvit.checkpoints.storage import load_encoder
    from ssvit.randomness import key

    if plain["other"] == SCRATCH:
        torch.manual_seed(key(0, "weights"))
        return "random weights", instantiate(from_scratch(config).encoder, _convert_="all").eval()
    if other is None:
        return None
    first = plain["encoder"]
    return other.name, load_encoder(other.path, resize=first["resize"], announce=True, image_size=first["image_size"])
