"""An encoder from its arguments, which a checkpoint has."""

from collections.abc import Mapping
from typing import Any

from ssvit.models import build_options
from ssvit.models.encoder import Encoder


def build(arguments: Mapping[str, Any]) -> Encoder:
    """An encoder with random weights. OptionError if an argument is wrong."""
    return build_options.of(arguments).build()
