"""The commands by their names, each loaded when it is needed: for the command line and for Python."""

import importlib

from ssvit.cli.launch import Tool

# The module of each command in this package, and the name of the command there.
COMMANDS = {
    "pretrain": "pretrain:tool",
    "finetune": "finetune:tool",
    "evaluate": "evaluate:tool",
    "few-shot": "evaluate:few_shot",
    "linear-probe": "evaluate:linear",
    "knn": "evaluate:knn",
    "retrieve": "retrieve:tool",
    "embed": "embed:tool",
    "visualize": "visualize:tool",
    "export": "export:tool",
    "merge": "merge:tool",
    "predict": "predict:tool",
    "robustness": "robustness:tool",
    "vtab": "vtab:tool",
    "compare": "compare:tool",
    "scaling": "scaling:tool",
    "cost": "cost:tool",
    "pack": "pack:tool",
    "normalization": "normalization:tool",
    "benchmark": "benchmark:tool",
}


def find(name: str) -> Tool:
    """The tool of a command."""
    module, _, tool = COMMANDS[name].partition(":")
    return getattr(importlib.import_module(f"ssvit.cli.{module}"), tool)
