"""`ssvit COMMAND --help`: each option with its meaning, its default and its choices. Loads no torch.

The options are those of the composed configuration: `objective=mae --help` shows those of mae. Meanings and permitted
values come from the declaration of an option (`ssvit.config.declaration`); where there is none, the meaning is the
comment in the YAML file.
"""

import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ssvit.cli import pretrained
from ssvit.cli.launch import Tool
from ssvit.cli.pretrained import origin
from ssvit.config.choices import declared
from ssvit.config.command_line import CommandLine, Plain
from ssvit.config.composed import Config
from ssvit.config.declaration import Options, expected, find, group_of, meanings, nested_options
from ssvit.options import UserError, command, typed

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_INDENT = 6  # of a meaning, under its option


@dataclass(frozen=True)
class Option:
    """An option as it is typed, with its default; what it means, and what it may be."""

    name: str
    default: str = ""
    meaning: str = ""
    right: str = ""

    def lines(self, width: int) -> list[str]:
        """The option, and under it the rest, wrapped."""
        meaning, right = self.meaning.replace("`", "").rstrip("."), self.right
        first = meaning.partition(" ")[0]
        if first.isalpha() and first != self.default:  # else a value, which is written as it is typed
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
    """Options under a heading."""

    title: str
    options: list[Option]


def text(tool: Tool, arguments: Sequence[str], *, everything: bool) -> str:
    """The help on a command with these options; everything: on all that it has, not on those most people need."""
    files, groups = describe(tool, tool.compose(stand_in(tool, arguments), incomplete=True))
    width = shutil.get_terminal_size().columns
    flags = dict(_FLAGS)
    if tool.dry_run is None:
        del flags["--dry-run"], flags["--show-config"], flags["-m"]
    hidden = 0
    shown = [files]
    for group in groups:
        common = [one for one in group.options if everything or not tool.common or _starts(one.name, tool.common)]
        hidden += len(group.options) - len(common)
        shown.append(Group(group.title, common))
    flags["--help-all"] = f"{hidden} more options" if hidden else "all options"
    shown.append(Group("Flags", [Option(flag, meaning=meaning) for flag, meaning in flags.items()]))
    arguments_too = f" [{tool.positional.upper()} …]" if tool.positional else ""
    lines = [
        f"{command(tool.name)} [OPTION=VALUE …]{arguments_too}",
        *textwrap.wrap(f"{tool.purpose[0].upper()}{tool.purpose[1:]}.", width),
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


def stand_in(tool: Tool, arguments: Sequence[str]) -> CommandLine:
    """The command line of a tool. Where it finds no checkpoint, something stands in the place of what one brings."""
    try:
        return tool.line(arguments)
    except UserError:
        line = replace(tool, before=None).line(arguments)
        pretrained.stand_in(line)
        return line


def _starts(name: str, beginnings: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{beginning}.") for beginning in beginnings)


def describe(tool: Tool, config: Config) -> tuple[Group, list[Group]]:
    """The files that can be chosen, and the options of those that are."""
    choices = _choices(tool, config)
    said = _said(tool.name, choices, config.line)
    fields, written = meanings(tool.options), config.written
    named = {option.rstrip("="): alias.rstrip("=") for alias, option in tool.aliases.items()}
    files = [
        Option(
            named.get(group, group),
            _typed(file),
            said.get(f"/{group.partition('@')[0]}") or fields.get(group.rpartition("@")[2], ""),
            f"one of {', '.join(config.line.names(group.partition('@')[0]))}",
        )
        for group, file in sorted(choices.items(), key=lambda item: _place(item[0].partition("@")[0], _ORDER))
    ]
    found = list(_options(written, "", {"": tool.options}, said))
    # What an option that refers to another says goes for that one.
    elsewhere = {target[1]: one for one in found if (target := _REFERENCE.fullmatch(one.default))}
    groups: dict[str, Group] = {"": Group("Options of the command", [])}
    for one in found:
        if _REFERENCE.fullmatch(one.default) or one.name in choices:
            continue
        if twin := elsewhere.get(one.name):
            one = replace(one, meaning=one.meaning or twin.meaning, right=one.right or twin.right)
        top = one.name.partition(".")[0] if "." in one.name else ""
        file = choices.get(top)
        here = f", here {origin(config.line, top, file)}" if origin(config.line, top, file) != file else ""
        title = (
            f"{top}={_typed(file)}{here}: {said.get(f'={top}', '')}"
            if file
            else f"{top}: {said.get(top) or fields.get(top, '')}"
        )
        groups.setdefault(top, Group(title.rstrip(": ."), [])).options.append(
            replace(one, default=_default(config, one))
        )
    for group in groups.values():
        group.options.sort(key=lambda one: _place(one.name, tool.common))
    tops = ["", *(name.partition(".")[0] for name in tool.common)]
    return Group("Files of options, chosen by their names", files), [
        groups[top] for top in sorted(groups, key=lambda top: _place(top, tops))
    ]


_ORDER = ("objective", "data", "encoder", "target", "recipe", "probe", "augment")


def _place(name: str, order: Sequence[str]) -> int:
    """Where a name stands among others; after them if it does not."""
    return order.index(name) if name in order else len(order)


def _choices(tool: Tool, config: Config) -> dict[str, Any]:
    """The file chosen of each group, or the list of files, which Hydra does not tell."""
    found = dict(config.choices)
    found |= {
        group: files for group, files in config.line.default_choices(tool.name).items() if isinstance(files, list)
    }
    for group, _, files in (option.partition("=") for option in config.overrides):
        if isinstance(found.get(group), list):
            found[group] = yaml.safe_load(files)
    return found


def _options(node: Plain, path: str, known: Mapping[str, type[Options]], said: Mapping[str, str]) -> Iterator[Option]:
    """The options within a node as they are written, with references to others as their defaults.

    known: the classes of groups that have no `_target_`.
    """
    options = find(str(node.get("_target_", ""))) or known.get(path) or group_of(node)
    told = meanings(options) if options else {}
    for key, value in node.items():
        if key.startswith("_"):
            continue
        name = f"{path}.{key}" if path else key
        meaning = told.get(key) or said.get(name, "")
        if isinstance(value, dict) and value:
            if path and key in told and "_target_" not in value:  # at the root it is the title of its section
                yield Option(name, "", meaning)
            yield from _options(value, name, {**known, **_within(options, key, name)}, said)
        else:
            right = _right(options, key) if options else ""
            yield Option(name, _typed(value), meaning, right)


def _within(options: type[Options] | None, key: str, name: str) -> dict[str, type[Options]]:
    """The class of a group within another's options."""
    field = options.model_fields.get(key) if options else None
    nested = field and nested_options(field.annotation, field.metadata)
    return {name: nested} if nested else {}


def _right(options: type[Options], name: str) -> str:
    """What the declaration permits, where its type tells more than any text or list."""
    field = options.model_fields.get(name)
    found = "" if field is None else expected(field.annotation, field.metadata).removesuffix(", or null")
    return found if re.match(r"one of|a (whole )?number\b|true or false|two numbers", found) else ""


def _said(tool: str, choices: Mapping[str, Any], line: CommandLine) -> dict[str, str]:
    """The comments in the files of a configuration, by option.

    Those of a group in a list of defaults by "/group", those of a file by "=group".
    """
    said: dict[str, str] = {}
    for file in line.with_bases(tool):
        said |= comments(file)
    for group, names in choices.items():
        folder, _, package = group.partition("@")
        names = origin(line, group, names)
        for name in names if isinstance(names, list) else [names]:
            for choice in declared([folder]):
                if choice.name == name:
                    said[f"={package or folder}"] = (choice.options.__doc__ or "").split("\n")[0].rstrip(".")
            for file in line.with_bases(f"{folder}/{name}"):
                lines = file.read_text().splitlines()
                is_global = lines[0].startswith("# @package _global_")
                at = "" if is_global or package == "_here_" else f"{package or folder}."
                found = {key if key[0] == "/" else f"{at}{key}": comment for key, comment in comments(file).items()}
                said |= found
                title = next((line[2:] for line in lines if re.match("# (?!@)", line)), "")
                said[f"={package or folder}"] = re.sub(r":? ssvit .*", "", title)
    return said


def comments(file: Path) -> dict[str, str]:
    """The comment behind each option of a YAML file, by its path.

    That behind a group in the list of defaults by "/group".
    """
    lines = file.read_text().splitlines()
    found: dict[str, str] = {}

    def behind(line: int, column: int) -> str:
        comment = re.search(r"\s#\s*(.*)", lines[line])
        parts = [comment[1]] if comment else []
        for below in lines[line + 1 :]:
            more = re.fullmatch(rf"\s{{{column + 1},}}#\s*(.*)", below)
            if not (comment and more):
                break
            parts.append(more[1])
        return " ".join(parts)

    def walk(node: yaml.Node, path: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if path == "" and key.value == "defaults":
                    for one in (
                        one for item in value.value if isinstance(item, yaml.MappingNode) for one in item.value
                    ):
                        group = one[0].value.removeprefix("override ").lstrip("/").partition("@")[0]
                        if comment := behind(one[0].start_mark.line, one[0].start_mark.column):
                            found[f"/{group}"] = comment
                    continue
                if comment := behind(key.start_mark.line, key.start_mark.column):
                    found[f"{path}{key.value}"] = comment
                walk(value, f"{path}{key.value}.")

    if tree := yaml.compose(file.read_text()):
        walk(tree, "")
    return found


def _one_of(line: CommandLine, group: str) -> str:
    return f"one of {', '.join(line.names(group.partition('@')[0]))}"


def _default(config: Config, option: Option) -> str:
    """A default as it is typed; what it refers to, as its value."""
    if "${" not in option.default:
        return option.default
    return _typed(config.value(option.name))


def _typed(value: Any) -> str:
    """A value as a command line takes it."""
    return "…" if value == "???" else typed(value)
