"""A composed configuration: the values of all options of a command, and the parts that they describe. No Hydra."""

import copy
import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ssvit.config.command_line import CommandLine, Plain
from ssvit.config.declaration import Options, select
from ssvit.options import UserError, within

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True)
class Config:
    """The options of a command.

    Attributes:
        written: The values; one that refers to another option is written ${name}.
        choices: The choice of each group of options, such as {"objective": "mae"}.
        overrides: The options that were typed or added, as option=value.
        line: The command line.
        own: The options that a job of a sweep does not share with the other jobs.
        kind: The class of the command's options.
    """

    written: Plain
    choices: Mapping[str, Any]
    overrides: Sequence[str]
    line: CommandLine
    own: Sequence[str] = ()
    kind: type[Options] = Options

    @cached_property
    def options(self) -> Any:
        """The options of the command as an object of its class. OptionError if one has a wrong value."""
        return select(self.kind, self.values)

    @cached_property
    def values(self) -> Plain:
        """The values, with those of the options that others refer to.

        A name among the arguments of the command line is text, and refers to nothing.
        """
        values = self._resolved(self.written)
        name = self.line.positional
        if name and isinstance(values.get(name), list):
            values[name] += self.line.arguments
        return values

    def value(self, name: str, default: object = None) -> Any:
        """The value of an option such as recipe.lr; the default if there is no such option."""
        found: Any = self.values
        for key in name.split("."):
            if not isinstance(found, Mapping) or key not in found:
                return default
            found = found[key]
        return found

    def changed(self, changes: Mapping[str, object]) -> "Config":
        """Return a configuration with other values of some options, such as {"recipe.lr": 0.1}."""
        config = replace(self, written=copy.deepcopy(self.written))
        for name, value in changes.items():
            group, key = config._place(name)
            group[key] = value
        return config

    def without(self, *names: str) -> "Config":
        """Return a configuration without some options."""
        config = self.changed({})
        for name in names:
            group, key = config._place(name)
            del group[key]
        return config

    def _place(self, name: str) -> tuple[Plain, str]:
        """The group that holds an option, as it is written, and the option's name within it."""
        *groups, key = name.split(".")
        node = self.written
        for group in groups:
            node = node[group]
        return node, key

    def option(self, name: str) -> str:
        """The option to type for one that refers to it: target.bits for objective.target.bits, which is ${target}."""
        node: object = self.written
        keys = name.split(".")
        for place, key in enumerate(keys, 1):
            node = node.get(key) if isinstance(node, Mapping) else None
            if isinstance(node, str) and (reference := _REFERENCE.fullmatch(node)):
                return self.option(".".join([reference[1], *keys[place:]]))
        return name

    def build(self, name: str, /, **objects: object) -> Any:
        """Build the part that a group of options describes; see `build`."""
        with within(name):
            return build(self.value(name), **objects)

    def _resolved(self, node: object) -> Any:
        if isinstance(node, Mapping):
            return {key: self._resolved(value) for key, value in node.items()}
        if isinstance(node, list):
            return [self._resolved(value) for value in node]
        if not isinstance(node, str):
            return node
        if reference := _REFERENCE.fullmatch(node):
            return self._resolved(self._written(reference[1]))
        return _REFERENCE.sub(lambda found: str(self._resolved(self._written(found[1]))), node)

    def _written(self, name: str) -> object:
        node: Any = self.written
        for key in name.split("."):
            node = self._resolved(node)[key] if isinstance(node, str) else node[key]
        return node


def build(node: object, /, **objects: object) -> Any:
    """Build what a group of options describes: its `_target_` is called with the others as keyword arguments.

    Args:
        node: Options as plain data. Groups within it that have a `_target_` are built first.
        objects: Further keyword arguments, which no option can hold.

    Raises:
        OptionError: The part has no such value of an option; its name begins at this node.
        UserError: The part takes no such option, or needs one that is missing.
    """
    if isinstance(node, list):
        return [build(value) for value in node]
    if not isinstance(node, Mapping):
        return node
    given: dict[str, Any] = {}
    for name, value in node.items():
        if name != "_target_":
            with within(name):
                given[name] = build(value)
    if "_target_" not in node:
        return given
    part = locate(node["_target_"])
    given |= objects
    try:
        inspect.signature(part).bind(**given)
    except TypeError as error:
        raise UserError(f"{node['_target_']}: {error}") from None
    return part(**given)


def locate(name: str) -> Any:
    """Import what a dotted name stands for, such as ssvit.objectives.mae.MAE."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
