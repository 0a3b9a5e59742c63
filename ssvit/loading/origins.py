"""Describe the origin of weights, with licences, for the configuration of a run and for model cards. No torch."""

from pathlib import Path

import yaml

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.configuration import Configuration
from ssvit.exchange import hub

_MAX_BYTES = 1 << 20  # of a README.md


def origin(use: str, checkpoint: Checkpoint, path: str) -> list[dict[str, str]]:
    """Return a row about a checkpoint, and the rows in the configuration of its run.

    Args:
        use: What the checkpoint is used for.
        checkpoint: The checkpoint.
        path: The path as a user typed it, which may be an address on the Hugging Face Hub.

    Returns:
        Rows of "use", "name", and "license" if foreign weights have a README.md that contains it in the Hub's format.
    """
    row = {"use": use, "name": hub.repository(path) or checkpoint.name}
    if checkpoint.run_folder is None:
        licence = _license(checkpoint.path.parent / "README.md")
        return [row | ({"license": licence} if licence else {})]
    run = Configuration.find(checkpoint.run_folder / "config.yaml")
    return [row, *(run.values.get("origins", []) if run else [])]


def _license(file: Path) -> str | None:
    """Return the licence in the front matter of a README.md; None if there is none."""
    try:
        with file.open(encoding="utf-8") as opened:
            _, front_matter, _ = opened.read(_MAX_BYTES).split("---\n", 2)
        entries = yaml.safe_load(front_matter)
        return str(entries.get("license_name") or entries["license"])
    except (OSError, ValueError, LookupError, AttributeError, yaml.YAMLError):
        return None
