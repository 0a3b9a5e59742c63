"""Parse the arguments of a command, and collect the options that the command adds to them. No Hydra."""

import copy
import hashlib
import importlib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from ssvit.choices import GROUPS, PRETRAINED, choice_names, variant
from ssvit.config.declaration import Options
from ssvit.config.typed import assignments
from ssvit.engine.processes import is_main_process
from ssvit.errors import Failure, OptionError, print_lines
from ssvit.values import plain, text_of, value_of

Plain = dict[str, Any]  # options as in a YAML file: dictionaries, lists, strings and numbers
PYTHON = "ssvit."  # prefix of a command that is called as a Python function
_PACKAGE = Path(__file__).resolve().parents[1]
# The folder is inside the installed package; in a checkout of the repository, it is next to the package.
CONFIGS = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
_CONFIG_DIR = ("--config-dir", "-cd")
_PLUGIN = "--plugin"
_SWEEP = ("--multirun", "-m")
_HOME = re.compile(r"^([\w.@/+-]+=['\"]?)~/")  # shells do not expand ~ after option=


@dataclass(frozen=True)
class Start:
    """What a checkpoint provides for a command.

    Attributes:
        groups: Options for which the choice `pretrained` stands, by the group's dotted name, such as data.augment.
        choices: Choices of the checkpoint's run by group.
        complete: Returns a composed `ssvit.config.composed.Config` with the options that the checkpoint determines.
    """

    groups: Mapping[str, Plain | None]
    choices: Mapping[str, str | None]
    complete: Callable[[Any], Any] = lambda config: config


class CommandLine:
    """Store the options of a command by name: the typed ones, and those that the command adds to them.

    Attributes:
        typed: The options, as typed in a shell or passed from Python.
        implied: Options that the command adds; typed options take precedence.
        texts: The typed options as texts, for sweeps; without options that are passed from Python.
        prefixes: + and ++ before names of options, in Hydra's syntax.
        aliases: Other names of options, such as {"probes": "probe@probes"}.
        positional: Name of the option, a list, that receives arguments which are neither options nor flags; or None.
        arguments: These arguments.
        plugins: Packages named by --plugin, which add parts to `ssvit.choices`.
        config_dir: Folder of the user's configuration files, named by --config-dir.
        sweep: Whether to run every combination of values (-m).
        start: What a checkpoint provides; None without a checkpoint.
        newest: The checkpoint that checkpoint=newest has selected, which is that of all jobs of a sweep.
        prefix: Prefix of command names in messages: "ssvit " or, in Python, "ssvit.".

    Args:
        arguments: Arguments as in a shell.
        options: Options from Python by name.
        tree: Options from Python as one object.
        aliases: As the attribute, and so are the next two.
        positional: Name of an option.
        prefix: Prefix of command names.
    """

    def __init__(
        self,
        arguments: Sequence[str] = (),
        options: Mapping[str, object] | None = None,
        tree: Options | None = None,
        *,
        aliases: Mapping[str, str] | None = None,
        positional: str | None = None,
        prefix: str = PYTHON,
    ) -> None:
        self.aliases = dict(aliases or {})
        self.typed: dict[str, Any] = {}
        self.implied: dict[str, Any] = {}
        self.texts: dict[str, str] = {}
        self.prefixes: dict[str, str] = {}
        self.positional = positional
        self.arguments: list[str] = []
        self.config_dir: Path | None = None
        self.plugins: list[str] = []
        self.sweep = False
        self.start: Start | None = None
        self.newest: str | None = None
        self.prefix = prefix
        self._lines: list[str] = []
        arguments = [_HOME.sub(lambda home: home[1] + os.path.expanduser("~/"), argument) for argument in arguments]
        waiting = iter(arguments)
        for argument in waiting:
            flag, _, text = argument.partition("=")
            if flag in _CONFIG_DIR:
                self.config_dir = Path(folder := text or next(waiting, "")).absolute()
                if not folder or not self.config_dir.is_dir():
                    raise Failure(f"{flag} {folder}: must be a folder of configuration files", 2)
            elif flag == _PLUGIN:
                self.plugins.append(text or next(waiting, ""))
                _import_plugin(self.plugins[-1])
            elif argument in _SWEEP:
                self.sweep = True
            elif positional and (os.path.exists(argument) or not (argument.startswith("-") or "=" in argument)):
                self.arguments.append(argument)
            else:
                _check_form(argument, next_to=arguments[arguments.index(argument) + 1 :])
                value = value_of(text)
                _check_values(flag, value)
                self.texts[self._set(flag, value)] = text
        for name, option in assignments(tree) if tree else ():
            self._set(name, plain(option))
        for name, option in (options or {}).items():
            try:
                value = plain(option)
            except TypeError:
                expected = "must be a string, a path, a run, a number, a flag, None, a list or a dictionary"
                raise OptionError(name, option, expected) from None
            _check_values(name, value)
            self._set(name, value)
        self._original = dict(self.typed), [*self.arguments]

    def _set(self, name: str, value: object) -> str:
        """Set a typed option, and return its name, without a prefix and with its alias replaced."""
        bare = name.lstrip("+")
        bare, prefix = self.aliases.get(bare, bare), name[: len(name) - len(bare)]
        self.typed.pop(bare, None)  # the last of several is the last in order
        self.typed[bare] = value
        if prefix:
            self.prefixes[bare] = prefix
        return bare

    def changed(self, options: Mapping[str, object]) -> "CommandLine":
        """Return a copy with other typed options and without added options."""
        other = copy.copy(self)
        other.typed, other.implied, other.texts, other.sweep = dict(options), {}, {}, False
        return other

    def job(self, options: Mapping[str, object]) -> "CommandLine":
        """Return the command line of a job of a sweep, as it would be typed, with its values of the swept options."""
        typed, arguments = self._original
        fixed = {name: value for name, value in typed.items() if not name.startswith("hydra")}
        other = self.changed({**fixed, **options})
        other.arguments, other.start, other._lines = [*arguments], None, []
        return other

    @property
    def values(self) -> dict[str, Any]:
        """Return the values of all options, typed and added, by name."""
        return {**self.implied, **self.typed}

    def text(self, name: str) -> str | None:
        """Return a name or a path as it was typed, even if it looks like a number; None if it is not set or null."""
        value = self.values.get(name)
        return value if value is None or isinstance(value, str) else self.texts.get(name, text_of(value))

    def written(self, options: Mapping[str, object]) -> list[str]:
        """Return options as they are typed: name=value, with the prefixes of this command line."""
        return [f"{self.prefixes.get(name, '')}{name}={text_of(value)}" for name, value in options.items()]

    def retyped(self, pattern: str) -> list[str]:
        """Return the typed options whose names match a regular expression, for a further command."""
        return self.written({name: value for name, value in self.typed.items() if re.match(pattern, name)})

    @property
    def identity(self) -> str:
        """Return a sha256 of the typed options, independent of their order; a hash, since they may contain paths."""
        return hashlib.sha256("\n".join(sorted(self.written(self.typed))).encode(errors="surrogateescape")).hexdigest()

    @property
    def flags(self) -> list[str]:
        """Return the flags with which another command has the same configuration files."""
        folder = [] if self.config_dir is None else [_CONFIG_DIR[0], str(self.config_dir)]
        return [*folder, *(part for plugin in self.plugins for part in (_PLUGIN, plugin))]

    def folders(self) -> list[Path]:
        """Return the folders of configuration files, the user's folder first."""
        return [folder for folder in (self.config_dir, CONFIGS) if folder is not None]

    def file(self, name: str) -> Path | None:
        """Return the configuration file of a name, such as encoder/small, if there is one; the user's file first."""
        return next((file for folder in self.folders() if (file := folder / f"{name}.yaml").is_file()), None)

    def is_group(self, name: str) -> bool:
        """Return whether there is a group of options of this name, with files or declared choices."""
        return name in GROUPS or any((folder / name).is_dir() for folder in self.folders())

    def names(self, group: str) -> list[str]:
        """Return the choices of a group in alphabetical order."""
        files = {file.stem for folder in self.folders() for file in (folder / group).glob("*.yaml")}
        return sorted({*files, *choice_names(group)})

    def has_choice(self, group: str, name: str) -> bool:
        """Return whether a group has a choice of this name."""
        return self.file(f"{group}/{name}") is not None or name in choice_names(group)

    def part(self, group: str, name: str) -> str | None:
        """Return the part of a choice, group/name, from its file, a base of the file, or the tables of choices."""
        if file := self.file(f"{group}/{name}"):
            content = yaml.safe_load(file.read_text()) or {}
            options = content.get(group) or content
            bases = [base for base in content.get("defaults", []) if isinstance(base, str) and base != "_self_"]
            return options.get("_part_") or next((self.part(group, base) for base in bases), None)
        return f"{group}/{choice.part}" if (choice := variant(group, name)) else None

    def with_bases(self, name: str) -> Iterator[Path]:
        """Yield the bases of a configuration file, from its list of defaults, and then the file."""
        if file := self.file(name):
            for base in (yaml.safe_load(file.read_text()) or {}).get("defaults", []):
                if isinstance(base, str) and base != "_self_":
                    yield from self.with_bases(str(Path(name).parent / base))
            yield file

    def default_choices(self, name: str) -> Plain:
        """Return the groups in a configuration's lists of defaults, each with its choice or list of choices."""
        choices: Plain = {}
        for file in self.with_bases(name):
            for entry in yaml.safe_load(file.read_text()).get("defaults", []):
                if isinstance(entry, dict):
                    choices |= {group.removeprefix("override "): choice for group, choice in entry.items()}
        return choices

    def origin(self, group: str, choice: Any) -> Any:
        """Return the choice of a group, in which `pretrained` is replaced by the choice of the checkpoint's run."""
        return self.start.choices.get(group, choice) if self.start and choice == PRETRAINED else choice

    def command(self, name: str) -> str:
        """Return how a user invokes another command in a shell: ssvit finetune."""
        if self.prefix == PYTHON:
            return f"ssvit {name}"
        return " ".join([self.prefix + name, *map(shlex.quote, self.flags)])

    def say(self, line: str) -> None:
        """Queue the message until the configuration has been validated, so that an error is printed alone."""
        self._lines.append(line)

    def announce(self) -> None:
        """Print the queued messages in the main process."""
        if is_main_process():
            print_lines(*self._lines)
        self._lines.clear()


def _import_plugin(package: str) -> None:
    try:
        importlib.import_module(package)
    except (ImportError, ValueError) as error:  # ValueError: an empty name
        raise Failure(f"{_PLUGIN} {package}: must be a package that Python can import: {error}", 2) from None


def _check_form(argument: str, next_to: Sequence[str]) -> None:
    """Raise Failure if an argument is a flag, has no value or removes an option."""
    if argument.startswith("~"):
        raise Failure(f"{argument}: must be written option=value: options cannot be removed", 2)
    option, equals, value = argument.lstrip("+").partition("=")
    if argument.startswith("-"):
        following = next_to[0] if next_to else ""
        value = value or ("VALUE" if not following or following.startswith("-") or "=" in following else following)
        written = shlex.quote(f"{option.lstrip('-').replace('-', '_')}={value}")
        raise Failure(f"{argument.partition('=')[0]}: must be written without dashes, as {written}", 2)
    if not equals:
        usual = " or ".join(f"{name}={shlex.quote(argument)}" for name in ("data", "checkpoint"))
        is_path = os.path.exists(argument) or "/" in argument
        raise Failure(f"{argument}: must be written option=value{f', such as {usual}' if is_path else ''}", 2)


def _check_values(name: str, value: object) -> None:
    """Raise Failure if an option names code to call: a run folder stores only the names of choices."""
    keys = chain(name.lstrip("+").split("."), *(key.split(".") for key in _keys(value)))
    if any(key.startswith("_") and key.endswith("_") and len(key) > 1 for key in keys):
        raise Failure(f"{name}={text_of(value)}: a part must be chosen by its name, not by _part_ or _target_", 2)


def _keys(value: object) -> Iterator[str]:
    """Yield the keys of dictionaries at any depth."""
    if isinstance(value, dict):
        yield from map(str, value)
        value = [*value.values()]
    for item in value if isinstance(value, list) else ():
        yield from _keys(item)
