"""Define the options of a timm model and convert the options of any encoder to and from plain data.

A checkpoint identifies the class of an encoder's options by a choice of the group encoder or by an option that only
one class has, never by a class path, which would execute code. A ViT has no name; a timm model has the option `model`.
"""

import difflib
import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ssvit.choices import options_of, part_of
from ssvit.config.command_line import CommandLine
from ssvit.config.declaration import Expect
from ssvit.errors import OptionError, UserError
from ssvit.models.encoder_options import ANY_ENCODER, POOLED, Normalized
from ssvit.models.vit_options import ViT

_CHOICE = "choice"  # key under which the options of a plug-in encoder store the name of their choice


class Timm(Normalized):
    """Use a timm model without its classifier, as an encoder of one layer, for comparison."""

    model: str
    """Name of the model in timm."""
    arguments: Annotated[Mapping[str, Any], Expect("{name: value}, arguments of timm's model")] = {}
    """Further keyword arguments of the model, such as {drop_path_rate: 0.1}."""

    patch_size: ClassVar[tuple[int, int]] = (1, 1)  # the timm model checks the image size itself
    depth: ClassVar[int] = 1
    pooling: ClassVar[str] = POOLED
    poolings: ClassVar[tuple[str, ...]] = (POOLED,)

    @property
    def label(self) -> str:
        """Return the name of the model for messages."""
        return f"timm's {self.model}"

    def check_consistency(self) -> None:
        """Check the model name and that the arguments do not repeat other options."""
        super().check_consistency()
        names = timm_models()
        if (name := self.model.partition(".")[0]) not in names:
            similar = ", ".join(difflib.get_close_matches(name, names, n=3)) or "none: see timm.list_models()"
            raise OptionError("model", self.model, f"must be a model of timm; similar names: {similar}")
        for argument in ("num_classes", "in_chans", "img_size", "pretrained"):
            if argument in self.arguments:
                raise OptionError(f"arguments.{argument}", self.arguments[argument], "must be set by another option")


def check_objective(line: CommandLine) -> None:
    """Check that a command line with encoder=timm selects an objective that works without patches.

    This runs before the configuration is composed, which would fail on references to options of a ViT.

    Args:
        line: Parsed command line.

    Raises:
        OptionError: The objective needs patches.
    """
    options = line.values
    if options["encoder"] == "timm" and "experiment" not in options:
        name = options.get("objective", "masked_patch")
        if getattr(options_of(line.part("objective", name)), "needs_patches", False):
            raise OptionError("objective", name, f"requires patches, which encoder=timm does not have; {ANY_ENCODER}")


@cache
def timm_models() -> frozenset[str]:
    """Return the names of timm's models, read from its source because importing timm loads torch.

    Raises:
        UserError: timm is not installed.
    """
    package = find_spec("timm")
    if package is None or package.origin is None:
        raise UserError("encoder=timm: requires timm: pip install timm")
    texts = (file.read_text() for file in Path(package.origin).parent.glob("models/*.py"))
    return frozenset(name for text in texts for name in re.findall(r"^@register_model\ndef (\w+)\(", text, re.M))


def is_stored(options: object) -> bool:
    """Return whether a checkpoint can identify the class of an encoder's options."""
    return isinstance(options, Normalized) and part_of(type(options)) is not None


def stored(options: Normalized) -> dict[str, Any]:
    """Return the options of an encoder as plain data, which `options_from` converts back."""
    part = str(part_of(type(options))).removeprefix("encoder/")
    return ({} if isinstance(options, ViT | Timm) else {_CHOICE: part}) | options.values()


def options_class(arguments: Mapping[str, Any]) -> type[Normalized]:
    """Return the class of an encoder's options.

    Raises:
        UserError: The class is a plug-in's that is not declared.
    """
    if _CHOICE in arguments:
        options: type[Normalized] | None = options_of(f"encoder/{arguments[_CHOICE]}")
        if options is None or not issubclass(options, Normalized):
            raise UserError(f"encoder={arguments[_CHOICE]}: must be added by a package that --plugin names")
        return options
    return Timm if "model" in arguments else ViT


def options_from(arguments: Mapping[str, Any]) -> Any:
    """Return the options of an encoder from plain data.

    Raises:
        OptionError: An option is invalid.
        UserError: Their class is a plug-in's that is not declared.
    """
    return options_class(arguments)(**{name: value for name, value in arguments.items() if name != _CHOICE})


def vit(arguments: Mapping[str, Any]) -> ViT:
    """Return the options of a ViT from plain data.

    Raises:
        UserError: The data describe another encoder.
    """
    options = options_from(arguments)
    if not isinstance(options, ViT):
        raise UserError(f"the encoder is {options.label}; this command requires a ViT of ssvit")
    return options
