"""The options of a model of timm."""

import difflib
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import model_validator

from ssvit.config.choices import lookup
from ssvit.config.command_line import CommandLine
from ssvit.config.declaration import Expect, find
from ssvit.models.encoder_options import POOLED, Normalized
from ssvit.options import OptionError, UserError


class Timm(Normalized):
    """A model of timm without its classifier, as an encoder of one layer, to compare with."""

    model: str
    """Its name in timm."""
    arguments: Annotated[Mapping[str, Any], Expect("{name: value}, arguments of timm's model")] = {}
    """Further keyword arguments of the model, such as {drop_path_rate: 0.1}."""

    patch_size: ClassVar[tuple[int, int]] = (1, 1)  # the model itself refuses an image size
    depth: ClassVar[int] = 1
    pooling: ClassVar[str] = POOLED
    poolings: ClassVar[tuple[str, ...]] = (POOLED,)

    @property
    def label(self) -> str:
        return f"timm's {self.model}"

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        known = timm_models()
        if (name := self.model.partition(".")[0]) not in known:
            close = ", ".join(difflib.get_close_matches(name, known, n=3)) or "none: see timm.list_models()"
            raise OptionError("model", self.model, f"is no model of timm; names near it: {close}")
        for taken in ("num_classes", "in_chans", "img_size", "pretrained"):
            if taken in self.arguments:
                raise OptionError(f"arguments.{taken}", self.arguments[taken], "is set by other options")
        return self


def check_objective(line: CommandLine) -> None:
    """OptionError if a command line has encoder=timm with an objective that needs patches.

    Composition would fail first: the options of such objectives refer to options of a ViT.
    """
    options = line.values
    if options["encoder"] == "timm" and "experiment" not in options:
        name = options.get("objective", "masked_patch")
        part, choice = find(line.part("objective", name) or ""), lookup("objective", name)
        sets = choice.sets.get("encoder", {}) if choice else {}
        if getattr(part, "needs_patches", False) or sets.keys() - Timm.model_fields.keys():
            raise OptionError("objective", name, "must be supervised with encoder=timm, which has no patches")


@cache
def timm_models() -> frozenset[str]:
    """The names of timm's models, from its source, since importing it loads torch. UserError if it is not installed."""
    found = find_spec("timm")
    if found is None or found.origin is None:
        raise UserError("encoder=timm needs timm: pip install 'ssvit[timm]'")
    texts = (file.read_text() for file in Path(found.origin).parent.glob("models/*.py"))
    return frozenset(name for text in texts for name in re.findall(r"^@register_model\ndef (\w+)\(", text, re.M))
