"""Least squares on a few images of each class, by frozen features: python tools/few_shot.py checkpoint=PATH"""

from typing import Any

from omegaconf import DictConfig

from ssvit.cli import frozen
from ssvit.cli.launch import launch
from ssvit.cli.pretrained import offer
from ssvit.evaluation.measures import FewShot


def run(config: DictConfig, plain: dict[str, Any]) -> None:
    """Print the accuracy for each number of shots; leave-one-out on the most shots chooses the layer."""
    readings = frozen.check(plain)
    measure = FewShot(**{name: plain[name] for name in ("protocol", "shots", "seeds", "l2")})
    if found := frozen.measured(config, plain, readings, {"": measure}):
        banks, [one] = found
        frozen.report(plain, banks, one)


def main() -> None:
    """Start the tool."""
    launch("few_shot", run, before=offer)
