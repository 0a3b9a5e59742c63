"""An encoder from its arguments, which a checkpoint has."""

from collections.abc import Mapping
from typing import Any

from ssvit.models import build_options, timm_options
from ssvit.models.encoder import Encoder
from ssvit.models.timm import Timm
from ssvit.models.vit import ViT


def build(arguments: Mapping[str, Any]) -> Encoder:
    """An encoder with random weights. OptionError if an argument is wrong."""
    return Timm(**arguments) if build_options.kind(arguments) is timm_options.Timm else ViT(**arguments)
