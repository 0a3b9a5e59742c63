"""tools/evaluate.py with one linear probe, its table alone: python tools/linear_probe.py checkpoint=PATH"""

from typing import Any

from omegaconf import DictConfig

from ssvit.cli import evaluate
from ssvit.cli.launch import launch
from ssvit.cli.pretrained import offer
from ssvit.options import one_of


def run(config: DictConfig, plain: dict[str, Any]) -> None:
    """Evaluate by the probe that is the method."""
    method, methods = plain["method"], ("sgd", "logistic")
    one_of("method", method, methods)
    (other,) = {*methods} - {method}
    config.probes[other] = plain["probes"][other] = None
    evaluate.run(config, plain)


def main() -> None:
    """Start the tool."""
    launch("linear_probe", run, before=offer, aliases=evaluate.ALIASES)
