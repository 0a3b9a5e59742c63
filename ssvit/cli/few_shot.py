"""tools/evaluate.py with one probe, its table alone: python tools/few_shot.py checkpoint=PATH"""

from ssvit.cli.evaluate import ALIASES, run
from ssvit.cli.launch import launch
from ssvit.cli.pretrained import offer


def main() -> None:
    """Start the tool."""
    launch("few_shot", run, before=offer, aliases=ALIASES)
