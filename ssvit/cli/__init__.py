"""Define the commands, one module for each, which is imported when the command is used."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssvit.config.command import Command

# The purpose of each command. Its module has the same name, with underscores instead of dashes.
COMMANDS = {
    "try": "describe your images, measure existing weights and a short pre-training, name the best",
    "pretrain": "pre-train a Vision Transformer",
    "finetune": "fine-tune a pre-trained encoder as a classifier",
    "evaluate": "measure frozen features by probes, and write a report",
    "few-shot": "fit ridge regression in closed form on a few images of each class",
    "linear-probe": "train linear layers on frozen features",
    "knn": "classify by the nearest training images (k-NN)",
    "retrieve": "store features of pictures and search similar pictures",
    "embed": "write the features of pictures into a file",
    "visualize": "plot filters, position embeddings and attention",
    "inspect": "compare encoders: inductive biases, receptive fields, similarity of layers",
    "export": "write weights in the formats of other libraries",
    "merge": "merge the checkpoint of a sharded run into unsharded files",
    "predict": "classify pictures with a fine-tuned model",
    "table": "tabulate accuracies of finished runs by data set and model, over seeds",
    "compare": "train objectives for equal CPU time and evaluate them by one protocol",
    "scaling": "train a grid of runs and draw accuracy against images, model size and compute",
    "cost": "measure the cost of a pre-training step: CPU time, operations",
    "pack": "make shards (tar files) of a data set",
    "normalization": "measure mean, deviation and range of the channels",
    "build-kernels": "compile faster layers for training on this CPU",
    "benchmark": "measure the speed of a training step and of the loader",
}


def find_command(name: str) -> "Command":
    """Import the command with a name."""
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}").command
