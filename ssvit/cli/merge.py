"""Merge the parts of a sharded run's checkpoint into complete files: ssvit merge checkpoint=PATH"""

from pathlib import Path

from omegaconf import DictConfig

from ssvit.checkpoints.checkpoint import PRETRAIN, find
from ssvit.cli.launch import Plain, Tool, announce, say
from ssvit.options import OptionError, print_lines


def run(config: DictConfig, plain: Plain) -> Path:
    """Check that it is a checkpoint of ours; then load torch, verify the parts and write the whole files."""
    checkpoint = find(plain["checkpoint"], outputs=plain["outputs"], stage=PRETRAIN, say=say)
    if checkpoint.foreign:
        raise OptionError(
            "checkpoint", plain["checkpoint"], "must be a checkpoint of a run, not a file of foreign weights"
        )
    announce()

    from ssvit.checkpoints import storage

    whole = storage.merge(checkpoint)
    print_lines(f"{whole.path}: {', '.join(sorted(whole.facts['sha256']))}")
    return whole.path


tool = Tool("merge", "make whole files of a sharded run's checkpoint", run)
