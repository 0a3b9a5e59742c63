"""Parse the arguments of a command, and collect the options that the command adds to them. No Hydra."""

import copy
import hashlib
import importlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ssvit.choices import GROUPS, choice_names
from ssvit.engine.processes import is_main_process
from ssvit.errors import Failure, print_lines
from ssvit.values import unquoted

Plain = dict[str, Any]  # options as in a YAML file: dictionaries, lists, strings and numbers
PYTHON = "ssvit."  # prefix of a command that is called as a Python function
_PACKAGE = Path(__file__).resolve().parents[1]
# The folder is inside the installed package; in a checkout of the repository, it is next to the package.
CONFIGS = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
_CONFIG_DIR = ("--config-dir", "-cd")
_PLUGIN = "--plugin"
_SWEEP = ("--multirun", "-m")
_HOME = re.compile(r"^([\w.@/+-]+=['\"]?)~/")  # shells do not expand ~ after option=
_CALLED_WITHIN = re.compile(r"[{,]\s*['\"]?_\w*_['\"]?\s*:")  # as a key of a dictionary


class CommandLine:
    """Parse and store the arguments of a command.

    Attributes:
        aliases: Replacements of prefixes of options, such as {"probes=": "probe@probes="}.
        options: The typed options, after replacement of aliases.
        positional: Name of the option, a list, that receives arguments which are neither options nor flags; or None.
        arguments: These arguments.
        plugins: Packages named by --plugin, which add parts to `ssvit.choices`.
        config_dir: Folder of the user's configuration files, named by --config-dir.
        sweep: Whether to run every combination of values (-m).
        added: Options that the command adds to the typed ones.
        nodes: Choices that exist only for this command: groups of options by (group, name).
        brought: Choices that data=pretrained is replaced by, by group.
        finish: Transforms the composed `Config`; None: no transformation.
        prefix: Prefix of command names in messages: "ssvit " or, in Python, "ssvit.".
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        aliases: Mapping[str, str] | None = None,
        positional: str | None = None,
        prefix: str = PYTHON,
    ) -> None:
        self.aliases = dict(aliases or {})
        self.options: list[str] = []
        self.positional = positional
        self.arguments: list[str] = []
        self.config_dir: Path | None = None
        self.plugins: list[str] = []
        self.sweep = False
        self.added: list[str] = []
        self.nodes: dict[tuple[str, str], Plain] = {}
        self.brought: dict[str, str | None] = {}
        self.finish: Callable[[Any], Any] | None = None
        self.prefix = prefix
        self._lines: list[str] = []
        arguments = [_HOME.sub(lambda home: home[1] + os.path.expanduser("~/"), argument) for argument in arguments]
        for alias, option in self.aliases.items():
            arguments = [re.sub(f"^{re.escape(alias)}", option, argument) for argument in arguments]
        waiting = iter(arguments)
        for argument in waiting:
            flag, _, value = argument.partition("=")
            if flag in _CONFIG_DIR:
                self.config_dir = Path(value or next(waiting, "")).absolute()
            elif flag == _PLUGIN:
                self.plugins.append(value or next(waiting, ""))
                _import_plugin(self.plugins[-1])
            elif argument in _SWEEP:
                self.sweep = True
            elif positional and (os.path.exists(argument) or not (argument.startswith("-") or "=" in argument)):
                self.arguments.append(argument)
            else:
                self.options.append(_checked(argument, next_to=arguments[arguments.index(argument) + 1 :]))

    def changed(self, options: Iterable[str]) -> "CommandLine":
        """Return a copy with other typed options and without added options."""
        other = copy.copy(self)
        other.options, other.added, other.sweep = list(options), [], False
        return other

    @property
    def typed(self) -> dict[str, str]:
        """Return the values of the typed options by name, without quotes."""
        return _by_name(self.options)

    @property
    def values(self) -> dict[str, str]:
        """Return the values of all options, typed and added, by name, without quotes."""
        return _by_name([*self.added, *self.options])

    @property
    def overrides(self) -> list[str]:
        """Return all options, typed and added."""
        return [*self.options, *self.added]

    @property
    def identity(self) -> str:
        """Return a sha256 of the typed options, independent of their order; a hash, since they may contain paths."""
        return hashlib.sha256("\n".join(sorted(self.options)).encode(errors="surrogateescape")).hexdigest()

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
        """Return the part of a choice, group/name, from its file, a base of the file, or the table of choices."""
        if file := self.file(f"{group}/{name}"):
            content = yaml.safe_load(file.read_text()) or {}
            options = content.get(group) or content
            bases = [base for base in content.get("defaults", []) if isinstance(base, str) and base != "_self_"]
            return options.get("_part_") or next((self.part(group, base) for base in bases), None)
        return f"{group}/{name}" if name in choice_names(group) else None

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
        return self.brought.get(group, choice) if choice == "pretrained" else choice

    def command(self, name: str) -> str:
        """Return how a user invokes another command, as a shell command or as a Python function: ssvit finetune."""
        return " ".join([self.prefix + name, *map(shlex.quote, self.flags if self.prefix != PYTHON else [])])

    def say(self, line: str) -> None:
        """Queue the message until the configuration has been validated, so that an error is printed alone."""
        self._lines.append(line)

    def announce(self) -> None:
        """Print the queued messages in the main process."""
        if is_main_process():
            print_lines(*self._lines)
        self._lines.clear()


def _by_name(options: Iterable[str]) -> dict[str, str]:
    parts = (option.partition("=") for option in options)
    return {name.lstrip("+"): unquoted(value) for name, _, value in parts}


def _import_plugin(package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise Failure(f"{_PLUGIN} {package}: must be a package that Python can import: {error}", 2) from None


def _checked(argument: str, next_to: Sequence[str]) -> str:
    """Return an option; raise Failure if it is a flag, has no value, removes an option, or names code to call.

    Code to call is chosen only by the name of a file, because a run folder stores only this name.
    """
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
    names = (part.startswith("_") and part.endswith("_") and len(part) > 1 for part in option.split("."))
    if any(names) or _CALLED_WITHIN.search(value):
        raise Failure(f"{argument}: a part must be chosen by its name, not by _part_ or _target_", 2)
    return argument
