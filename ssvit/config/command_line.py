"""The arguments of one command: the options as typed, and what the command adds to them. No Hydra."""

import copy
import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ssvit.config.choices import declare_files, declared, import_options, is_group, lookup
from ssvit.options import Failure, print_lines
from ssvit.processes import is_main_process

Plain = dict[str, Any]  # options as a YAML file holds them: dictionaries, lists, text and numbers
PYTHON = "ssvit."  # before the name of a command, as a function of Python
_PACKAGE = Path(__file__).resolve().parents[1]
# Within the package where it is installed, beside it in a checkout.
CONFIGS = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
_CONFIG_DIR = ("--config-dir", "-cd")
_PLUGIN = "--plugin"
_SWEEP = ("--multirun", "-m")
_HOME = re.compile(r"^([\w.@/+-]+=['\"]?)~/")  # shells do not expand it behind option=
_CALLED_WITHIN = re.compile(r"[{,]\s*['\"]?_\w*_['\"]?\s*:")  # as the name of a dictionary's value


class CommandLine:
    """The arguments of a command, for as long as the command runs.

    Attributes:
        aliases: What beginnings of options stand for, such as {"probes=": "probe@probes="}.
        options: The options as typed, with aliases replaced.
        positional: The option, a list, that takes the arguments which are neither options nor flags, or None.
        arguments: Those arguments.
        plugins: The packages that --plugin names; what their *_options modules declare can be chosen.
        config_dir: The user's own folder of configurations, which --config-dir names.
        sweep: Whether there is one run for each combination of values (-m).
        added: Options that the command adds to those typed.
        nodes: Choices that exist for this command alone: groups of options by (group, name).
        brought: The choices that data=pretrained stands for, by group.
        finish: Returns another `Config` for the composed one; None: it stays as it is.
        prefix: What stands before the name of a command: "ssvit " or, in Python, "ssvit.".
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
                declare_files("encoder", self.config_dir / "encoder")
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
        """Return a copy with other options, of which those that the command adds are none."""
        other = copy.copy(self)
        other.options, other.added, other.sweep = list(options), [], False
        return other

    @property
    def typed(self) -> dict[str, str]:
        """The values of the options as typed, by the options' names, without quotes."""
        return _by_name(self.options)

    @property
    def values(self) -> dict[str, str]:
        """The values of all options, typed and added, by the options' names, without quotes."""
        return _by_name([*self.added, *self.options])

    @property
    def overrides(self) -> list[str]:
        """All options, typed and added."""
        return [*self.options, *self.added]

    @property
    def identity(self) -> str:
        """A sha256 of the options as typed, in any order: the same command has the same. Options may be private."""
        return hashlib.sha256("\n".join(sorted(self.options)).encode(errors="surrogateescape")).hexdigest()

    @property
    def flags(self) -> list[str]:
        """The arguments by which another command finds the same configurations."""
        folder = [] if self.config_dir is None else [_CONFIG_DIR[0], str(self.config_dir)]
        return [*folder, *(part for plugin in self.plugins for part in (_PLUGIN, plugin))]

    def has_file(self, name: str) -> bool:
        """Whether there is a file of configurations of that name."""
        return any((folder / f"{name}.yaml").is_file() for folder in self.folders())

    def folders(self) -> list[Path]:
        """The folders of configurations, the user's own first."""
        return [folder for folder in (self.config_dir, CONFIGS) if folder is not None]

    def files(self, group: str, name: str) -> list[Path]:
        """The files of a choice in a group of options, the user's own first."""
        return [file for folder in self.folders() if (file := folder / group / f"{name}.yaml").is_file()]

    def is_group(self, name: str) -> bool:
        """Whether there is a group of options of that name, of which a file or a declared choice is chosen."""
        return is_group(name) or any((folder / name).is_dir() for folder in self.folders())

    def names(self, group: str) -> list[str]:
        """The choices of a group, in alphabetical order."""
        files = {file.stem for folder in self.folders() for file in (folder / group).glob("*.yaml")}
        return sorted({*files, *(choice.name for choice in declared(group))})

    def has_choice(self, group: str, name: str) -> bool:
        """Whether a group has a choice of that name."""
        return bool(self.files(group, name)) or lookup(group, name) is not None

    def part(self, group: str, name: str) -> str | None:
        """The dotted name of the part that a choice describes: in its file, in a base of the file, or as declared."""
        for file in self.files(group, name)[:1]:
            content = yaml.safe_load(file.read_text()) or {}
            options = content.get(group) or content
            bases = [base for base in content.get("defaults", []) if isinstance(base, str) and base != "_self_"]
            return options.get("_target_") or next((self.part(group, base) for base in bases), None)
        choice = lookup(group, name)
        return None if choice is None else choice.part

    def with_bases(self, name: str) -> Iterator[Path]:
        """A file of configurations, after those beside it that its list of defaults names."""
        file = next((path for folder in self.folders() if (path := folder / f"{name}.yaml").is_file()), None)
        if file is not None:
            for base in (yaml.safe_load(file.read_text()) or {}).get("defaults", []):
                if isinstance(base, str) and base != "_self_":
                    yield from self.with_bases(str(Path(name).parent / base))
            yield file

    def default_choices(self, name: str) -> Plain:
        """The groups in the lists of defaults of a configuration, each with the choice or the choices of it."""
        lists = [one for file in self.with_bases(name) for one in yaml.safe_load(file.read_text()).get("defaults", [])]
        items = (item for one in lists if isinstance(one, dict) for item in one.items())
        return {group.removeprefix("override "): choice for group, choice in items}

    def origin(self, group: str, choice: Any) -> Any:
        """The choice of a group; for `pretrained` the choice of the checkpoint's run."""
        return self.brought.get(group, choice) if choice == "pretrained" else choice

    def command(self, name: str) -> str:
        """Return what a user types for another command, in the way that started this one: ssvit finetune."""
        return " ".join([self.prefix + name, *map(shlex.quote, self.flags if self.prefix != PYTHON else [])])

    def say(self, line: str) -> None:
        """Keep a line for `announce`: a mistake in the command is reported alone."""
        self._lines.append(line)

    def announce(self) -> None:
        """Print the lines that were kept, in the main process, before the work begins."""
        if is_main_process():
            print_lines(*self._lines)
        self._lines.clear()


def _by_name(options: Iterable[str]) -> dict[str, str]:
    parts = (option.partition("=") for option in options)
    return {name.lstrip("+"): unquoted(value) for name, _, value in parts}


def quoted(value: object) -> str:
    """Write a value as it is typed, with quotes around text that Hydra would take apart."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(quoted, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    if re.fullmatch(r"[\w./@%:+-]+", value):
        return value
    return "'{}'".format(re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + "\\'" * bool(end[2]), value))


def unquoted(value: str) -> str:
    """Remove the quotes around a value, as Hydra does."""
    if len(value) < 2 or value[0] not in "'\"" or value[-1] != value[0]:
        return value
    return re.sub(
        r"(\\*)\\(['\"])|(\\+)$", lambda found: (found[1] or "")[::2] + (found[2] or found[3][::2]), value[1:-1]
    )


def _import_plugin(package: str) -> None:
    try:
        import_options(package)
    except ImportError as error:
        raise Failure(f"{_PLUGIN} {package}: must be a package that Python finds: {error}", 2) from None


def _checked(argument: str, next_to: Sequence[str]) -> str:
    """Return an option. Failure if it is a flag, has no value, takes an option away, or names what to call.

    What is called is chosen by the name of a file alone: a run's folder keeps no more of it.
    """
    if argument.startswith("~"):
        raise Failure(f"{argument}: an option can be changed, as option=value, but not taken away", 2)
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
        right = "a file's name chooses what is called: write one of your own (--config-dir, in Python config_dir)"
        raise Failure(f"{argument}: {right}", 2)
    return argument
