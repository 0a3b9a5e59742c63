"""Express options that are written in Python as choices and values, as they are typed in a shell."""

from collections.abc import Iterator, Mapping

from ssvit.choices import part_of, variant
from ssvit.config.declaration import Options
from ssvit.errors import OptionError


def flatten(options: Options, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the options that are set, at any depth: choices of parts, such as ("objective", "mae"), and values.

    Options that are not set have the values of the files of options, as on the command line.

    Args:
        options: The options of a command, or those of a part.
        path: Dotted name of `options` and a dot; "" for a command.

    Raises:
        OptionError: A part is not in the table of choices, or one of several parts has another name than its choice.
    """
    for name in type(options).model_fields:
        if name not in options.model_fields_set:
            continue
        value, full = getattr(options, name), f"{path}{name}"
        if isinstance(value, Options):
            if (part := part_of(type(value))) is not None:
                group, _, choice = part.partition("/")
                yield full if group == full else f"{group}@{full}", choice
            elif type(options).model_fields[name].default is None:  # all options of the group must be set together
                yield full, value.model_dump(exclude_unset=True)
                continue
            yield from flatten(value, f"{full}.")
        elif isinstance(value, Mapping) and any(isinstance(item, Options) for item in value.values()):
            yield from _of_several(value, full)
        else:
            yield full, value


def _of_several(parts: Mapping[str, Options], path: str) -> Iterator[tuple[str, object]]:
    """Yield the choice and the options of several parts, each of which has the name of a choice of its part."""
    group = ""
    for name, options in parts.items():
        group, _, part = (part_of(type(options)) or "").partition("/")
        choice = variant(group, name)
        if choice is None or choice.part != part:
            expected = f"must have the name of a choice of {group or 'a group'} with these options, such as {part}"
            raise OptionError(f"{path}.{name}", type(options).__name__, expected)
    yield f"{group}@{path}", [*parts]
    for name, options in parts.items():
        yield from flatten(options, f"{path}.{name}.")
