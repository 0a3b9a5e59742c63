"""Composed configurations whose options tests read as attributes."""

from collections.abc import Mapping
from typing import Any

from ssvit.cli import find
from ssvit.config.composed import Config
from ssvit.config.declaration import select
from ssvit.training.options import Training
from ssvit.training.recipe import Recipe


class Values(dict):
    """Options by name and as attributes; `config` is the configuration that they belong to."""

    def __init__(self, values: dict, config: Config) -> None:
        super().__init__({name: Values(of, config) if isinstance(of, dict) else of for name, of in values.items()})
        self.__dict__["config"] = config

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def checked(values: Mapping[str, Any]) -> Recipe:
    """Check the parts of a training run, as the commands do before torch is loaded; returns the recipe."""
    options = select(Training, values)
    options.check_parts(values)
    return options.recipe


def composed(*options: str, tool: str = "pretrain", incomplete: bool = False) -> Values:
    """The options of a command, as a command line with these options makes them."""
    command = find(tool)
    config = command.compose(command.line(options), incomplete=incomplete)
    return Values(config.values, config)
