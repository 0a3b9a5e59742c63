"""Store a run's configuration in its folder as names of choices and values, without code. No torch.

A run folder may come from an untrusted source. Its config.yaml therefore
contains the names of the choices of each group (`choices`) and the values. A reader takes the parts from its own
choices of those names.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import JsonValue, TypeAdapter

from ssvit.choices import PRETRAINED
from ssvit.config.composed import Config
from ssvit.config.declaration import Options, default, parts
from ssvit.engine.atomic_io import check_schema
from ssvit.errors import UserError

# Options that may differ between a run and its continuation: they affect where and how fast it runs, or the checkpoint
# records them (fingerprint of the images, precision, initial weights of a fine-tuning).
FREE = (
    "overwrite", "outputs", "workers", "loader_timeout", "evaluators", "launch", "figures", "data.root",
    "data.download", "data.masks", "data.verify", "data.shown", "data.source", "recipe.precision",
    "recipe.accumulate", "recipe.best", "checkpoint", "encoder.path", "encoder.activation_checkpointing", "seeds",
    "probe", "probes", "probing", "command", "logger", "target.checkpoint", "preset", "origins",
)  # fmt: skip
# Groups whose files contain only options in `FREE` and values, which are compared directly.
FREE_CHOICES = ("experiment", "recipe", "data", "probe", "probe@probes", "evaluator@evaluators", "logger")

SCHEMA = 1
_MAX_BYTES = 1 << 20  # of a config.yaml; typical files have a few thousand
_FILE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*")
_CONTENT = TypeAdapter(dict[str, JsonValue])
_GROUP = re.compile(r"[A-Za-z]\w*(@[A-Za-z][\w.]*)?")


class ConfigurationError(UserError):
    """A run's config.yaml cannot be used."""


def flatten(config: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dictionaries by dotted name, such as ("recipe.lr", 0.001)."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from flatten(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, config


def code_entry(node: object, name: str = "") -> str:
    """Return the name of the first of nested options that could execute code; "" if all are values."""
    if isinstance(node, str):
        return name if "${" in node else ""
    parts: list[tuple[str, str, object]] = []  # key, full name and value
    if isinstance(node, Mapping):
        parts = [(str(key), f"{name}.{key}" if name else str(key), value) for key, value in node.items()]
    elif isinstance(node, list):
        parts = [("", f"{name}[{index}]", value) for index, value in enumerate(node)]
    for key, full, value in parts:
        is_code = any(part.startswith("_") for part in key.split("."))  # a key may be a dotted name
        if entry := full if is_code else code_entry(value, full):
            return entry
    return ""


@dataclass(frozen=True)
class Configuration:
    """The options of a run.

    Args:
        values: Nested options without builders.
        choices: The choice by group, such as {"objective": "mae"}; None where none is chosen.
        defaults: The declared defaults of the options by their full names; empty if unknown.
    """

    values: dict[str, Any]
    choices: dict[str, str | None]
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of_run(cls, config: Config) -> "Configuration":
        """Return the configuration for the config.yaml of a run, in which data=pretrained is the original choice.

        It also lists the weights from which the run starts and those of its teacher ("origins").
        """
        choices = dict(config.choices)
        if config.line.start and choices.get("data") == PRETRAINED:
            pretrained = {group for group, file in choices.items() if file == PRETRAINED and group != "encoder"}
            others = {group: file for group, file in choices.items() if group not in pretrained}
            choices = {**config.line.start.choices, **others}
        rows = [row for option, part in parts(config.options) for row in part.origins(option)]
        origins = {"origins": rows} if rows else {}
        # The data set takes the values of other options again in later commands.
        values = {"data": None} | config.values | {"command": config.line.identity} | origins
        values["data"] = config.written["data"]
        return replace(cls.of_values(values, choices), defaults=dict(_defaults(config.options)))

    @classmethod
    def of_values(cls, config: Mapping[str, object], choices: Mapping[str, str | None]) -> "Configuration":
        """Return the configuration of composed options without their builders."""
        return cls(_without_builders(config), dict(choices))

    @classmethod
    def read(cls, path: Path) -> "Configuration":
        """Read a run's config.yaml without executing any of its content.

        Raises:
            FileNotFoundError: There is no such file.
            ConfigurationError: The file is not the configuration of a run, or contains more than names of files and
                values.
        """
        values = _load(path)
        if "choices" in values:
            check_schema(values.pop("schema", None), SCHEMA, path, ConfigurationError)
        if name := code_entry(values):
            raise ConfigurationError(f"{path}: {name}: must be a value, not code; nothing was executed")
        if not (choices := values.pop("choices", None)):
            raise ConfigurationError(f"{path}: is not a configuration of a run: it has no `choices`")
        if not (
            isinstance(choices, dict)
            and all(map(_GROUP.fullmatch, choices))
            and all(file is None or (isinstance(file, str) and _FILE_NAME.fullmatch(file)) for file in choices.values())
        ):
            raise ConfigurationError(f"{path}: choices={choices}: must be names of choices by group")
        return cls(values, choices)

    @classmethod
    def find(cls, path: Path) -> "Configuration | None":
        """Read a run's config.yaml as `read` does; None if there is none, or if it cannot be used."""
        with suppress(FileNotFoundError, ConfigurationError):
            return cls.read(path)
        return None

    def serialized(self) -> bytes:
        """Return the content of a config.yaml."""
        content = {"schema": SCHEMA, "choices": self.choices, **self.values}
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode()

    def data(self) -> tuple[dict[str, str | None], dict[str, Any]]:
        """Return the choices of the group data, such as {"data": "cifar10"}, and its values.

        Raises:
            KeyError: The configuration has no group data.
        """
        parts = {group: file for group, file in self.choices.items() if group.partition("@")[2].startswith("data.")}
        return {"data": self.choices["data"], **parts}, self.values["data"]

    def difference(self, old: "Configuration", ignored: Sequence[str] = ()) -> tuple[str, Any, Any] | None:
        """Return the first relevant option that differs from an old run's, with its new and old value, or None.

        Args:
            old: Configuration of the old run.
            ignored: Options and groups that may differ, in addition to those in `FREE`.
        """
        sides = (
            (self.choices, old.choices, FREE_CHOICES),
            (dict(flatten(self.values)), dict(flatten(old.values)), (*FREE, *ignored)),
        )
        for now, then, free in sides:
            for name in [*now, *then]:
                value, before = (side.get(name, "(absent)") for side in (now, then))
                is_free = any(name == option or name.startswith(f"{option}.") for option in free)
                # The old run may be of a version without this option.
                is_new = name not in then and name in self.defaults and value == self.defaults[name]
                if value != before and not is_free and not is_new:
                    return name, value, before
        return None


def _defaults(options: Options) -> Iterator[tuple[str, Any]]:
    """Yield the full names and the defaults of options at any depth."""
    for prefix, part in (("", options), *((f"{name}.", part) for name, part in parts(options))):
        for name, declared in type(part).model_fields.items():
            yield from flatten(default(declared), f"{prefix}{name}")


def _load(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ConfigurationError(f"{path}: has more than {_MAX_BYTES} bytes, so it was not written by a run")
        return _CONTENT.validate_python(yaml.load(text, _Loader) or {})
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError):
        raise ConfigurationError(f"{path}: is damaged, or was not written by a run") from None


class _Loader(yaml.SafeLoader):
    """Load plain data and reject aliases, with which a few lines could expand beyond the available memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


def _without_builders(node: object) -> Any:
    if isinstance(node, Mapping):
        return {key: _without_builders(value) for key, value in node.items() if key != "_part_"}
    return [_without_builders(value) for value in node] if isinstance(node, list) else node
