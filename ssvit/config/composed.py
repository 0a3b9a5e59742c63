"""A composed configuration: the values of all options of a command, and the parts that they describe. No Hydra."""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ssvit.config.command_line import CommandLine, Plain
from ssvit.config.declaration import Options, at, select
from ssvit.options import within

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
        return at(self.values, name, default)

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
        """Build a part.

        Args:
            name: Its name among the options, such as data.augment.
            objects: What it takes besides its options. Parts that it is built from (`Options.built_from`) are built.
        """
        part = at(self.options, name)
        built = {key: self.build(group) for key, group in part.built_from.items() if key not in objects}
        with within(name):
            return part.build(**built, **objects)

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
