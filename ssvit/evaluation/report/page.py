"""Write the report of probes of frozen features: a self-contained HTML page, and JSON.

The last column of a probe is its headline metric. All text is escaped, since names and paths are arbitrary.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.engine import atomic_io
from ssvit.errors import one_line
from ssvit.evaluation.baselines import OWN
from ssvit.evaluation.duplicates import without
from ssvit.evaluation.leakage import sentence
from ssvit.evaluation.report import comparison
from ssvit.evaluation.report.against import Other
from ssvit.evaluation.report.comparison import Standing, percent
from ssvit.evaluation.report.folder import path_of
from ssvit.evaluation.report.options import Evaluate
from ssvit.evaluation.report.scores import Scores, Split
from ssvit.figures.base import Figure, png

_CAPTIONS = {
    "side_by_side": "Scores of all encoders by each probe, with 95 % intervals over the test images",
    "by_layer": "Headline metric of each probe over the layers of the encoder",
    "confusion": "Confusion matrix of the classifier that the title names",
    "contact_sheet": "Test images and their most similar training images, with the cosine distance in percent of its "
    "median over the training images",
    "duplicates": "Test images (left) that are near-duplicates of a training image (right), and the correlation of "
    "their details",
    "patches": "Test images, and the first three principal components of their patch features as colours",
    "segmentation": "Test images, principal components of their patch features, true and predicted masks",
}
_UNWRITTEN = ("probe", "predictions", "per_image")  # fields of the scores that are not written
_DOTS_AN_INCH = 100  # resolution of CSS pixels, for the size of figures
_PAIRS = 1000  # maximum number of near-duplicates listed in a file


def metadata_of(
    options: Evaluate, checkpoint: Checkpoint, split: Split, scores: Sequence[Scores], others: Sequence[Other]
) -> dict[str, Any]:
    """Return data, features, versions and compared encoders of an evaluation as plain data.

    Args:
        options: Options of the evaluation.
        checkpoint: The evaluated checkpoint.
        split: Feature sets of the first probe.
        scores: Results of the probes.
        others: Encoders for comparison.
    """
    train, test, source = split.train, split.test, options.data
    name, root = getattr(source, "name", type(source).__name__.lower()), getattr(source, "root", None)
    values = {
        "checkpoint": str(options.encoder.path),
        "checksum": checkpoint.checksum,
        "data": f"{name} in {root}" if root else str(name),
        "path": path_of(source.values()),
        "train_images": len(train),
        "test_images": len(test),
        "measured_on": split.part,
        "chance": split.chance(),
        "chance_balanced": split.chance(balanced=True),
        "classes": list(split.classes),
        "multi_label": split.is_multi_label,
        "features": options.features.values(),
        "precision": split.precision,
        "image_size": list(options.data.view.size),
        "remarks": list(dict.fromkeys(filter(None, (result.remark for result in scores)))),
        "against": {other.name: other.metadata for other in others},
        "versions": {name: version(name) for name in ("ssvit", "torch")},
    }
    if split.duplicates is not None:
        pairs = [
            {"test": test.picture(pair.test), "train": train.picture(pair.train), "correlation": pair.correlation}
            for pair in split.duplicates[:_PAIRS]
        ]
        first = scores[0]
        per_image = first.per_image.get(OWN)
        kept = {}
        if per_image is not None and 0 < len(split.duplicates) < len(per_image) == len(test):
            kept = {first.title: without(per_image, split.duplicates)}
        values["near_duplicates"] = {"test_images": len(split.duplicates), "without": kept, "pairs": pairs}
        values["pretraining"] = dict.fromkeys([checkpoint.name, *(other.name for other in others)]) | {
            name or checkpoint.name: overlap.values({first.title: first.per_image.get(name)})
            for name, overlap in split.overlaps.items()
        }
    return values


def data(metadata: Mapping[str, Any]) -> list[str]:
    """Return sentences on the images of `metadata_of`: their numbers, and which of the test images were seen."""
    part, chance = metadata["measured_on"], percent(metadata["chance"])
    if metadata["chance"] is None:
        labels = "no labels"
    elif metadata["multi_label"]:
        labels = f"{len(metadata['classes'])} classes, multi-label (chance mAP {chance} %)"
    else:
        balanced = f", balanced {percent(metadata.get('chance_balanced'))} %"
        labels = f"{len(metadata['classes'])} classes (chance {chance} %{balanced})"
    images = f"{metadata['train_images']:,} training and {metadata['test_images']:,} {part} images"
    sentences = [f"{images}, {labels}; data: {metadata['data']}; precision: {metadata['precision']}"]
    sentences += metadata.get("remarks", [])
    if near := metadata.get("near_duplicates"):
        count = near["test_images"]
        share = 100 * count / metadata["test_images"]
        rest = "".join(f"; without them {name} {percent(value)} %" for name, value in near["without"].items())
        if count == metadata["test_images"]:
            rest = f"; no {part} image remains without them"
        sentences.append(
            f"{count:,} of the {part} images ({share:.1f} %) are near-duplicates of a training image{rest}"
        )
    for name, overlap in metadata.get("pretraining", {}).items():
        unknown = "unknown which images were in the pre-training, of which there is no record"
        sentences.append(f"{name}: {sentence(overlap, part) if overlap else unknown}")
    return sentences


def scores_table(result: Scores, feature_sets: Sequence[str]) -> list[list[str]]:
    """Return the results of a probe as headings and one row for each feature set.

    Args:
        result: Results of the probe.
        feature_sets: Names of the feature sets of the encoder, which come first.
    """
    names = sorted(
        result.values, key=lambda name: feature_sets.index(name) if name in feature_sets else len(feature_sets)
    )
    rows = ([name, *map(percent, result.values[name], result.deviations[name])] for name in names)
    return [["%", *result.columns], *rows]


def choice(result: Scores, feature_sets: Sequence[str]) -> str:
    """Return a sentence on how the feature set of the encoder was chosen among `feature_sets`."""
    if sum(name in feature_sets for name in result.values) == 1:
        return f"Features: {result.best}."
    return f"Features: {result.best}, chosen by {result.chosen_by}, without test labels."


def write(
    folder: Path,
    *,
    metadata: Mapping[str, Any],
    scores: Sequence[Scores],
    feature_sets: Sequence[str],
    figures: Mapping[str, Figure],
    tables: Sequence[Sequence[Sequence[str]]],
    standings: Sequence[Standing],
    conclusion: Sequence[str],
    commands: Sequence[str] = (),
) -> list[Path]:
    """Write report.html and report.json atomically and return their paths.

    Args:
        folder: Folder of the report.
        metadata: Metadata of the evaluation, see `metadata_of`.
        scores: Results of the probes.
        feature_sets: Names of the feature sets of the encoder.
        figures: Figures by name.
        tables: Tables of the results, see `comparison.accuracy_table` and `comparison.comparison_table`.
        standings: Comparison of the encoders.
        conclusion: Sentences of the conclusion.
        commands: Commands that use the chosen features.

    Raises:
        UserError: If the files cannot be written.
    """
    metadata = _plain(metadata)
    commands = [one_line(command) for command in commands]
    numbers = {
        "headline": " ".join(conclusion),
        "metadata": metadata,
        "own": feature_sets,
        "measured": [
            {"measure": result.probe} | {key: value for key, value in vars(result).items() if key not in _UNWRITTEN}
            for result in scores
        ],
        "standings": [asdict(standing) for standing in standings],
        "method": comparison.METHOD,
        "commands": commands,
    }
    # Each text is shown on a single line; the output of macros is Markup and not changed.
    environment = Environment(
        loader=PackageLoader("ssvit.evaluation.report"),
        autoescape=True,
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )
    html = environment.get_template("report.html.j2").render(
        numbers,
        data=data(metadata),
        conclusion=conclusion,
        tables=tables,
        figures=[_inlined(name, figure) for name, figure in figures.items()],
        scores=scores,
        choice=choice,
        scores_table=scores_table,
    )
    files = {"report.html": html, "report.json": json.dumps(_plain(numbers), indent=1) + "\n"}
    return atomic_io.write_files(folder, {name: text.encode() for name, text in files.items()})


def _plain(value: object) -> Any:
    """Convert to JSON types: tuples to lists, paths to strings, non-finite numbers to None."""
    return json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)


def _inlined(name: str, figure: Figure) -> dict[str, Any]:
    """Return a figure as base64 PNG with its size, caption and alternative text."""
    drawn = figure.draw()
    titles = [" ".join(axis.get_title(loc="left").split()) for axis in drawn.axes]
    width, height = (round(_DOTS_AN_INCH * side) for side in drawn.get_size_inches())
    return {
        "data": base64.b64encode(png(drawn)).decode(),
        "width": width,
        "height": height,
        "caption": _CAPTIONS[name],
        "alternative": "; ".join([_CAPTIONS[name], *filter(None, titles)]),
    }
