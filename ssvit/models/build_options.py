"""The options of an encoder from its arguments, as a checkpoint has them."""

from collections.abc import Mapping
from typing import Any

from ssvit.models.timm_options import Timm
from ssvit.models.vit_options import ViT
from ssvit.options import UserError


def kind(arguments: Mapping[str, Any]) -> type[ViT] | type[Timm]:
    """What an encoder with these arguments is."""
    return Timm if "model" in arguments else ViT


def of(arguments: Mapping[str, Any]) -> ViT | Timm:
    """The options of an encoder. OptionError if one is wrong."""
    return kind(arguments)(**arguments)


def vit(arguments: Mapping[str, Any]) -> ViT:
    """The options of an encoder that must be a ViT. UserError if it is a model of timm."""
    if kind(arguments) is Timm:
        raise UserError(f"the encoder is timm's {arguments['model']}, and this command needs a ViT of ssvit")
    return ViT(**arguments)
