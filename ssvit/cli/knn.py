"""tools/evaluate.py with one probe, its table alone: python tools/knn.py checkpoint=PATH"""

from ssvit.cli.evaluate import ALIASES, run
from ssvit.cli.launch import launch
from ssvit.cli.pretrained import offer


def main() -> None:
    """Start the tool."""
    launch("knn", run, before=offer, aliases=ALIASES)
