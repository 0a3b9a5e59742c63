"""The options of an encoder as plain data, as a checkpoint has them.

The class of the options is named as a choice of the group encoder, or by what only the class has: never by a class
path, which would be code to run. ViT has no name, and a model of timm has the option `model`.
"""

from collections.abc import Mapping
from typing import Any

from ssvit.config.choices import lookup, name_of
from ssvit.models.encoder_options import Normalized
from ssvit.models.vit_options import ViT
from ssvit.options import UserError

_CHOICE = "choice"  # among the data of an encoder of a user's own: the name by which its class is declared


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

    from ssvit.models.timm_options import Timm

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
