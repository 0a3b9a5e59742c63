"""Keep what was measured on a set of images, and name the best result of all commands.

A set is identified by the contents and the classes of its images, wherever their files are. `FOLDER` in the folder of
all runs has a JSON file for each set, with one row for each encoder and method.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ssvit.data.sources.base import Source, class_text, is_multi_label
from ssvit.engine import atomic_io
from ssvit.errors import UserError
from ssvit.evaluation.precision import chance_of
from ssvit.evaluation.statistics import Interval, error_of_difference, verdict

FOLDER = "measured"  # in the folder of all runs
_OTHERS = 4  # results that are named next to the best one


@dataclass(frozen=True)
class Result:
    """Describe a result on a set of images.

    Attributes:
        encoder: Name of the encoder, or of a baseline.
        method: Title of the probe, or "fine-tuned".
        accuracy: Accuracy, or mAP of multi-label images, in [0, 1].
        balanced: Balanced accuracy; None if unknown.
        train_images: Number of labelled training images.
        path: Path of the checkpoint; "" for a baseline.
    """

    encoder: str
    method: str
    accuracy: float
    balanced: float | None
    train_images: int
    path: str


class Measured:
    """The results on a set of labelled images.

    Args:
        outputs: Folder of all runs.
        images: The images on which results are measured.
        part: Their name, "test" or "validation".
    """

    def __init__(self, outputs: str | Path, images: Source, part: str) -> None:
        assert images.labels is not None
        self.part, self.is_multi_label, self.chance = part, is_multi_label(images.labels), chance_of(images.labels)
        described = (f"{images.content(row)} {class_text(of, images.classes)}" for row, of in enumerate(images.labels))
        self.fingerprints = sorted(map(_digest, described))
        digest = _digest(" ".join(self.fingerprints))
        self.path = Path(outputs, FOLDER, f"{len(self.fingerprints)}_images_{digest}.json")
        self.results: list[Result] = [] if (stored := _read(self.path)) is None else stored[0]

    def add(self, results: Sequence[Result]) -> None:
        """Store results; they replace those of the same encoder, method and path.

        Raises:
            UserError: The file cannot be written.
        """
        rows = {(row.encoder, row.method, row.path): row for row in [*self.results, *results]}
        self.results = sorted(rows.values(), key=lambda row: -row.accuracy)
        measure = "mAP" if self.is_multi_label else "accuracy"
        values = {"images": f"{len(self.fingerprints)} {self.part} images", "measure": measure, "chance": self.chance}
        head, *listed = map(json.dumps, (values, *map(asdict, self.results)))
        lines = [
            f'{head[:-1]}, "results": [',
            ",\n".join(listed),
            f'], "fingerprints": "{" ".join(self.fingerprints)}"}}',
        ]
        text = "\n".join([*lines, ""])
        atomic_io.write_files(self.path.parent, {self.path.name: text.encode()})

    def sentence(self) -> str:
        """Return the best result of each encoder, whether the first is better than the second, and similar sets."""
        best = [*{row.encoder: row for row in self.results[::-1]}.values()]  # results are in descending order
        first, *others = sorted(best, key=lambda row: -row.accuracy)
        images, compared = len(self.fingerprints), ""
        if others:
            scores = [(row.accuracy, images) for row in (first, others[0])]
            error = 0.0 if self.is_multi_label else error_of_difference(*scores)
            difference = Interval.around(first.accuracy - others[0].accuracy, error)
            compared = f", {verdict(difference, tested=not self.is_multi_label)} the next"
        unit = "% mAP" if self.is_multi_label else "%"
        value = f"{100 * first.accuracy:.1f} {unit} of {images:,} {self.part} images"
        rest = [f"{row.encoder} {100 * row.accuracy:.1f}, {row.method}" for row in others[:_OTHERS]]
        listed = "; ".join([*rest, f"chance {100 * self.chance:.1f}"])
        return f"best so far: {first.encoder}, {first.method}, {value}{compared} ({listed}){self._overlap()}"

    def _overlap(self) -> str:
        """Return the best result on the set that shares most images with this one, or ""."""
        counts, found = Counter(self.fingerprints), []
        for path in self.path.parent.glob("*.json"):
            if path != self.path and (stored := _read(path)) is not None and stored[0]:
                found.append(((counts & Counter(stored[1])).total(), stored, path))
        shared, (results, fingerprints), path = max(found, key=lambda entry: entry[0], default=(0, ([], []), self.path))
        if not shared:
            return ""
        row = results[0]
        best = f"{row.encoder}, {row.method}, {100 * row.accuracy:.1f} %"
        return f"; another set of {len(fingerprints):,} images has {shared:,} of these: {best} ({path})"


def keep(outputs: str | Path, images: Source, part: str, results: Sequence[Result]) -> str:
    """Store results on labelled images, and return the sentence on all results; see `Measured`."""
    measured = Measured(outputs, images, part)
    measured.add(results)
    return measured.sentence()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _read(path: Path) -> tuple[list[Result], list[str]] | None:
    """Return the results and the fingerprints of a file; None if it is missing or damaged."""
    with suppress(UserError, OSError, ValueError, TypeError, LookupError, AttributeError):
        stored, _ = atomic_io.read_json(path)
        return [Result(**row) for row in stored["results"]], stored["fingerprints"].split()
    return None
