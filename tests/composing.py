"""Composed configurations whose options tests read as attributes."""

from pathlib import Path
from typing import Any

import torch

from ssvit.checkpoints import storage
from ssvit.checkpoints.checkpoint import PRETRAIN
from ssvit.checkpoints.configuration import Configuration
from ssvit.cli import find_command
from ssvit.config.composed import Config
from ssvit.config.declaration import Tree
from ssvit.retrieval.extraction import Extraction


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
        Tree(self.config.options).check()
        return self.config.options.recipe

    def build(self, name: str, **objects: object) -> Any:
        """Build a part, such as data.augment."""
        return self.config.options.build_part(name, **objects)


def composed(*options: str, tool: str = "pretrain", incomplete: bool = False) -> Values:
    """The options of a command, as a command line with these options makes them."""
    command = find_command(tool)
    config = command.compose(command.line(options), incomplete=incomplete)
    return Values(config.values, config)


def extraction(*options: str, store: str | None = None) -> Extraction:
    """The extraction of features of the command embed with these options."""
    config = composed(*options, tool="embed").config
    line = config.line
    return Extraction(config.options, typed_names=line.typed, choice="", say=line.say, store=store)


def untrained(folder: Path, *options: str, seed: int = 0, stage: str = PRETRAIN) -> Path:
    """Write the run of a command with these options, whose encoder has random weights; return its checkpoint."""
    config = composed(*options)
    torch.manual_seed(seed)
    encoder = config.build("encoder")
    weights = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    folder.mkdir(parents=True)
    choices = {group: config.config.choices[group] for group in ("data", "augment@data.augment")}
    (folder / "config.yaml").write_bytes(Configuration.of_values(config.config.written, choices).serialized())
    metadata = {"encoder": encoder.arguments, "stage": stage}
    if (limits := getattr(config.config.options.data, "range", None)) is not None:
        metadata["range"] = limits
    return storage.save(folder, config.recipe.steps, {"model": weights}, metadata)
