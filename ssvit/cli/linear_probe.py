"""A linear layer on an encoder's frozen features: python tools/linear_probe.py checkpoint=PATH"""

from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from ssvit.cli import frozen
from ssvit.cli.launch import launch
from ssvit.cli.pretrained import offer
from ssvit.evaluation.linear_probe_rules import METHODS
from ssvit.options import one_of


def run(config: DictConfig, plain: dict[str, Any]) -> None:
    """Print the accuracy of the best layer of each feature set, chosen on the images held out of training."""
    readings = frozen.check(plain)
    method = plain["method"]
    one_of("method", method, METHODS)
    measure = instantiate(config[method], _convert_="all")
    if found := frozen.measured(config, plain, readings, {method: measure}):
        banks, [one] = found
        frozen.report(plain, banks, one)


def main() -> None:
    """Start the tool."""
    launch("linear_probe", run, before=offer)
