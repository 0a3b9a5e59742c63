"""Keep what was measured on a set of images, and name the best result of all commands.

A set is identified by the contents and the classes of its images, wherever their files are. `FOLDER` in the folder of
all runs has a JSON file for each set, with one row for each encoder and method.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ssvit.data.sources.base import Source, class_text, is_multi_label
from ssvit.engine import atomic_io
from ssvit.evaluation.precision import chance_of
from ssvit.evaluation.statistics import Interval, error_of_difference, verdict

FOLDER = "measured"  # in the folder of all runs
TUNED, SCRATCH = "fine-tuned", "trained from scratch"  # methods of classifiers; the others are probes of features
_KEY = ("encoder", "method", "path", "of", "train_images")  # a row replaces the former one with the same values
_OTHERS = 4  # results that are named next to the best one
Accuracies = Mapping[str, Mapping[str, tuple[float, float | None]]]
"""Accuracy, or mAP of multi-label images, in [0, 1] by encoder and method, and balanced accuracy, or None."""


def keep(
    outputs: str | Path,
    images: Source,
    part: str,
    measured: Accuracies,
    *,
    train_images: int,
    paths: Mapping[str, str],
    baselines_of: str = "",
) -> tuple[str, str]:
    """Store results on labelled images, and return a sentence on all results of this set.

    A result replaces the former one of the same encoder, method, path and number of training images; that of a
    baseline, the former one for the same checkpoint.

    Args:
        outputs: Folder of all runs.
        images: The images on which the results were measured.
        part: Their name, "test" or "validation".
        measured: The results.
        train_images: Number of labelled training images.
        paths: Path of the checkpoint by encoder; baselines have none.
        baselines_of: Path of the checkpoint with whose architecture and image size the baselines were measured.

    Returns:
        The sentence, and the path of the checkpoint of the best frozen features; "" for a baseline.

    Raises:
        UserError: The file cannot be written.
    """
    assert images.labels is not None
    described = (f"{images.content(row)} {class_text(of, images.classes)}" for row, of in enumerate(images.labels))
    fingerprints = sorted(map(_digest, described))
    path = Path(outputs, FOLDER, f"{len(fingerprints)}_images_{_digest(' '.join(fingerprints))}.json")
    added = [
        {"encoder": encoder, "method": method, "accuracy": value, "balanced": balanced, "train_images": train_images,
         "path": paths.get(encoder, ""), "of": "" if encoder in paths else baselines_of}
        for encoder, by_method in measured.items() for method, (value, balanced) in by_method.items()
    ]  # fmt: skip
    several, chance = is_multi_label(images.labels), chance_of(images.labels, len(images.classes))
    measure = "mAP" if several else "accuracy"
    values = {"images": f"{len(fingerprints)} {part} images", "measure": measure, "chance": chance}
    end = f'], "fingerprints": "{" ".join(fingerprints)}"}}\n'
    with atomic_io.exclusive(path.parent):
        rows = {tuple(row[name] for name in _KEY): row for row in [*_read(path)[0], *added]}
        results = sorted(rows.values(), key=lambda row: -row["accuracy"])
        head, *lines = map(json.dumps, (values, *results))
        text = "\n".join([f'{head[:-1]}, "results": [', ",\n".join(lines), end])
        atomic_io.write_files(path.parent, {path.name: text.encode()})
    best: dict[str, dict[str, Any]] = {}
    for row in results:
        best.setdefault(row["path"] or row["encoder"], row)  # commands may name a checkpoint differently
    first, *others = best.values()
    compared = ""
    if others:
        both = first["accuracy"], others[0]["accuracy"]
        error = 0.0 if several else error_of_difference(*((value, len(fingerprints)) for value in both))
        compared = f", {verdict(Interval.around(both[0] - both[1], error), tested=not several)} the next"
    is_mixed = len({row["train_images"] for row in results}) > 1
    rest = [
        f"{row['encoder']} {100 * row['accuracy']:.1f}, {row['method']}{_trained_on(row, is_mixed)}"
        for row in others[:_OTHERS]
    ]
    unit = "mAP " * (several and measure not in first["method"])  # names of probes contain it
    of_images = f"{unit}of {len(fingerprints):,} {part} images{compared}"
    listed = "; ".join([*rest, f"chance {100 * chance:.1f}"])
    start = next((row["path"] for row in results if row["method"] not in (TUNED, SCRATCH)), "")
    best_one = f"{_text(first)}{_trained_on(first, is_mixed)}{',' * is_mixed}"
    return f"best so far: {best_one} {of_images} ({listed}){_overlap(path, fingerprints)}", start


def _overlap(path: Path, fingerprints: list[str]) -> str:
    """Return the best result on another set, the one with the most common images; "" if none has common images."""
    counts, found = Counter(fingerprints), []
    for other in {*path.parent.glob("*.json")} - {path}:
        results, of_other = _read(other)
        found.append(((counts & Counter(of_other)).total(), str(other), len(of_other), results))
    shared, name, images, results = max(found, key=lambda entry: entry[:2], default=(0, "", 0, []))
    return f"; another set of {images:,} images has {shared:,} of these: {_text(results[0])} ({name})" if shared else ""


def _text(row: Mapping[str, Any]) -> str:
    return f"{row['encoder']}, {row['method']}, {100 * row['accuracy']:.1f} %"


def _trained_on(row: Mapping[str, Any], is_mixed: bool) -> str:
    """Return the number of training images if results of several numbers are compared, else ""."""
    return f", {row['train_images']:,} training images" if is_mixed else ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _read(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the results and the fingerprints of a file; none if it is missing or damaged."""
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        stored, _ = atomic_io.read_json(path)
        rows = [row for row in stored["results"] if _text(row) and all(row[name] is not None for name in _KEY)]
        return rows, stored["fingerprints"].split() if rows else []
    return [], []
