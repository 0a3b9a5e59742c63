"""The options of a model of timm, and of any encoder as plain data, as a checkpoint has them.

The class of an encoder's options is named as a choice of the group encoder, or by what only the class has: never by a
class path, which would be code to run. ViT has no name, and a model of timm has the option `model`.
"""

import difflib
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ssvit.config.choices import lookup, name_of
from ssvit.config.command_line import CommandLine
from ssvit.config.declaration import Expect, find
from ssvit.models.encoder_options import POOLED, Normalized
from ssvit.models.vit_options import ViT
from ssvit.options import OptionError, UserError

_CHOICE = "choice"  # among the data of an encoder of a user's own: the name by which its class is declared


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

    def check_consistency(self) -> None:
        """Check the options against each other."""
        super().check_consistency()
        known = timm_models()
        if (name := self.model.partition(".")[0]) not in known:
            close = ", ".join(difflib.get_close_matches(name, known, n=3)) or "none: see timm.list_models()"
            raise OptionError("model", self.model, f"is no model of timm; names near it: {close}")
        for taken in ("num_classes", "in_chans", "img_size", "pretrained"):
            if taken in self.arguments:
                raise OptionError(f"arguments.{taken}", self.arguments[taken], "is set by other options")


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


def is_stored(options: object) -> bool:
    """Whether a checkpoint can name the class of an encoder's options."""
    built_in = type(options).__module__.startswith("ssvit.")
    return isinstance(options, Normalized) and (built_in or name_of("encoder", type(options)) is not None)


def stored(options: Normalized) -> dict[str, Any]:
    """Return the options of an encoder as plain data, from which `of` makes them again."""
    name = name_of("encoder", type(options))
    return options.values() if name is None else {_CHOICE: name, **options.values()}


def kind(arguments: Mapping[str, Any]) -> type[Normalized]:
    """Return the class of an encoder's options. UserError if it is not declared here."""
    if _CHOICE in arguments:
        choice = lookup("encoder", str(arguments[_CHOICE]))
        if choice is None or not issubclass(choice.options, Normalized):
            right = "give the package (--plugin) or the folder (--config-dir) that declares it"
            raise UserError(f"encoder={arguments[_CHOICE]}: is not declared here; {right}")
        return choice.options
    if "model" not in arguments:
        return ViT
    return Timm


def of(arguments: Mapping[str, Any]) -> Any:
    """Return the options of an encoder. OptionError if one is wrong; UserError if their class is not declared here."""
    return kind(arguments)(**{name: value for name, value in arguments.items() if name != _CHOICE})


def vit(arguments: Mapping[str, Any]) -> ViT:
    """Return the options of an encoder that must be a ViT. UserError if it is another one."""
    options = of(arguments)
    if not isinstance(options, ViT):
        raise UserError(f"the encoder is {options.label}, and this command needs a ViT of ssvit")
    return options
