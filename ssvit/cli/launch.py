"""How every tool starts, from the command line or from Python: Hydra, and failures in one line.

Status: 0 done, 1 failed, 2 the configuration is wrong, 130 and 143 stopped by Ctrl-C and SIGTERM.
"""

import copy
import difflib
import functools
import io
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from tqdm import tqdm

from ssvit.checkpoints.configuration import RENAMED, command
from ssvit.checkpoints.run_folder import is_main_process
from ssvit.config.declaration import Options, expected
from ssvit.data import shard_folder
from ssvit.options import OptionError, UserError, print_lines, printable, typed
from ssvit.options import command as command_name

Plain = dict[str, Any]  # options as a YAML file holds them: dictionaries, lists, text and numbers
_PACKAGE = Path(__file__).resolve().parents[1]
# Within the package where it is installed, beside it in a checkout.
CONFIGS = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
# Whatever names timm's model has for them.
TIMM_ARGUMENTS = {f"encoder.arguments{mark}": f"++encoder.arguments{mark}" for mark in ".="}
ALIASES = {"evaluator=": "evaluator@evaluators=", **TIMM_ARGUMENTS}  # of the tools that train, see `Tool`


class Failure(UserError):
    """What a user is told in one line, and the status that the process ends with."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(" ".join(line.split()))
        self.status = status


@dataclass(frozen=True)
class Tool:
    """A command: it composes configs/<name>.yaml with options and calls run(config, the same as plain data).

    purpose: what it is for, in a few words. before: called first, with the options as typed, to add choices to Hydra's;
    it returns options to add to those typed. positional: the option, a list, that takes the arguments not written as
    option=value. aliases: what beginnings of options stand for. groups: the classes of groups of options that have
    no `_target_`, by their names, that of the command itself by "". common: beginnings of the options that --help
    shows, all if empty. dry_run: what --dry-run calls in the place of `run`; it returns the completed configuration.
    own_images: options that data=PATH brings, unless they are typed.
    """

    name: str
    purpose: str
    run: Callable[[DictConfig, Plain], object]
    before: Callable[[dict[str, str]], Sequence[str]] | None = None
    positional: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, type[Options]] = field(default_factory=dict)
    common: Sequence[str] = ()
    dry_run: Callable[[DictConfig, Plain], DictConfig] | None = None
    own_images: Sequence[str] = ()

    def main(self, arguments: Sequence[str]) -> None:
        """Run with these options of the command line. A failure is one line, and ends the process."""
        # A waiting thread that spins takes the core from the one it waits for: up to 12 times slower on a busy machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # One that sleeps at once is woken late; spinning for some 25 microseconds first costs the others little.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        # Hydra then raises its errors instead of printing them with advice for its developers.
        os.environ["HYDRA_FULL_ERROR"] = "1"
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack a name's characters
        command_line = sys.argv[1:]
        with in_one_line(), self._prepared(arguments) as (options, bare):
            jobs = []
            given = _options, _added

            def task(config: DictConfig) -> float | None:
                _remember(*given)  # submitit calls this in another process
                sys.argv[1:] = command_line  # Fabric starts further processes with it
                with in_one_line():  # Hydra would print a failure in its own way
                    left = self._start(config, bare)
                if HydraConfig.get().mode != RunMode.MULTIRUN or not isinstance(left, Path):
                    return None
                from ssvit.cli import sweep

                own = (option.lstrip("+").partition("=") for option in _own())
                jobs.append(sweep.Job({name: given for name, _, given in own}, left))
                return sweep.value(left)  # what a sweeper that searches goes by

            sys.argv[1:] = options
            hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=self.name)(task)()
            if jobs and is_main_process():
                from ssvit.cli import sweep

                print_lines(*sweep.table(jobs).split("\n"))

    def call(self, arguments: Sequence[str], *, config_dir: str | Path | None = None) -> Any:
        """Run with options as the command line takes them, and return what `run` does. Failure instead of an end.

        config_dir: a folder of configurations of the user's own. The process's environment stays as it is.
        """
        users = [] if config_dir is None else ["--config-dir", str(config_dir)]
        with self.composed([*users, *arguments]) as (config, bare):
            return self._start(config, bare)

    @contextmanager
    def composed(self, arguments: Sequence[str]) -> Iterator[tuple[DictConfig, list[str]]]:
        """The configuration that the options make, and the arguments that are none. Failure for a wrong one."""
        Plugins.instance()  # fills the store with configurations of Hydra's own
        store, hydra_config = ConfigStore.instance(), HydraConfig.instance()
        former = hydra_config.cfg, copy.deepcopy(store.repo)
        callers = GlobalHydra.instance().hydra  # of an application that calls this
        GlobalHydra.instance().clear()
        _said.clear()
        try:
            with (
                self._prepared(arguments) as (options, bare),
                hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"),
            ):
                overrides = [*search_path(), *filter(_is_option, options)]
                config = hydra.compose(self.name, overrides, return_hydra_config=True)
                hydra_config.set_config(config)
                with open_dict(config):
                    del config["hydra"]
                yield config, bare
        finally:
            hydra_config.cfg, store.repo = former
            GlobalHydra.instance().hydra = callers

    @contextmanager
    def _prepared(self, arguments: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
        """The options as Hydra takes them, and the arguments that are none; inside, failures of Hydra are Failures."""
        global _options, _added
        _end_with_launcher()
        _check_flags(arguments)
        # Shells do not expand it behind option=.
        arguments = [_HOME.sub(lambda found: found[1] + os.path.expanduser("~/"), one) for one in arguments]
        for alias, option in self.aliases.items():
            arguments = [re.sub(f"^{re.escape(alias)}", option, argument) for argument in arguments]
        bare = []
        if self.positional:  # existing files, and what has neither the = nor the leading - of an option
            before = [None, *arguments]
            bare = [
                one
                for one, flag in zip(arguments, before, strict=False)
                if flag not in _CONFIG_DIR and (os.path.exists(one) or not (one.startswith("-") or "=" in one))
            ]
        # Hydra wants its own flags before the options.
        former = _options, _added
        _options, _added = sorted((one for one in arguments if one not in bare), key=_is_option), []
        names = {option.partition("=")[0] for option in _options}
        expanded = [part for option in _options for part in _data_set(option)]
        if len(expanded) > len(_options):
            expanded += [option for option in self.own_images if option.partition("=")[0] not in names]
        _options = expanded
        try:
            _options = [part for option in _options for part in _normalization(option, names)]
            for option in _options:
                _check_typed(option)
            if self.before:
                parts = (option.partition("=") for option in _options if _is_option(option))
                _added = list(self.before({name: _unquoted(value) for name, _, value in parts}))
            yield [*_options, *_added], bare
        except (HydraException, OmegaConfBaseException) as error:
            raise Failure(_reason(error, self), 2) from None
        except Failure:
            raise
        except UserError as error:
            raise Failure(str(error), 2) from None
        except OSError as error:
            raise Failure(f"{error.filename or 'system'}: {error.strerror or error}", 1) from None
        except (TypeError, ValueError):  # Hydra's for a choice that is no name
            if not (line := _misplaced()):
                raise
            raise Failure(line, 2) from None
        finally:
            _options, _added = former

    def _start(self, config: DictConfig, bare: Sequence[str]) -> Any:
        """Call `run` with a composed configuration; Failure for what a user can cause."""
        try:
            _check_kinds(config, self.name)
            plain = as_dict(config)
            if bare and self.positional:
                plain[self.positional] = [*plain[self.positional], *bare]
            return self.run(config, plain)
        except OptionError as error:
            raise Failure(f"{_option(error.name, config)}={typed(error.value)}: {error.right}", 2) from None
        except UserError as error:
            raise Failure(str(error), getattr(error, "status", 1)) from None
        except InstantiationException as error:
            raise _refused(error, config) from None
        except OmegaConfBaseException as error:
            raise Failure(_reason(error, self), 2) from None
        except OSError as error:
            raise Failure(f"{error.filename or 'system'}: {error.strerror or error}", 1) from None


_CONFIG_DIR = ("--config-dir", "-cd")
_CALLED_WITHIN = re.compile(r"[{,]\s*['\"]?_\w*_['\"]?\s*:")  # as the name of a dictionary's value
_HOME = re.compile(r"^([\w.@/+-]+=['\"]?)~/")
_PLUGINS = {"hydra/launcher=submitit": "hydra-submitit-launcher", "hydra/sweeper=optuna": "hydra-optuna-sweeper"}
_options: list[str] = []  # of the tool that runs, as typed
_added: list[str] = []  # to them, by its `before`


_GRACE = 30  # seconds for a checkpoint, as many as torchrun gives between SIGTERM and SIGKILL


@functools.cache
def _end_with_launcher() -> None:
    """End this process once its launcher has ended: torchrun, or the main process of Fabric.

    torchrun stops its processes itself, unless it is killed.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)  # a training run saves a checkpoint and stops
        time.sleep(_GRACE)
        os._exit(128 + signal.SIGTERM)

    if "LOCAL_RANK" in os.environ:
        threading.Thread(target=watch, daemon=True, name="launcher").start()


def _remember(options: list[str], added: list[str]) -> None:
    global _options, _added
    _options, _added = options, added


def config_dir() -> Path | None:
    """The folder of configurations of the user's own that the command names."""
    for place, option in enumerate(_options):
        flag, _, value = option.partition("=")
        if flag in _CONFIG_DIR:
            return Path(value or _options[place + 1]).absolute()
    return None


def option_files(group: str, name: str) -> list[Path]:
    """The files of that name in a group of options, the user's own first."""
    folders = [folder / group for folder in (config_dir(), CONFIGS) if folder is not None]
    return [file for folder in folders if (file := folder / f"{name}.yaml").is_file()]


def with_bases(name: str) -> Iterator[Path]:
    """A file of the configuration, after those beside it that its list of defaults names."""
    for folder in filter(None, (config_dir(), CONFIGS)):
        file = folder / f"{name}.yaml"
        if file.is_file():
            for base in (yaml.safe_load(file.read_text()) or {}).get("defaults", []):
                if isinstance(base, str) and base != "_self_":
                    yield from with_bases(str(Path(name).parent / base))
            yield file
            return


def default_choices(name: str) -> Plain:
    """Return the groups of files in the lists of defaults of a configuration, each with the file or files it names."""
    lists = [one for file in with_bases(name) for one in yaml.safe_load(file.read_text()).get("defaults", [])]
    items = (item for one in lists if isinstance(one, dict) for item in one.items())
    return {group.removeprefix("override "): files for group, files in items}


def search_path() -> list[str]:
    """What tells Hydra's `compose` of that folder."""
    users = config_dir()
    return [] if users is None else [f"hydra.searchpath=[{json.dumps(users.as_uri())}]"]


def _unquoted(value: str) -> str:
    """What a value means that stands in quotes, as Hydra reads it, or without."""
    if len(value) < 2 or value[0] not in "'\"" or value[-1] != value[0]:
        return value
    return re.sub(
        r"(\\*)\\(['\"])|(\\+)$", lambda found: (found[1] or "")[::2] + (found[2] or found[3][::2]), value[1:-1]
    )


def _data_set(option: str) -> list[str]:
    """data=PATH, where no configuration has that name, stands for the data set at PATH.

    That is a folder of images, a folder of shards (tar files) and no images, or a table of images (.csv, .tsv).
    """
    group, _, written = option.partition("=")
    value = _unquoted(written)
    is_path = os.path.isabs(value) or value.startswith(".")
    if group != "data" or (not is_path and option_files("data", value)):
        return [option]
    if os.path.isdir(value):
        return [f"data={'shards' if shard_folder.is_one(value) else 'folder'}", f"data.root={written}"]
    if value.lower().endswith((".csv", ".tsv")) and os.path.isfile(value):
        return ["data=csv", f"data.table={written}"]
    if "/" in value:
        raise Failure(f"{option}: no such folder", 2)
    return [option]


def _normalization(option: str, typed: Collection[str]) -> list[str]:
    """data.normalization=FILE stands for the options that the file holds, less those that are typed."""
    name, _, written = option.partition("=")
    if name != "data.normalization":
        return [option]
    try:
        found = yaml.safe_load(Path(_unquoted(written)).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Failure(f"{option}: cannot be read: {getattr(error, 'strerror', None) or 'is no YAML file'}", 2) from None
    if not isinstance(found, dict) or not found or not found.keys() <= {"channels", "range", "mean", "std"}:
        raise Failure(f"{option}: must be a file that {command_name('normalization')} wrote", 2)
    given = {f"data.{name}": json.dumps(value) for name, value in found.items()}
    return [f"{name}={value}" for name, value in given.items() if name not in typed]


def typed_command() -> str:
    """What identifies this command: its options as typed, in any order."""
    return command(argument for argument in _options if _is_option(argument))


def job_name(name: str) -> str:
    """The name of a run; a job of a sweep (-m) has its own values in it."""
    if HydraConfig.get().mode != RunMode.MULTIRUN:
        return name
    own = _own()
    if any(option.startswith("name=") for option in own):
        return name
    return "_".join([name, *(re.sub(r"[^\w.=,+-]+", "-", option) for option in own)])


def _own() -> list[str]:
    """The options that a job of a sweep has to itself."""
    shared = {argument.lstrip("+") for argument in (*_options, *_added)}
    return [option for option in HydraConfig.get().overrides.task if option.lstrip("+") not in shared]


def _check_typed(argument: str) -> None:
    """Refuse an option that is taken away, has another name now, or says what to call.

    What is called is chosen by the name of a file alone: a run's folder keeps no more of it.
    """
    if argument.startswith("~"):
        raise Failure(f"{argument}: an option can be changed, as option=value, but not taken away", 2)
    option, given, value = argument.lstrip("+").partition("=")
    if option in RENAMED:
        name, values = RENAMED[option]
        right = f"{name}={values[value]}" if value in values else name
        raise Failure(f"{argument}: is called {right} now", 2)
    names = (part.startswith("_") and part.endswith("_") and len(part) > 1 for part in option.split("."))
    if given and (any(names) or _CALLED_WITHIN.search(value)):
        right = "a file's name chooses what is called: write one of your own (--config-dir, in Python config_dir)"
        raise Failure(f"{argument}: {right}", 2)


def _check_flags(arguments: Sequence[str]) -> None:
    """Failure for an option that is written as a flag: --data PATH."""
    known = get_args_parser()._option_string_actions
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        flag, _, value = argument.partition("=")
        if argument.startswith("--") and not any(name.startswith(flag) for name in known):
            value = value or ("VALUE" if not following or following.startswith("-") or "=" in following else following)
            option = f"{flag.lstrip('-').replace('-', '_')}={value}"
            raise Failure(f"{flag}: must be written without dashes, as {shlex.quote(option)}", 2)


def _check_kinds(config: DictConfig, name: str) -> None:
    """OptionError for a value in the place of a group of options, or of a list, which would silently be lost."""
    choices, typed_options = HydraConfig.get().runtime.choices, HydraConfig.get().overrides.task
    options = {option.lstrip("+").partition("=")[0]: option for option in typed_options if "=" in option}
    before = hydra.compose(name, [option for group, option in options.items() if group in choices])
    for option in options.keys() - choices.keys():
        value, usual = (OmegaConf.select(node, option) for node in (config, before))
        if isinstance(usual, DictConfig) and not isinstance(value, DictConfig):
            if value is None and "." in option and (option.startswith("probes.") or "_target_" not in usual):
                continue  # one of several probes, or the stem of an encoder, may be left out
            first = next((name for name in map(str, usual) if not name.startswith("_")), "option")
            raise OptionError(option, value, f"is a group of options: give one of them, as {option}.{first}=…")
        if isinstance(usual, ListConfig) and not isinstance(value, ListConfig | str) and "." not in option:
            raise OptionError(option, value, "must be a list")


def _misplaced() -> str:
    """Return an error for a choice of files that is neither a name nor a list of names, or ""."""
    for argument in filter(_is_option, _options):
        group = re.split("[@=]", argument)[0]
        folders = [folder / group for folder in (CONFIGS, config_dir()) if folder is not None]
        if not any(folder.is_dir() for folder in folders):
            continue
        override = OverridesParser.create().parse_override(argument)
        choice = override.value()
        if not override.is_sweep_override() and not all(
            isinstance(name, str) for name in (choice if isinstance(choice, list) else [choice])
        ):
            names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
            typed_as = argument.removeprefix("probe@")  # see `aliases`
            return f"{typed_as}: must be one of {', '.join(names)}"
    return ""


def _is_option(argument: str) -> bool:
    return "=" in argument and not argument.startswith("-")


_said: list[str] = []
say = _said.append  # keeps a line for `announce`: a mistake in the command is reported alone


def announce() -> None:
    """Print the lines that `say` kept, in the main process, before the work begins."""
    if is_main_process():
        print_lines(*_said)
    _said.clear()


def progress(what: str, unit: str) -> Callable[[int, int], None]:
    """A function of (done, all) that shows the progress, its rate and the time left, unless it is soon done."""
    rarely = 0.5 if sys.stdout.isatty() else 10
    bar = tqdm(desc=what, unit=unit, mininterval=rarely, delay=rarely, dynamic_ncols=True, file=sys.stdout)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show


@contextmanager
def in_one_line() -> Iterator[None]:
    """Failures and Ctrl-C in the block end the process with one line."""
    try:
        yield
    except Failure as failure:
        leave(str(failure), failure.status)
    except KeyboardInterrupt:
        leave("stopped by Ctrl-C", 130)


def leave(line: str, status: int) -> NoReturn:
    """Print one line and end the process."""
    sys.stdout.flush()
    print(f"{Path(sys.argv[0]).name}: {printable(line)}", file=sys.stderr)
    sys.exit(status)


def as_dict(config: DictConfig, *, resolve: bool = True) -> Plain:
    """A group of options as a plain dictionary."""
    found = OmegaConf.to_container(config, resolve=resolve, throw_on_missing=resolve)
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items()}


def _option(name: str, config: DictConfig) -> str:
    """The option to type for one that refers to it: target.bits for objective.target.bits where that is ${target}."""
    node: object = OmegaConf.to_container(config, resolve=False)
    keys = name.split(".")
    for place, key in enumerate(keys, 1):
        node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, str) and (reference := re.fullmatch(r"\$\{([\w.]+)\}", node)):
            return _option(".".join([reference[1], *keys[place:]]), config)
    return name


def _refused(error: InstantiationException, config: DictConfig) -> Exception:
    """What a constructor refused, as a Failure; any other error in it is a fault of the program and stays as it is."""
    part = str(error).rpartition("full_key: ")[2]
    cause = error.__cause__
    if isinstance(cause, OptionError):
        return Failure(f"{_option(f'{part}.{cause.name}', config)}={typed(cause.value)}: {cause.right}", 2)
    if isinstance(cause, UserError):
        return Failure(str(cause), 1)
    if isinstance(cause, TypeError) and "argument" in str(cause):
        return Failure(f"{part}: {cause}", 2)
    return cause if isinstance(cause, Exception) else error


_SUGGESTIONS = 3


def _with_name(name: str, options: Plain, path: str = "") -> Iterator[str]:
    """Yield the options whose last name is `name`, except those that refer to another option."""
    for key, value in options.items():
        if key == name and not str(value).startswith("${"):
            yield f"{path}{key}"
        if isinstance(value, dict) and key != "hydra":
            yield from _with_name(name, value, f"{path}{key}.")


def _reason(error: Exception, tool: Tool) -> str:
    """What a Hydra or OmegaConf error means for the command line, in one line."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    first = str(cause).partition("\n")[0]
    if isinstance(error, OverrideParseException):
        name, given, value = str(error.override).partition("=")
        if not given or not value:
            usual = (f"{option}={shlex.quote(name)}" for option in ("data", "checkpoint"))
            example = f", such as {' or '.join(usual)}" if os.path.exists(name) or "/" in name else ""
            return f"{error.override}: must be written option=value{example}"
        quoted = "['option=value']" if value.startswith("[") else f"'{value}'"
        return f'{error.override}: texts with = or brackets need quotes, as "{name}={quoted}"'
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        for begins, package in _PLUGINS.items():
            if f"{group}={name}".startswith(begins):
                return f"{group}={name}: needs {package}: pip install {package}"
        known = error.options or sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
        if known:
            return f"{group}={name}: must be one of {', '.join(known)}"
    if merged := re.match(r"Error merging override \+*(.*)", str(error)):
        name = merged[1].partition("=")[0]
        is_group = first == "Cannot merge DictConfig with ListConfig"
        right = f"is a group of options: give one of them, as {name}.OPTION=VALUE" if is_group else first
        return f"{merged[1]}: {right}"
    if override := re.match(r"Could not override '([\w/]+)'", first):
        group = override[1]
        typed_as = next((option for option in _options if option.startswith(f"{group}=")), group)
        texts = {path.stem: path.read_text() for path in sorted((CONFIGS / "objective").glob("*.yaml"))}
        users = {name for name, text in texts.items() if f"/{group}:" in text}
        users |= {name for name, text in texts.items() for user in users if f"\n  - {user}\n" in text}
        if users:
            return f"{typed_as}: is for objective={', '.join(sorted(users))}"
        aliases = {option.rstrip("="): alias.rstrip("=") for alias, option in tool.aliases.items()}
        choices = sorted(aliases.get(name, name.partition("@")[0]) for name in default_choices(tool.name))
        hint = f"{group}.NAME=VALUE sets one option" if group in tool.groups else f"there are {', '.join(choices)}"
        return f"{typed_as}: is no choice of this command; {hint}"
    if isinstance(cause, MissingMandatoryValue | InterpolationToMissingValueError):
        name = first.rpartition(": ")[2]
        name = name if "." in name else cause.full_key or name
        group, _, option = name.rpartition(".")
        options = tool.groups.get(group)
        field = options.model_fields.get(option) if options else None
        values = "" if field is None else expected(field.annotation, field.metadata)
        return f"{name}: has no default and must be given{f', {values}' if values.startswith('one of') else ''}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key and cause.parent_node is not None:
        known = [str(key) for key in cause.parent_node if key not in ("_target_", "hydra")]
        parent, _, key = cause.full_key.rpartition(".")
        if not known:
            return f"{cause.full_key}: {parent} is empty, so it must be given whole, as {parent}={{{key}: …}}"
        root = cause.parent_node._get_root()
        assert isinstance(root, DictConfig)
        if same := sorted(_with_name(key, as_dict(root, resolve=False)), key=lambda option: option.count(".")):
            return f"{cause.full_key}: there is no such option; did you mean {' or '.join(same[:_SUGGESTIONS])}?"
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {parent + '.' if parent else ''}{close[0]}?" if close else f"there are {', '.join(known)}"
        return f"{cause.full_key}: there is no such option; {hint}"
    return first
