"""Define the commands, one module for each, which is imported when the command is used."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssvit.config.command import Command

# The purpose of each command. Its module has the same name, with underscores instead of dashes.
COMMANDS = {
    "pretrain": "pre-train a Vision Transformer",
    "finetune": "turn what a pre-training run left into a classifier",
    "evaluate": "measure frozen features by any probes: one report",
    "few-shot": "ridge regression on a few images of each class, in closed form",
    "linear-probe": "train linear layers on frozen features",
    "knn": "classify by the nearest training images",
    "retrieve": "find pictures that look alike",
    "embed": "write the features of pictures into a file",
    "visualize": "plot filters, positions, attention and the similarity of layers",
    "export": "write weights as others read them",
    "merge": "make whole files of a sharded run's checkpoint",
    "predict": "name the classes of pictures",
    "robustness": "test a classifier on robustness sets, and whether it goes by shape or texture",
    "vtab": "make the table of VTAB-1k's 19 tasks from the runs that are there",
    "compare": "train objectives for equal CPU time and evaluate them alike",
    "scaling": "train a grid of runs and draw accuracy against images, model size and compute",
    "cost": "what a step of a pre-training run costs: CPU time, operations",
    "pack": "make shards (tar files) of a data set, or verify them",
    "normalization": "measure mean, deviation and range of the channels",
    "benchmark": "measure rates beside other libraries",
}


def find(name: str) -> "Command":
    """Import the command with a name."""
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}").command
