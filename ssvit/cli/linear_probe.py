"""Measure frozen features by linear probes.

Usage: ssvit linear-probe checkpoint=PATH method=sgd|logistic.
"""

from dataclasses import replace
from pathlib import Path

from ssvit.cli import evaluate
from ssvit.config.composed import Config
from ssvit.evaluation.report.options import LinearProbe


def run(config: Config) -> Path | None:
    """Evaluate with only the probe that `method` selects."""
    options: LinearProbe = config.options
    return evaluate.run(config.changed({f"probes.{'logistic' if options.method == 'sgd' else 'sgd'}": None}))


command = replace(evaluate.command, name="linear_probe", run=run, options=LinearProbe)
