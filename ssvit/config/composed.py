"""Provide the composed configuration of a command: option values, and the parts that they describe. No Hydra."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ssvit.config.command_line import CommandLine, Plain
from ssvit.config.declaration import Options, select
from ssvit.config.dotted import at, put
from ssvit.config.filling import fill, source_of
from ssvit.errors import MISSING, OptionError


@dataclass(frozen=True)
class Config:
    """Store the composed options of a command.

    Attributes:
        written: The values; ??? is the value of another option, see `ssvit.config.filling`.
        choices: The choice of each group of options, such as {"objective": "mae"}.
        line: The command line.
        swept: Options of a job of a sweep that differ between the jobs.
        options_class: Class of the command's options.
    """

    written: Plain
    choices: Mapping[str, Any]
    line: CommandLine
    swept: Sequence[str] = ()
    options_class: type[Options] = Options

    @cached_property
    def options(self) -> Any:
        """Return the options as an object of the command's class; raise OptionError if a value is invalid."""
        return select(self.options_class, self.values)

    @cached_property
    def values(self) -> Plain:
        """Return all values, including those taken from other options and the positional arguments."""
        values = fill(copy.deepcopy(self.written))
        name = self.line.positional
        if name and isinstance(values.get(name), list):
            values[name] += self.line.arguments
        return values

    def changed(self, changes: Mapping[str, object]) -> "Config":
        """Return a configuration with other values of some options, such as {"recipe.lr": 0.1}."""
        config = replace(self, written=copy.deepcopy(self.written))
        for name, value in changes.items():
            put(config.written, name, value)
        return config

    def option(self, name: str) -> str:
        """Return the name to type for an option: data.image_size for encoder.image_size, unless this is set itself."""
        keys = name.split(".")
        for length in range(1, len(keys) + 1):
            taken = ".".join(keys[:length])
            if at(self.written, taken) == MISSING and (source := source_of(taken)):
                return self.option(".".join([source, *keys[length:]]))
        return name

    @contextmanager
    def names_as_typed(self) -> Iterator[None]:
        """Name options in errors raised within the block as `option` does."""
        try:
            yield
        except OptionError as error:
            raise OptionError(self.option(error.name), error.value, error.expectation) from None
