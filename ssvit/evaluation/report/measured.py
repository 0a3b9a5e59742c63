"""Collect metadata and results of an evaluation: plain data for files, and text for the terminal."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.config.declaration import Options
from ssvit.evaluation import baselines
from ssvit.evaluation.duplicates import without
from ssvit.evaluation.features import copies
from ssvit.evaluation.report.against import Other
from ssvit.evaluation.report.options import Evaluate
from ssvit.evaluation.report.scores import Scores, Split
from ssvit.evaluation.statistics import NOTHING_YET

_PAIRS = 1000  # maximum number of near-duplicates listed in a file
_EXAMPLES = 3  # copies listed as examples


def facts(
    options: Evaluate,
    checkpoint: Checkpoint,
    split: Split,
    scores: Sequence[Scores],
    pooling: str,
    others: Sequence[Other],
) -> dict[str, Any]:
    """Return data, features, versions and compared encoders of an evaluation as plain data.

    Args:
        options: Options of the evaluation.
        checkpoint: The evaluated checkpoint.
        split: Feature sets of the first probe.
        scores: Results of the probes.
        pooling: Pooling of the features.
        others: Encoders for comparison.
    """
    train, test = split.train, split.test
    found = copies(train, test)
    examples = [{"test": test.picture(one), "train": train.picture(other)} for one, other in found[:_EXAMPLES]]
    return {
        "checkpoint": str(options.encoder.path),
        "checksum": checkpoint.checksum,
        "data": _named(options.data.source),
        "train_images": len(train),
        "test_images": len(test),
        "measured_on": split.part,
        "chance": split.chance,
        "classes": list(split.classes),
        **({"multi_label": True} if split.is_multi_label else {}),
        "features": {**options.features.values(), "pooling": pooling},
        "precision": options.precision,
        "image_size": list(options.data.view.size),
        "against": {other.name: other.facts for other in others},
        "versions": {name: version(name) for name in ("ssvit", "torch")},
        "copies": {"test_images_in_train": len(found), "examples": examples},
        **({} if split.duplicates is None else {"near_duplicates": _near_duplicates(split, scores)}),
    }


def _near_duplicates(split: Split, scores: Sequence[Scores]) -> dict[str, Any]:
    """List test images that are nearly the same as a training image, and the first probe's result without them."""
    pairs = split.duplicates or ()
    named = [
        {"test": split.test.picture(pair.test), "train": split.train.picture(pair.train), "cosine": pair.cosine}
        for pair in pairs[:_PAIRS]
    ]
    per_image = {one.title: one.per_image[baselines.OWN] for one in scores[:1] if baselines.OWN in one.per_image}
    kept = {probe: without(values, pairs) for probe, values in per_image.items() if len(values) == len(split.test)}
    return {"test_images": len(pairs), "without": kept if pairs else {}, "pairs": named}


def _named(source: Options) -> str:
    """Name a data set and its folder: cifar10 in /data, synthetic."""
    name = getattr(source, "name", type(source).__name__.lower())
    root = getattr(source, "root", None)
    return f"{name} in {root}" if root else str(name)


def describe(found: Scores, split: Split) -> str:
    """Format the result of a probe: one row for each feature set, the chosen one, and whether it is above chance."""
    rows = [["features", *found.columns]]
    for name, values in found.values.items():
        rows.append([name, *map(_percent, values, found.deviations[name])])
    lines = [table(rows)]
    if len(split.own) > 1:
        lines.append(f"best: {found.best}, chosen by {found.chosen_by}, without {split.part} labels")
    if not found.tells:
        lines.append(f"{found.best}: not {NOTHING_YET}")
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align cells in columns, the first one to the left, the following ones to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row, widths[1:], strict=True))])
        for first, *row in rows
    )


def _percent(share: float, deviation: float | None = None) -> str:
    """Format a share as a percentage: 0.523 -> 52.3 %."""
    return f"{100 * share:.1f} %" + (f" ± {100 * deviation:.1f}" if deviation is not None else "")
