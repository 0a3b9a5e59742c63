"""The options of an encoder from its arguments, as a checkpoint has them."""

from collections.abc import Mapping

from ssvit.config.declaration import make
from ssvit.models.timm_options import Timm
from ssvit.models.vit_options import ViT
from ssvit.options import UserError


def kind(arguments: Mapping[str, object]) -> type[ViT] | type[Timm]:
    """What an encoder with these arguments is."""
    return Timm if "model" in arguments else ViT


def of(arguments: Mapping[str, object]) -> ViT | Timm:
    """The options of an encoder. OptionError if one is wrong."""
    return make(kind(arguments), arguments)


def vit(arguments: Mapping[str, object]) -> ViT:
    """The options of an encoder that must be a ViT. UserError if it is a model of timm."""
    if kind(arguments) is Timm:
        raise UserError(f"the encoder is timm's {arguments['model']}, and this command needs a ViT of ssvit")
    return make(ViT, arguments)
