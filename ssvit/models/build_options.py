"""The options of an encoder from its arguments, as a checkpoint has them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ssvit.models.vit_options import ViT
from ssvit.options import UserError

if TYPE_CHECKING:
    from ssvit.models.timm_options import Timm


def kind(arguments: Mapping[str, Any]) -> "type[ViT] | type[Timm]":
    """What an encoder with these arguments is."""
    if "model" not in arguments:
        return ViT

    from ssvit.models.timm_options import Timm

    return Timm


def of(arguments: Mapping[str, Any]) -> "ViT | Timm":
    """The options of an encoder. OptionError if one is wrong."""
    return kind(arguments)(**arguments)


def vit(arguments: Mapping[str, Any]) -> ViT:
    """The options of an encoder that must be a ViT. UserError if it is a model of timm."""
    if "model" in arguments:
        raise UserError(f"the encoder is timm's {arguments['model']}, and this command needs a ViT of ssvit")
    return ViT(**arguments)
