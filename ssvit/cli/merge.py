"""Merge the parts of a sharded run's checkpoint into complete files: ssvit merge checkpoint=PATH"""

from pathlib import Path

from ssvit.checkpoints.checkpoint import PRETRAIN
from ssvit.checkpoints.finding import find
from ssvit.cli.launch import Tool
from ssvit.config.composed import Config
from ssvit.options import OptionError, print_lines


def run(config: Config) -> Path:
    """Check that it is a checkpoint of ours; then load torch, verify the parts and write the whole files."""
    plain = config.values
    checkpoint = find(plain["checkpoint"], outputs=plain["outputs"], stage=PRETRAIN, say=config.line.say)
    if checkpoint.foreign:
        raise OptionError(
            "checkpoint", plain["checkpoint"], "must be a checkpoint of a run, not a file of foreign weights"
        )
    config.line.announce()

    from ssvit.checkpoints import storage

    whole = storage.merge(checkpoint)
    print_lines(f"{whole.path}: {', '.join(sorted(whole.facts['sha256']))}")
    return whole.path


tool = Tool("merge", "make whole files of a sharded run's checkpoint", run)
