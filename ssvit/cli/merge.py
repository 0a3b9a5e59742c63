"""Merge the parts of a sharded run's checkpoint into complete files.

Usage: ssvit merge checkpoint=PATH.
"""

from pathlib import Path

from ssvit.checkpoints.checkpoint import PRETRAIN
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Name
from ssvit.errors import OptionError, print_lines
from ssvit.loading.finding import find_checkpoint
from ssvit.loading.options import Pretrained


class Merge(Pretrained):
    """The checkpoint of a sharded run, with one part written by each process, as complete files.

    Every command of ssvit reads the parts. Other programs require complete files, which are also fewer to copy.
    """

    checkpoint: Name = "newest"
    """The folder of a checkpoint or of its run; newest: the pre-training run that finished last."""


def run(config: Config) -> Path:
    """Check that this is a checkpoint of ssvit; then import torch, verify the parts and write the merged files."""
    options: Merge = config.options
    checkpoint = find_checkpoint(options.checkpoint, outputs=options.outputs, stage=PRETRAIN, say=config.line.say)
    if checkpoint.foreign:
        raise OptionError("checkpoint", options.checkpoint, "must be a checkpoint of a run, not a foreign file")
    config.line.announce()

    from ssvit.checkpoints import storage

    whole = storage.merge(checkpoint)
    print_lines(f"{whole.path}: {', '.join(sorted(whole.manifest['sha256']))}")
    return whole.path


command = Command("merge", run, options=Merge)
