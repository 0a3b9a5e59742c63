"""Compose the options of a command with Hydra. Only modules of `ssvit.config` import Hydra and OmegaConf."""

import copy
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from types import UnionType
from typing import Annotated, NoReturn, Union, get_args, get_origin

import hydra
import yaml
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ssvit.choices import GROUPS, PARTS, PRETRAINED, Group, added, choice_names, options_of, variant
from ssvit.config.command_line import CONFIGS, PYTHON, CommandLine, Plain
from ssvit.config.composed import Config
from ssvit.config.declaration import Options, completed, required
from ssvit.config.dotted import at, put
from ssvit.config.filling import missing, source_of
from ssvit.errors import MISSING, Failure, OptionError
from ssvit.values import plain, text_of

_PLUGINS = {"hydra/launcher=submitit": "hydra-submitit-launcher", "hydra/sweeper=optuna": "hydra-optuna-sweeper"}
# Hydra writes multirun.yaml to the folder of all runs, in which the jobs of a sweep are, and no other files or logs.
_SWEEP = {
    "hydra.sweep.dir": "${oc.select:outputs,outputs}",
    "hydra.sweep.subdir": ".",
    "hydra.output_subdir": "null",
    "hydra/job_logging": "none",
    "hydra/hydra_logging": "none",
}
_SUGGESTIONS = 3
# For references to Hydra's options, and the options, of chosen files of ssvit and its plug-ins; a composition takes a
# quarter of a second, and a study composes many runs.
_COMPOSED: dict[str, tuple[HydraConf | None, Plain]] = {}
Job = Callable[[CommandLine, list[str]], float | None]


def compose(
    name: str, line: CommandLine, options_class: type[Options] = Options, *, incomplete: bool = False
) -> Config:
    """Compose the options of a command, with configs/<name>.yaml if this file exists.

    Args:
        name: Name of the command.
        line: The command line, with the choices that exist only for this command.
        options_class: Class of the command's options.
        incomplete: Whether required options may be missing, as in the description of a command.

    Raises:
        Failure: An option is unknown, or its value cannot be parsed.
        OptionError: An option has an invalid value.
    """
    with _failures(name, line, options_class), _hydra():
        choices, values = _choices_and_values(name, line)
        plain = _plain(_file(name, line), line, choices)
        chosen = HydraConfig.get().runtime.choices.items()
        files = {group: file for group, file in chosen if not group.startswith("hydra/")}
        files |= {choice.removeprefix("~"): None for choice in choices if choice.startswith("~")}  # typed as null
        if plain.get("experiment"):
            raise Failure(
                f"experiment={files['experiment']}: the first line of the file must be # @package _global_", 2
            )
        _add_pretrained(plain, files, line)
        _leave_out_inapplicable(plain)
        options = completed(plain, {"": options_class})
        for option, value in values.items():
            set_option(options, option, value, force=line.prefixes.get(option) == "++")
        _fit_warmup(options, line)
        options = completed(options, {"": options_class})
        if "name" not in line.typed and isinstance(options.get("name"), str):
            try:
                options["name"] = options["name"].format_map(files)
            except (LookupError, ValueError):
                raise OptionError("name", options["name"], f"may contain {{GROUP}} of {', '.join(files)}") from None
        config = Config(options, files, line, options_class=options_class)
        if incomplete:
            return config
        _check_complete(config)
        if line.start:
            config = line.start.complete(config)
        try:
            with config.names_as_typed():
                _ = config.options
        except OptionError as error:
            if error.name not in line.typed and (experiment := files.get("experiment")):
                expectation = f"{error.expectation} (with experiment={experiment})"
                raise OptionError(error.name, error.value, expectation) from None
            if line.prefix == PYTHON or not isinstance(error.value, str) or "," not in error.value:
                raise
            raise OptionError(error.name, error.value, f"{error.expectation}; several values require -m") from None
        return config


def _check_complete(config: Config) -> None:
    """Raise OptionError if an option has neither a value nor a default."""
    fields = config.options_class.model_fields
    # Others serve only as sources of options, such as teacher; an option that lacks its source is missing itself.
    of_command = (name for name in missing(config.values) if name.partition(".")[0] in fields)
    for name in map(config.option, of_command):
        raise required(name, fields.get(name))


def _plain(file: str | None, line: CommandLine, choices: list[str]) -> Plain:
    """Return the options in the chosen files; a process composes the same files once."""
    key = json.dumps([file, choices, added(), line.config_dir], default=str)
    instance = HydraConfig.instance()
    if line.config_dir or key not in _COMPOSED:
        try:
            composed = hydra.compose(file, [*_search_path(line), *choices], return_hydra_config=True)
        except ValueError as error:  # a file of another form
            raise Failure(f"{line.config_dir or 'hydra'}: {error}", 2) from None
        instance.set_config(composed)
        with open_dict(composed):
            del composed["hydra"]
        _COMPOSED[key] = instance.cfg, _container(composed)
    instance.cfg, plain = _COMPOSED[key]
    return copy.deepcopy(plain)


def _file(name: str, line: CommandLine) -> str | None:
    return name if line.file(name) else None


def _choices_and_values(command: str, line: CommandLine) -> tuple[list[str], dict[str, object]]:
    """Return the options that choose files or configure Hydra, in its syntax, and those that set values."""
    choices: list[str] = []
    values: dict[str, object] = {}
    optional = {group for group, choice in line.default_choices(command).items() if choice is None}
    for name, value in line.values.items():
        group = name.partition("@")[0]
        if group.startswith("hydra"):
            choices.append(_as_typed(name, line))
        elif "@" in name or line.is_group(group):
            choices.append(f"~{name}" if value is None and name in optional else _for_hydra(name, value, line))
        else:
            values[name] = value
    return choices, values


def _as_typed(name: str, line: CommandLine) -> str:
    """Return an option in Hydra's syntax with the text that was typed, which may have several values."""
    text = line.texts.get(name) or text_of(line.values[name])
    return f"{line.prefixes.get(name, '')}{name}={text}"


def _for_hydra(name: str, value: object, line: CommandLine) -> str:
    """Return an option that chooses files of a group, in Hydra's syntax; raise Failure if it has other values."""
    group = name.partition("@")[0]
    sweep = _sweep_of(name, line) if line.sweep else None
    several = sweep.value() if sweep else value
    choices = several.list if isinstance(several, ChoiceSweep) else [several]
    names = chain(*(choice if isinstance(choice, list) else [choice] for choice in choices))
    known = line.names(group)

    def is_name(choice: object) -> bool:
        if sweep and isinstance(choice, str):  # a path is a name only by an expansion, which is for one value
            return choice in (*known, PRETRAINED)
        return isinstance(choice, str | QuotedString | Glob)

    if not all(map(is_name, names)):
        option = f"{_option_of(group, line)}={line.texts.get(name, text_of(value))}"
        each = "each value must be" if sweep else "must be"
        raise Failure(f"{option}: {each} one of {', '.join(known)}", 2)
    return _as_typed(name, line) if sweep else f"{line.prefixes.get(name, '')}{name}={_hydra_text(value)}"


def _option_of(group: str, line: CommandLine) -> str:
    """Return the option that chooses files of a group: probes for probe."""
    return next((alias for alias, option in line.aliases.items() if option.startswith(f"{group}@")), group)


def _hydra_text(value: object) -> str:
    """Return a text, a list of texts or None in Hydra's syntax."""
    if isinstance(value, list):
        return f"[{','.join(map(_hydra_text, value))}]"
    return "null" if value is None else QuotedString(str(value), Quote.single).with_quotes()


def swept(line: CommandLine) -> set[str]:
    """Return the options that have several values in Hydra's syntax."""
    return {name for name in line.typed if _sweep_of(name, line)}


def _sweep_of(name: str, line: CommandLine) -> Override | None:
    """Return an option that has several values in Hydra's syntax, such as 1,2 or range(1,3); None for one value."""
    with suppress(HydraException):
        override = OverridesParser.create().parse_override(_as_typed(name, line))
        return override if override.is_sweep_override() else None
    return None


def _add_pretrained(options: Plain, files: Mapping[str, str | None], line: CommandLine) -> None:
    """Add the options for which the choice `pretrained` stands; those that other files set take precedence.

    Raises:
        Failure: There is no checkpoint.
    """
    for group, file in files.items():
        if file == PRETRAINED:
            if line.start is None:
                raise Failure(f"{group}={file}: requires a checkpoint: checkpoint=PATH", 2)
            name = group.partition("@")[2] or group
            put(options, name, _merged(line.start.groups.get(name), at(options, name)))


def _merged(base: Plain | None, changes: Plain) -> Plain | None:
    """Return options at any depth with changes; None if there are neither."""
    if base is None:
        return changes or None
    full = copy.deepcopy(base)
    for name, value in changes.items():
        former = full.get(name)
        full[name] = _merged(former, value) if isinstance(value, dict) and isinstance(former, dict) else value
    return full


def _leave_out_inapplicable(options: Plain) -> None:
    """Remove options that the objective sets for the encoder and that the encoder lacks, such as a ResNet's pooling."""
    objective = options_of(at(options, "objective._part_"))
    encoder = options_of(at(options, "encoder._part_"))
    if objective and encoder:
        for option in objective.sets.get("encoder", {}).keys() - encoder.model_fields.keys():
            del options["encoder"][option]


def _fit_warmup(options: Plain, line: CommandLine) -> None:
    """Make a warm-up shorter than the run if one of the two is not typed.

    A warm-up from a file of options is shortened, as `preset` chooses it. With a budget, which determines the number of
    steps later, the number in the file is increased.
    """
    recipe = options.get("recipe")
    if not isinstance(recipe, dict):
        return
    steps, warmup = recipe.get("steps"), recipe.get("warmup")
    if type(steps) is int and type(warmup) is int and warmup >= steps > 0:
        if "recipe.warmup" not in line.values:
            recipe["warmup"] = steps // 20
        elif options.get("budget") is not None and "recipe.steps" not in line.values:
            recipe["steps"] = warmup + 1


def set_option(options: Plain, name: str, value: object, *, force: bool = False) -> None:
    """Set an option of a command.

    Args:
        options: All options, modified in place.
        name: Dotted name of the option, such as recipe.lr.
        value: The value. A dictionary changes only the options of a group that it contains, unless it is one of several
            kinds of values, such as the classes of masks.
        force: Whether the option may be new in its group.

    Raises:
        OptionError: The value replaces a group of options or a list, or the option is inside a plain value.
        Failure: The option does not exist.
    """
    *groups, key = name.split(".")
    node = options
    for index, group in enumerate(groups):
        path = ".".join(groups[: index + 1])
        inner = node[group] if group in node else _unknown(options, name, path, node)
        force = force or _is_open(node, group)
        if inner in (None, MISSING) or (inner == {} and not force):
            expected_form = f"{path}={{{key}: …}}"
            raise OptionError(name, value, f"{path} is null, so all of its options must be set, as {expected_form}")
        if not isinstance(inner, dict):
            raise OptionError(name, value, f"{path} is a value, not a group of options")
        node = inner
    if key not in node and not force:
        _unknown(options, name, name, node)
    usual = node.get(key)
    if isinstance(value, dict) and value.get("_part_") not in (None, at(usual, "_part_")):
        node[key] = completed(value, {}, name)
        return
    if isinstance(usual, dict) and isinstance(value, dict) and not _is_value(node, key):
        for option, new in value.items():
            if option not in usual and not force and ("_part_" in usual or (usual and _are_parts(usual))):
                _unknown(options, f"{name}.{option}", f"{name}.{option}", usual)
            usual[option] = new
        return
    if isinstance(usual, dict) and usual and not isinstance(value, dict):
        # A null removes one of several parts, such as a probe, or a group within a part, such as an encoder's stem.
        leaves_out = value is None and groups and (_are_parts(node) or "_part_" not in usual)
        if not leaves_out:
            first = next((option for option in usual if not option.startswith("_")), "option")
            raise OptionError(name, value, f"is a group of options: set one of them, such as {name}.{first}=…")
    node[key] = value


def _is_open(node: Plain, name: str) -> bool:
    """Return whether an option of a part is a dictionary with any keys, such as the arguments of a timm model."""
    field = getattr(options_of(node.get("_part_")), "model_fields", {}).get(name)
    return field is not None and get_origin(field.annotation) is Mapping


def _is_value(node: Plain, name: str) -> bool:
    """Return whether an option of a part has dictionaries among several kinds of values, such as lists."""
    field = getattr(options_of(node.get("_part_")), "model_fields", {}).get(name)
    kinds = set() if field is None else _kinds(field.annotation) - {None}
    return Mapping in kinds and len(kinds) > 1


def _kinds(annotation: object) -> set[object]:
    """Return the generic types in a union or an annotated type."""
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return set().union(*map(_kinds, get_args(annotation)))
    return {get_origin(annotation)}


def _are_parts(node: Plain) -> bool:
    """Return whether a group contains only parts by name."""
    return all(isinstance(part, dict) and "_part_" in part for part in node.values() if part is not None)


def _unknown(options: Plain, name: str, missing: str, group: Plain) -> NoReturn:
    """Raise the error for an option that does not exist, with similar options.

    Args:
        options: All options of the command.
        name: Name of the option.
        missing: The part of the name, from its beginning, that does not exist.
        group: The options next to the missing one.
    """
    key = name.rpartition(".")[2]
    if same := sorted(_with_name(key, options), key=lambda option: option.count(".")):
        raise Failure(f"{name}: there is no such option; did you mean {' or '.join(same[:_SUGGESTIONS])}?", 2)
    names = [option for option in group if option != "_part_"]
    parent, _, key = missing.rpartition(".")
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {parent + '.' if parent else ''}{close[0]}?" if close else f"there are {', '.join(names)}"
    raise Failure(f"{name}: there is no such option; {hint}", 2)


def sweep(name: str, line: CommandLine, options_class: type[Options], job: Job) -> None:
    """Call a function for each combination of values (-m), through Hydra's launcher and sweeper.

    Args:
        name: Name of the command.
        line: The command line.
        options_class: Class of the command's options.
        job: The function of the command line of a combination and of its options that differ from other combinations;
            it returns the objective value for sweepers such as Optuna.
    """
    command_line = sys.argv[1:]

    def task(composed: DictConfig) -> float | None:
        sys.argv[1:] = command_line  # a run starts its other processes with these arguments
        options = [option for option in HydraConfig.get().overrides.task if option not in shared]
        overrides = OverridesParser.create().parse_overrides(options)
        values = {each.get_key_element().lstrip("+"): plain(each.value()) for each in overrides}
        return job(line.job(values), [f"{name}={text_of(value)}" for name, value in values.items()])

    # Hydra then raises its errors instead of printing them with hints for developers.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with _failures(name, line, options_class):
        choices, values = _choices_and_values(name, line)
        typed = {name: value for name, value in line.values.items() if not name.startswith("hydra")}
        fixed = {name: value for name, value in typed.items() if not _sweep_of(name, line)}
        # No other value reaches Hydra. ++ permits options that no YAML file declares.
        outputs = [f"++outputs={_hydra_text(fixed['outputs'])}"] if "outputs" in fixed else []
        shared = [*choices, *outputs]
        several = [f"++{_as_typed(name, line).lstrip('+')}" for name in values if name not in fixed]
        written = [f"{option}={value}" for option, value in _SWEEP.items() if option not in line.typed]
        sys.argv[1:] = ["--multirun", *_search_path(line), *shared, *several, *written]
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=_file(name, line))(task)()


def group(line: CommandLine, name: str, choices: Mapping[str, str | None]) -> Plain:
    """Return a group of options composed from chosen files.

    Args:
        line: The command line.
        name: Name of the group.
        choices: The file by group; None for no file.

    Raises:
        Failure: A file does not exist.
    """
    options = [f"{'+' * (choice == name)}{choice}={_hydra_text(file)}" for choice, file in choices.items()]
    with _failures("", line, Options), _hydra():
        composed = hydra.compose(overrides=[*_search_path(line), *options])
        return completed(_container(composed[name]), {}, name)


def as_yaml(config: Config) -> str:
    """Return the values of a configuration as YAML."""
    return yaml.safe_dump(config.values, sort_keys=False, allow_unicode=True)


@contextmanager
def _hydra() -> Iterator[None]:
    """Initialise Hydra within the block, and restore the state of an application that also uses Hydra."""
    hydra_config, callers = HydraConfig.instance(), GlobalHydra.instance().hydra
    former = hydra_config.cfg
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            yield
    finally:
        hydra_config.cfg = former
        GlobalHydra.instance().hydra = callers


class DeclaredChoices(ConfigSource):
    """Provide the choices of `ssvit.choices` on Hydra's search path; only the options of chosen parts are imported."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of this source in Hydra's search path."""
        return "choices"

    def available(self) -> bool:
        """Return True: this source requires no files."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether a group has parts."""
        return config_path in PARTS

    def is_config(self, config_path: str) -> bool:
        """Return whether there is a choice of this name."""
        group, _, name = config_path.rpartition("/")
        return name in choice_names(group) or (name == PRETRAINED and group in PARTS)

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the node of a choice; at the root if its part sets options of other groups."""
        name, _, choice = config_path.rpartition("/")
        if choice == PRETRAINED:  # see `_add_pretrained`
            augment = [{"/augment@augment": PRETRAINED}] if name == "data" else []
            return ConfigResult(
                self.provider, self.full_path(), OmegaConf.create({"defaults": augment}), {"package": None}
            )
        group, chosen = GROUPS.get(name, Group()), variant(name, choice)
        assert chosen is not None
        part = f"{name}/{chosen.part}"
        options = options_of(part)
        node: Plain = {"_part_": part, **chosen.options}
        if group.several:
            node = {choice: node}
        is_global = bool(options.sets or options.also)
        if is_global:
            node = {**options.sets, name: {**options.sets.get(name, {}), **node}}
        also = [{group: file} for group, file in {**options.also, **chosen.also}.items()]
        node = {"defaults": [*also, "_self_"], **node}
        header = {"package": "_global_" if is_global else None}
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(node), header)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the choices of a group; no groups."""
        return [] if results_filter is ObjectType.GROUP else sorted(choice_names(config_path))


Plugins.instance().register(DeclaredChoices)


def _search_path(line: CommandLine) -> list[str]:
    folder = [] if line.config_dir is None else [line.config_dir.as_uri()]
    return [f"hydra.searchpath={json.dumps([*folder, 'choices://'])}"]


def _container(config: DictConfig) -> Plain:
    container = OmegaConf.to_container(config, resolve=False)
    assert isinstance(container, dict)
    return {str(name): value for name, value in container.items()}


@contextmanager
def _failures(name: str, line: CommandLine, options_class: type[Options]) -> Iterator[None]:
    """Translate errors of Hydra and OmegaConf into a one-line Failure."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise Failure(_reason(error, name, line, options_class), 2) from None


def _with_name(name: str, options: Plain, path: str = "") -> Iterator[str]:
    """Yield the options whose last name is `name`, except those that take the value of another option."""
    for key, value in options.items():
        if key == name and not (value == MISSING and source_of(f"{path}{key}")):
            yield f"{path}{key}"
        if isinstance(value, dict) and key != "hydra":
            yield from _with_name(name, value, f"{path}{key}.")


def _reason(error: Exception, name: str, line: CommandLine, options_class: type[Options]) -> str:
    """Return the message of a Hydra or OmegaConf error in terms of the command line, as one line."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    first = str(cause).partition("\n")[0]
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark):
        return f"{mark.name}, line {mark.line + 1}: {error.problem}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: must be written in the syntax of Hydra"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        for begins, package in _PLUGINS.items():
            if f"{group}={choice}".startswith(begins):
                return f"{group}={choice}: requires {package}: pip install {package}"
        if names_of_choices := error.options or line.names(group):
            folder = "the path of a folder, or " if group == "data" else ""
            return f"{_option_of(group, line)}={choice}: must be {folder}one of {', '.join(names_of_choices)}"
    if merged := re.match(r"Error merging override \+*(.*)", str(error)):
        return f"{merged[1]}: {first}"
    if override := re.match(r"Could not override '([\w/]+)'", first):
        return _no_choice(override[1], name, line, options_class)
    return first


def _no_choice(group: str, name: str, line: CommandLine, options_class: type[Options]) -> str:
    """Return the error message for a group that is not a choice of this command."""
    typed_as = f"{group}={text_of(line.typed[group])}" if group in line.typed else group
    aliases = {option: alias for alias, option in line.aliases.items()}
    choices = sorted(aliases.get(choice, choice.partition("@")[0]) for choice in line.default_choices(name))
    hint = f"there are {', '.join(choices) or 'none'}"
    if group in options_class.model_fields:
        hint = f"{group}.NAME=VALUE sets one option"
    return f"{typed_as}: is not a choice of this command; {hint}"
