"""The vote of the nearest training images by an encoder's frozen features: python tools/knn.py checkpoint=PATH"""

from typing import Any

from omegaconf import DictConfig

from ssvit.cli import frozen
from ssvit.cli.launch import launch
from ssvit.cli.pretrained import offer
from ssvit.evaluation.measures import Knn


def run(config: DictConfig, plain: dict[str, Any]) -> None:
    """Print the accuracy for each number of neighbours; each training image's own neighbours choose the layer."""
    readings = frozen.check(plain)
    measure = Knn(protocol=plain["protocol"], k=plain["k"])
    if found := frozen.measured(config, plain, readings, {"": measure}):
        banks, [one] = found
        frozen.report(plain, banks, one)


def main() -> None:
    """Start the tool."""
    launch("knn", run, before=offer)
