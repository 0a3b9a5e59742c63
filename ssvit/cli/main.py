"""ssvit COMMAND …: the commands that tools/ has in a checkout, from anywhere."""

import importlib
import sys

from ssvit.cli.launch import Tool

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
    "predict": "predict:tool",
    "compare": "compare:tool",
    "cost": "cost:tool",
    "benchmark": "benchmark:tool",
}


def main() -> None:
    """Run the command that the first argument names with the others."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h"):
        print(usage())
    elif name == "--version":
        from importlib.metadata import version

        print(version("ssvit"))
    elif name not in COMMANDS:
        print(f"ssvit: {name}: must be one of {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    else:
        find(name).main(sys.argv[2:])


def find(name: str) -> Tool:
    """The tool of a command."""
    module, _, tool = COMMANDS[name].partition(":")
    return getattr(importlib.import_module(f"ssvit.cli.{module}"), tool)


def usage() -> str:
    """All commands and what they do."""
    lines = ["ssvit COMMAND group=file group.option=value …", ""]
    for name in COMMANDS:
        lines.append(f"  {name:<13} {find(name).purpose}")
    return "\n".join([*lines, "", "ssvit COMMAND --help shows a command's options."])
