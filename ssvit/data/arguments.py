"""Expand the short forms of options of images: data=PATH, data.normalization=FILE and data.fit=NAME (no torch)."""

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import yaml

from ssvit.config.command_line import CommandLine
from ssvit.data.sources import shard_folder
from ssvit.errors import Failure
from ssvit.values import text_of, unquoted

_STATISTICS = {"channels", "range", "mean", "std"}  # options in a file of ssvit normalization


def expand(line: CommandLine, additions: Sequence[str] = ()) -> None:
    """Replace the short forms on a command line by the options that they abbreviate.

    Args:
        line: The command line, which is modified.
        additions: Options that data=PATH adds unless they are typed.

    Raises:
        Failure: The folder does not exist, or the normalization file cannot be read.
    """
    names = line.typed.keys()
    expanded = [part for option in line.options for part in data_set(option, line)]
    if len(expanded) > len(line.options):
        expanded += [option for option in additions if option.partition("=")[0] not in names]
    expanded = [re.sub(r"^data\.fit=", "data.view.fit=", option) for option in expanded]
    line.options = [part for option in expanded for part in _normalization(option, names)]


def data_set(option: str, line: CommandLine) -> list[str]:
    """Return the options that data=PATH abbreviates; any other option is returned unchanged.

    PATH is a folder of images, a folder of shards (tar files) without images, or a table of images (.csv, .tsv). A
    choice of the group data takes precedence over a path of the same name.

    Args:
        option: The option, name=value.
        line: The command line, whose choices of the group data are known.

    Raises:
        Failure: The path does not exist.
    """
    group, _, written = option.partition("=")
    value = unquoted(written)
    is_path = os.path.isabs(value) or value.startswith(".")
    if group != "data" or (not is_path and line.has_choice("data", value)):
        return [option]
    if os.path.isdir(value):
        return [f"data={'shards' if shard_folder.holds_shards(value) else 'folder'}", f"data.root={text_of(value)}"]
    if value.lower().endswith((".csv", ".tsv")) and os.path.isfile(value):
        return ["data=csv", f"data.table={text_of(value)}"]
    if "/" in value:
        raise Failure(f"{option}: no such file or folder", 2)
    return [option]


def _normalization(option: str, typed: Collection[str]) -> list[str]:
    """Return the options in the file that data.normalization=FILE names, except those that are typed."""
    name, _, written = option.partition("=")
    if name != "data.normalization":
        return [option]
    try:
        statistics = yaml.safe_load(Path(unquoted(written)).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Failure(f"{option}: cannot be read: {getattr(error, 'strerror', None) or 'is not YAML'}", 2) from None
    if not isinstance(statistics, dict) or not statistics or not statistics.keys() <= _STATISTICS:
        raise Failure(f"{option}: must be a file that ssvit normalization has written", 2)
    options = {f"data.{name}": text_of(value) for name, value in statistics.items()}
    return [f"{name}={text}" for name, text in options.items() if name not in typed]
