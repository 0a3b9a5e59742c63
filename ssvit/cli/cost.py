"""Measure the cost of a pre-training step on this machine.

Usage: ssvit cost objective=mae.
"""

import json
from dataclasses import replace
from pathlib import Path

from ssvit.checkpoints.checkpoint import PRETRAIN
from ssvit.cli import pretrain
from ssvit.config.composed import Config
from ssvit.config.declaration import Tree
from ssvit.errors import OptionError
from ssvit.training.options import Pretrain


def run(config: Config) -> None:
    """Print the cost (`ssvit.training.benchmark.measure`) as a line of JSON."""
    options: Pretrain = config.options
    launch = options.launch.changed(devices=1) if options.launch.devices == "auto" else options.launch
    if launch.processes != 1:
        name = "num_nodes" if launch.num_nodes > 1 else "devices"
        raise OptionError(f"launch.{name}", getattr(launch, name), "must be 1: a step is timed in a single process")
    options = options.changed(launch=launch)
    Tree(options).check()

    from ssvit.training import runtime
    from ssvit.training.benchmark import measure
    from ssvit.training.session import Session

    session = Session(options, Path(options.outputs), stage=PRETRAIN)
    with runtime.detect_lost_peers():
        recipe, _, objective, loader = session.build(options)
        cost = measure(session.processes, objective, loader, recipe)
    print(json.dumps(cost))


command = replace(pretrain.command, name="cost", run=run, dry_run=None, results=None)
