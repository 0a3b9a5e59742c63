"""Express options that are written in Python as choices and values, as they are typed in a shell."""

from collections.abc import Iterator, Mapping

from ssvit.choices import GROUPS, choice_names, part_of, variant
from ssvit.config.declaration import Options
from ssvit.errors import OptionError

_AUGMENT = "data.augment"  # the only part within another part that is a choice
_SEVERAL = {"probes": "probe@probes", "evaluators": "evaluator@evaluators", "logger": "logger"}  # and their choices


def assignments(options: Options, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the options that are set, at any depth: choices of parts, such as ("objective", "mae"), and values.

    Options that are not set have the values of the files of options, as on the command line.

    Args:
        options: The options of a command, or those of a part.
        path: Dotted name of `options` and a dot; "" for a command.

    Raises:
        OptionError: A part is no choice, or one of several parts has another name than its choice.
    """
    for name in type(options).model_fields:
        if name not in options.model_fields_set:
            continue
        value, full = getattr(options, name), f"{path}{name}"
        if isinstance(value, Options):
            part = part_of(type(value))
            if full in GROUPS:
                yield full, _choice(full, value)
            elif full == _AUGMENT:
                yield f"augment@{full}", _choice("augment", value)
            elif part is not None:
                yield full, {"_part_": part}
            elif type(options).model_fields[name].default is None:  # all options of the group must be set together
                yield full, value.model_dump(exclude_unset=True)
                continue
            yield from assignments(value, f"{full}.")
        elif full in _SEVERAL:
            yield from _of_several(value, full)
        elif full not in GROUPS or value is not None:
            yield full, value


def _choice(group: str, options: Options) -> str:
    """Return the choice of a part: its name, or else that of the data set that its options name, such as cifar10."""
    part = _part(options)
    for choice in (part, str(getattr(options, "name", ""))):
        if choice in choice_names(group) and getattr(variant(group, choice), "part", "") == part:
            return choice
    raise OptionError(group, type(options).__name__, f"must be the options of one of {', '.join(choice_names(group))}")


def _part(options: Options) -> str:
    """Return the name of a part without its group."""
    return (part_of(type(options)) or "").rpartition("/")[2]


def _of_several(parts: Mapping[str, Options], name: str) -> Iterator[tuple[str, object]]:
    """Yield the choice and the options of several parts, each of which has the name of a choice of its part."""
    group = _SEVERAL[name].partition("@")[0]
    for choice, options in parts.items():
        if getattr(variant(group, choice), "part", None) != _part(options):
            expected = f"must have the name of a choice of {group} with these options"
            raise OptionError(f"{name}.{choice}", type(options).__name__, expected)
    yield _SEVERAL[name], [*parts]
    for choice, options in parts.items():
        yield from assignments(options, f"{name}.{choice}.")
