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

import yaml

from ssvit.config.choices import lookup
from ssvit.config.command import Command
from ssvit.config.command_line import CommandLine, Plain
from ssvit.config.composed import Config
from ssvit.config.declaration import Options, expected, find, group_of, meanings, nested_options
from ssvit.groups import GROUPS
from ssvit.options import MISSING, typed

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_INDENT = 6  # indentation of a description below its option


@dataclass(frozen=True)
class Option:
    """Describe an option as it is typed, with its default, description and permitted values."""

    name: str
    default: str = ""
    meaning: str = ""
    right: str = ""

    def lines(self, width: int) -> list[str]:
        """Return the option, followed by its description and permitted values, wrapped to a width."""
        meaning, right = self.meaning.replace("`", "").rstrip("."), self.right
        first = meaning.partition(" ")[0]
        if first.isalpha() and first != self.default:  # values of options keep their case
            meaning = f"{meaning[0].upper()}{meaning[1:]}"
        if right.startswith("one of ") and all(
            re.search(rf"\b{re.escape(one)}\b", meaning) for one in right[7:].split(", ")
        ):
            right = ""
        told = f"{meaning} [{right}]".strip() if right else meaning
        pad = _INDENT * " "
        head = f"  {self.name}{'=' * bool(self.default)}{self.default}"
        return [
            head if len(head) <= width else f"{head[: width - 1]}…",
            *textwrap.wrap(told, width, initial_indent=pad, subsequent_indent=pad, break_on_hyphens=False),
        ]


@dataclass(frozen=True)
class Group:
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
    hidden = 0
    shown = [files]
    for group in groups:
        common = [one for one in group.options if everything or not command.common or _starts(one.name, command.common)]
        hidden += len(group.options) - len(common)
        shown.append(Group(group.title, common))
    flags["--help-all"] = f"{hidden} more options" if hidden else "all options"
    shown.append(Group("Flags", [Option(flag, meaning=meaning) for flag, meaning in flags.items()]))
    arguments_too = f" [{command.positional.upper()} …]" if command.positional else ""
    lines = [
        f"{command.prefix}{command.name.replace('_', '-')} [OPTION=VALUE …]{arguments_too}",
        *textwrap.wrap(f"{purpose[0].upper()}{purpose[1:]}.", width),
    ]
    for group in shown:
        if group.options:
            lines += [
                "",
                *textwrap.wrap(group.title, width),
                *(line for one in group.options for line in one.lines(width)),
            ]
    return "\n".join(lines)


_FLAGS = {
    "--dry-run": "print the sizes and the estimated time and memory; start nothing",
    "--show-config": "the same, followed by the composed configuration as YAML",
    "-m": "one run for each combination of values: -m recipe.lr=1e-3,2e-3",
    "--plugin PACKAGE": "import a package whose *_options modules declare choices",
    "--config-dir PATH": "look for files of options in this folder too",
    "--help-all": "",
}


def _starts(name: str, beginnings: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{beginning}.") for beginning in beginnings)


def describe(command: Command, config: Config) -> tuple[Group, list[Group]]:
    """Return the files that can be chosen, and the options of the chosen files in groups."""
    choices = _choices(command, config)
    named = {option.rstrip("="): alias.rstrip("=") for alias, option in command.aliases.items()}
    found = list(_options(config.written, "", {"": command.options}))
    # The description of a reference also applies to the option that it refers to.
    elsewhere = {target[1]: one for one in found if (target := _REFERENCE.fullmatch(one.default))}
    of_command = meanings(command.options)
    tops = ["", *(name.partition(".")[0] for name in command.common)]
    files = [
        Option(
            named.get(group, group),
            _typed(file),
            of_command.get(package) or (GROUPS[folder].meaning if folder in GROUPS else ""),
            f"one of {', '.join(config.line.names(folder))}",
        )
        for group, file in sorted(choices.items(), key=lambda item: _place(item[0].partition("@")[0], tops))
        for folder, package in [(group.partition("@")[0], group.rpartition("@")[2])]
        if package != "_here_"
    ]
    groups: dict[str, Group] = {"": Group("Options of the command", [])}
    for one in found:
        if _REFERENCE.fullmatch(one.default) or one.name in choices:
            continue
        if twin := elsewhere.get(one.name):
            one = replace(one, meaning=one.meaning or twin.meaning, right=one.right or twin.right)
        top = one.name.partition(".")[0] if "." in one.name else ""
        if file := choices.get(top):
            of = config.line.origin(top, file)
            here = "" if of == file else f", here {of}"
            title = f"{top}={_typed(file)}{here}: {_title(config.line, top, of) or of_command.get(top, '')}"
        else:
            title = f"{top}: {of_command.get(top, '')}"
        groups.setdefault(top, Group(title.rstrip(": ."), [])).options.append(
            replace(one, default=_default(config, one))
        )
    for group in groups.values():
        group.options.sort(key=lambda one: _place(one.name, command.common))
    return Group("Files of options, chosen by their names", files), [
        groups[top] for top in sorted(groups, key=lambda top: _place(top, tops))
    ]


def _place(name: str, order: Sequence[str]) -> int:
    """Return the index of a name in a list; the length of the list if it does not contain the name."""
    return order.index(name) if name in order else len(order)


def _choices(command: Command, config: Config) -> dict[str, Any]:
    """Return the file or the list of files chosen in each group; Hydra does not report lists."""
    found = dict(config.choices)
    found |= {
        group: files for group, files in config.line.default_choices(command.name).items() if isinstance(files, list)
    }
    for group, _, files in (option.partition("=") for option in config.overrides):
        if isinstance(found.get(group), list):
            found[group] = yaml.safe_load(files)
    return found


def _options(node: Plain, path: str, known: Mapping[str, type[Options]]) -> Iterator[Option]:
    """Yield the options in a node, with unresolved references as their defaults.

    Args:
        node: The node, with unresolved references.
        path: Its dotted name.
        known: Classes of groups that have no `_target_`, by dotted name.
    """
    options = find(str(node.get("_target_", ""))) or known.get(path) or group_of(node)
    told = meanings(options) if options else {}
    for key, value in node.items():
        if key.startswith("_"):
            continue
        name = f"{path}.{key}" if path else key
        if isinstance(value, dict) and value:
            if path and key in told and "_target_" not in value:  # at the root, it is the title of the section
                yield Option(name, "", told[key])
            yield from _options(value, name, {**known, **_within(options, key, name)})
        elif not ("_target_" in node and options) or key in options.model_fields:
            yield Option(name, _typed(value), told.get(key, ""), _right(options, key) if options else "")


def _within(options: type[Options] | None, key: str, name: str) -> dict[str, type[Options]]:
    """Return the class of a group of options inside another class, by dotted name."""
    field = options.model_fields.get(key) if options else None
    nested = field and nested_options(field.annotation, field.metadata)
    return {name: nested} if nested else {}


def _right(options: type[Options], name: str) -> str:
    """Return the permitted values of an option, if they are more specific than a string or a list."""
    field = options.model_fields.get(name)
    found = "" if field is None else expected(field.annotation, field.metadata).removesuffix(", or null")
    return found if re.match(r"one of|a (whole )?number\b|true or false|two numbers", found) else ""


def _title(line: CommandLine, group: str, name: Any) -> str:
    """Return the first comment in the file of a choice, or the first line of the docstring of its class."""
    for file in reversed(list(line.with_bases(f"{group}/{name}"))):
        comments = re.findall("^# (?!@)(.*)", file.read_text(), re.M)
        return re.sub(r":? ssvit .*", "", comments[0]) if comments else ""
    choice = lookup(group, str(name))
    return ((choice and choice.options.__doc__) or "").partition("\n")[0]


def _default(config: Config, option: Option) -> str:
    """Return the default of an option as typed, with references resolved."""
    if "${" not in option.default:
        return option.default
    return _typed(config.value(option.name))


def _typed(value: Any) -> str:
    """Return a value in the syntax of the command line."""
    return "…" if value == MISSING else typed(value)
