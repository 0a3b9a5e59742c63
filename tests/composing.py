"""Composed configurations whose options tests read as attributes."""

from typing import Any

from ssvit.cli import find
from ssvit.config.composed import Config
from ssvit.config.declaration import Run


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

    def check(self) -> Any:
        """Check what the parts require of each other. Returns the recipe."""
        Run(self.config.options).check()
        return self.config.options.recipe

    def build(self, name: str, **objects: object) -> Any:
        """Build a part, such as data.augment."""
        return self.config.build(name, **objects)


def composed(*options: str, tool: str = "pretrain", incomplete: bool = False) -> Values:
    """The options of a command, as a command line with these options makes them."""
    command = find(tool)
    config = command.compose(command.line(options), incomplete=incomplete)
    return Values(config.values, config)
