"""Print `ssvit COMMAND --help`: each option with its description, default and choices. Torch is not imported.

The help lists the options of the composed configuration: `objective=mae --help` lists the options of mae. Descriptions
and permitted values come from the declaration of an option (`ssvit.config.declaration`).
"""

import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ssvit.choices import GROUPS, options_of, variant
from ssvit.config.command import Command
from ssvit.config.command_line import CommandLine, Plain
from ssvit.config.composed import Config
from ssvit.config.declaration import Options, expected, meanings, nested_options
from ssvit.config.filling import source_of
from ssvit.errors import MISSING, typed

_INDENT = 6 * " "  # indentation of a description below its option


@dataclass(frozen=True)
class Option:
    """Describe an option as it is typed, with its default, description and permitted values."""

    name: str
    default: str = ""
    meaning: str = ""
    expected: str = ""

    def lines(self, width: int) -> list[str]:
        """Return the option, followed by its description and permitted values, wrapped to a width."""
        meaning = self.meaning.replace("`", "").rstrip(".")
        description = f"{meaning} [{self.expected}]".strip() if self.expected else meaning
        head = f"  {self.name}{'=' * bool(self.default)}{self.default}"
        return [
            head if len(head) <= width else f"{head[: width - 1]}…",
            *textwrap.wrap(
                description, width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False
            ),
        ]


@dataclass(frozen=True)
class Section:
    """Options below a heading."""

    title: str
    options: list[Option]


def text(command: Command, purpose: str, arguments: Sequence[str], *, everything: bool) -> str:
    """Return the help text of a command.

    Args:
        command: The command.
        purpose: Description of the command.
        arguments: Its arguments, which select files.
        everything: Whether to list all options or only the common ones.
    """
    files, groups = describe(command, command.described(arguments))
    width = shutil.get_terminal_size().columns
    flags = dict(_FLAGS)
    if command.dry_run is None:
        del flags["--dry-run"], flags["--show-config"], flags["-m"]
    prefixes = () if everything else command.common

    def is_shown(option: Option) -> bool:
        return not prefixes or any(f"{option.name}.".startswith(f"{prefix}.") for prefix in prefixes)

    shown = [Section(group.title, list(filter(is_shown, group.options))) for group in groups]
    hidden = sum(len(group.options) for group in groups) - sum(len(group.options) for group in shown)
    flags["--help-all"] = f"{hidden} more options" if hidden else "All options"
    positional = f" [{command.positional.upper()} …]" if command.positional else ""
    lines = [
        f"{command.prefix}{command.name.replace('_', '-')} [OPTION=VALUE …]{positional}",
        *textwrap.wrap(f"{purpose[0].upper()}{purpose[1:]}.", width),
    ]
    for group in [files, *shown, Section("Flags", [Option(flag, meaning=meaning) for flag, meaning in flags.items()])]:
        if group.options:
            lines += ["", *textwrap.wrap(group.title, width)]
            lines += [line for option in group.options for line in option.lines(width)]
    return "\n".join(lines)


_FLAGS = {
    "--dry-run": "Print the sizes and the estimated time and memory without starting a run",
    "--show-config": "As --dry-run, followed by the composed configuration as YAML",
    "-m": "One run for each combination of values: -m recipe.lr=1e-3,2e-3",
    "--plugin PACKAGE": "Import a package that adds parts (ssvit.choices.add)",
    "--config-dir PATH": "Folder with additional files of options",
    "--help-all": "",
}


def describe(command: Command, config: Config) -> tuple[Section, list[Section]]:
    """Return the files that can be chosen, and the options of the chosen files in groups."""
    choices = _choices(command, config)
    aliases = {option: alias for alias, option in command.aliases.items()}
    options = list(_options(config.written, "", {"": command.options}))
    # Options that take the value of another one are not listed, but describe it.
    taken = {option.name: source for option in options if option.default == "…" and (source := source_of(option.name))}
    described = {taken[option.name]: option for option in options if option.name in taken}
    of_command = meanings(command.options)
    order = ["", *(name.partition(".")[0] for name in command.common)]
    files = []
    for choice, file in sorted(choices.items(), key=lambda item: _place(item[0].partition("@")[0], order)):
        folder, _, package = choice.rpartition("@") if "@" in choice else (choice, "", choice)
        if package != "_here_":
            meaning = of_command.get(package) or (GROUPS[folder].meaning if folder in GROUPS else "")
            names = f"one of {', '.join(config.line.names(folder))}"
            files.append(Option(aliases.get(choice, choice), _typed(file), meaning, names))
    groups: dict[str, Section] = {"": Section("Options of the command", [])}
    for option in options:
        if option.name in taken or option.name in choices:
            continue
        if same := described.get(option.name):
            meaning, values = option.meaning or same.meaning, option.expected or same.expected
            option = replace(option, meaning=meaning, expected=values)
        top = option.name.partition(".")[0] if "." in option.name else ""
        if isinstance(file := choices.get(top), str):
            origin = config.line.origin(top, file)
            here = "" if origin == file else f", here {origin}"
            title = f"{top}={_typed(file)}{here}: {_title(config.line, top, origin) or of_command.get(top, '')}"
        else:
            title = f"{top}: {of_command.get(top, '')}"
        groups.setdefault(top, Section(title.rstrip(": ."), [])).options.append(option)
    for group in groups.values():
        group.options.sort(key=lambda option: _place(option.name, command.common))
    ordered = [groups[top] for top in sorted(groups, key=lambda top: _place(top, order))]
    return Section("Files of options, chosen by their names", files), ordered


def _place(name: str, order: Sequence[str]) -> int:
    """Return the index of a name in a list; the length of the list if it does not contain the name."""
    return order.index(name) if name in order else len(order)


def _choices(command: Command, config: Config) -> dict[str, Any]:
    """Return the file or the list of files chosen in each group; Hydra does not report lists."""
    defaults = config.line.default_choices(command.name)
    lists = {group: files for group, files in defaults.items() if isinstance(files, list)}
    typed_lists = {group: files for group, files in config.line.values.items() if group in lists}
    return {**config.choices, **lists, **typed_lists}


def _options(node: Plain, path: str, classes: Mapping[str, type[Options]]) -> Iterator[Option]:
    """Yield the options in a node.

    Args:
        node: The node.
        path: Its dotted name.
        classes: Classes of groups that have no `_part_`, by dotted name.
    """
    options = options_of(node.get("_part_")) or classes.get(path) or Options
    descriptions = meanings(options)
    for key, value in node.items():
        if key.startswith("_"):
            continue
        name = f"{path}.{key}" if path else key
        field = options.model_fields.get(key)
        if isinstance(value, dict) and value:
            if path and key in descriptions and "_part_" not in value:  # at the root, it is the title of the section
                yield Option(name, "", descriptions[key])
            nested = field and nested_options(field.annotation, field.metadata)
            yield from _options(value, name, {**classes, name: nested} if nested else classes)
        elif "_part_" not in node or options is Options or field:
            values = expected(field.annotation, field.metadata).removesuffix(", or null") if field else ""
            is_specific = re.match(r"one of|a (whole )?number\b|true or false|two numbers", values)
            yield Option(name, _typed(value), descriptions.get(key, ""), values if is_specific else "")


def _title(line: CommandLine, group: str, name: Any) -> str:
    """Return the description of a choice: the first comment in its file, or that in the tables of choices."""
    for file in reversed(list(line.with_bases(f"{group}/{name}"))):
        comments = re.findall("^# (?!@)(.*)", file.read_text(), re.M)
        # Some files begin with the command that uses them, which is not part of the title.
        return re.sub(r":? ssvit .*", "", comments[0]) if comments else ""
    choice = variant(group, name)
    if choice and choice.meaning:
        return choice.meaning
    part = choice.part if choice else name
    return (getattr(options_of(f"{group}/{part}"), "__doc__", "") or "").partition("\n")[0]


def _typed(value: Any) -> str:
    """Return a value in the syntax of the command line."""
    return "…" if value == MISSING else typed(value)
