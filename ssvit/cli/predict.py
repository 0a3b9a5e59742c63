"""Predict the classes of images, or with a segmentation model of their pixels.

Usage: ssvit predict checkpoint=PATH IMAGES…. With labelled=FOLDER, the classifier is measured on labelled images.
"""

import csv
import io
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ssvit.checkpoints.checkpoint import FINETUNE, Checkpoint
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Count, Fraction, Name
from ssvit.data.sources import folder
from ssvit.devices import Inference
from ssvit.engine.atomic_io import replace, write_files
from ssvit.errors import OptionError, UserError, file_to_write, folder_to_write, print_lines
from ssvit.loading.finding import find_checkpoint
from ssvit.loading.options import Finetuned, eval_transform

if TYPE_CHECKING:
    from ssvit.inference import Classifier

_COLUMNS = ("path", "label", "split", "probability")  # of its tables
_ANSWERS = ('[\n {\n  "image": ', "[]\n")  # prefixes of its JSON files


class Predict(Finetuned, Inference):
    """Images and their predicted classes."""

    images: Sequence[Name] = ()
    """Images: files, or folders of files."""
    top: Count = 3
    """Number of classes to print for each image, if an image has one class."""
    threshold: Fraction = 0.5
    """Minimum probability of the printed classes, for multi-label classification."""
    output: Name | None = None
    """JSON file for the predictions; NAME.csv: a table of pseudo-labels, for data=csv data.table=NAME.csv; None: no
    file. With a segmentation model, a folder for label maps (masks/, PNG files of class numbers with a palette), and
    for pictures half covered by them (overlays/)."""
    confidence: Fraction = 0.0
    """Minimum probability of a pseudo-label."""
    per_class: Count | None = None
    """Maximum number of pseudo-labels per class, in order of probability; None: all."""
    labelled: Name | None = None
    """Folder with a subfolder of images for each class, on which the classifier is measured; `output` is then a folder
    for metrics and figures, and images are those of none of the classes."""
    class_names: Name | None = None
    """JSON file {class of the classifier: subfolder of `labelled`}, for names that differ; several classes may be one
    subfolder."""

    @property
    def as_table(self) -> bool:
        """Return whether the output is a table of pseudo-labels."""
        return self.output is not None and self.output.endswith(".csv")

    def check_consistency(self) -> None:
        """Check that there are images, and as far as possible the file or folder to write."""
        self.check_output(is_folder=self.labelled is not None or os.path.isdir(self.output or ""))
        if not self.images and self.labelled is None:
            raise OptionError("images", "", "must be pictures, or folders of pictures, after the options")

    def check_output(self, *, is_folder: bool) -> None:
        """Check that the output can be written, as a folder or as a file; raise OptionError otherwise."""
        if self.output is not None and is_folder:
            folder_to_write("output", self.output)
        elif self.output is not None:
            file_to_write("output", self.output, begins=[",".join(_COLUMNS)] if self.as_table else _ANSWERS)


class PseudoLabel(NamedTuple):
    """The most probable class of an image and its probability."""

    path: str
    label: str
    probability: float


def select(labels: Iterable[PseudoLabel], *, confidence: float, per_class: int | None) -> list[PseudoLabel]:
    """Select pseudo-labels by probability, keeping their order.

    Args:
        labels: The pseudo-labels.
        confidence: Minimum probability.
        per_class: Maximum number per class, the most probable ones; None for no limit.
    """
    confident = [pseudo_label for pseudo_label in labels if pseudo_label.probability >= confidence]
    by_class = defaultdict(list)
    for position, pseudo_label in enumerate(confident):
        by_class[pseudo_label.label].append((-pseudo_label.probability, position))
    kept = {position for members in by_class.values() for _, position in sorted(members)[:per_class]}
    return [pseudo_label for position, pseudo_label in enumerate(confident) if position in kept]


def csv_of_labels(labels: Iterable[PseudoLabel]) -> bytes:
    """Return the pseudo-labels as a table of training images (CSV, UTF-8), with absolute paths.

    Raises:
        UserError: A file name is not UTF-8.
    """
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(_COLUMNS)
    for path, label, probability in labels:
        rows.writerow((os.path.abspath(path), label, "train", f"{probability:.4f}"))
    try:
        return text.getvalue().encode()
    except UnicodeEncodeError as error:
        name = error.object[: error.end].rpartition("\n")[2]
        raise UserError(f"{name}: is not UTF-8, as names in a table must be; output=NAME.json supports any") from None


def run(config: Config) -> None:
    """Print the most probable classes of each image, or for multi-label classification those above the threshold.

    Images that cannot be read are reported, and the exit status is then 1.
    """
    options: Predict = config.options
    paths = folder.paths(options.images)
    labelled = [] if options.labelled is None else folder.pictures(options.labelled)
    checkpoint = find_checkpoint(
        options.checkpoint, outputs=options.outputs, stage=FINETUNE, say=config.line.say, precision=options.precision
    )
    if checkpoint.has_segmenter and options.labelled is not None:
        raise OptionError("labelled", options.labelled, "must be null for a segmentation model")
    options.check_output(is_folder=checkpoint.has_segmenter or options.labelled is not None)
    config.line.announce()
    if checkpoint.has_segmenter:
        _segment(checkpoint, options, paths)
        return

    from ssvit.inference import Classifier

    classifier = Classifier(checkpoint, precision=options.precision)
    names = classifier.classes
    print_lines(eval_transform(checkpoint).note)
    print_lines(f"{checkpoint.path}: {len(names)} classes; precision: {checkpoint.precision or classifier.precision}")
    if options.labelled is not None and classifier.is_multi_label:
        raise OptionError("labelled", options.labelled, "must be null for a multi-label classifier")
    if options.labelled is not None:
        _measure(classifier, options, [*labelled, *((path, None) for path in paths)])
        return
    if options.as_table and classifier.is_multi_label:
        raise OptionError("output", options.output, "must be a JSON file, since a table has one class for each image")
    answers, labels, unreadable = [], [], 0
    for path, answer in classifier.name_files(paths):
        if isinstance(answer, UserError):
            unreadable += 1
            print_lines(answer)
            continue
        best = answer.topk(len(answer) if classifier.is_multi_label else min(options.top, len(answer)))
        named = [(names[i], p) for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
        labels.append(PseudoLabel(path, *named[0]))
        classes: list[dict[str, object]] = [{"class": name, "probability": p} for name, p in named]
        if classifier.is_multi_label:
            for entry, (_, p) in zip(classes, named, strict=True):
                entry["present"] = p >= options.threshold
            named = [(name, p) for name, p in named if p >= options.threshold]
        answers.append({"image": path, "classes": classes})
        print_lines(f"{path}: {', '.join(f'{name} {100 * p:.1f} %' for name, p in named) or 'none of the classes'}")
    if options.output is not None and options.as_table:
        kept = select(labels, confidence=options.confidence, per_class=options.per_class)
        replace(Path(options.output), csv_of_labels(kept))
        print_lines(f"{options.output}: {len(kept)} of {len(labels)} pictures have a pseudo-label")
    elif options.output is not None:
        replace(Path(options.output), (json.dumps(answers, indent=1) + "\n").encode())
    if unreadable:
        raise UserError(f"{unreadable} of {len(paths)} pictures could not be read")


def _segment(checkpoint: Checkpoint, options: Predict, paths: Sequence[str]) -> None:
    """Print the shares of the classes in each image; write label maps, overlays and the numbers of the classes."""
    root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    names = [os.path.splitext(os.path.relpath(os.path.abspath(path), root))[0] for path in paths]
    if options.output is not None and (twice := [name for name, count in Counter(names).items() if count > 1]):
        raise OptionError("images", twice[0], "must have different names without their suffixes, for the label maps")

    from ssvit.figures.label_maps import overlay_png, palette_png
    from ssvit.inference import Segmenter

    segmenter = Segmenter(checkpoint, precision=options.precision)
    print_lines(f"{checkpoint.path}: {len(segmenter.classes)} classes; precision: {segmenter.precision}")
    unreadable, home = 0, None if options.output is None else Path(options.output)
    if home is not None:
        numbers = {name: number for number, name in enumerate(segmenter.classes)}
        write_files(home, {"classes.json": json.dumps(numbers).encode()})
    for name, (path, answer) in zip(names, segmenter.label_files(paths), strict=True):
        if isinstance(answer, UserError):
            unreadable += 1
            print_lines(answer)
            continue
        image, labels = answer
        shares = (labels.flatten().bincount(minlength=len(segmenter.classes)) / labels.numel()).tolist()
        present = sorted(zip(shares, segmenter.classes, strict=True), reverse=True)
        print_lines(f"{path}: {', '.join(f'{name} {100 * share:.1f} %' for share, name in present if share)}")
        if home is not None:
            files = {"masks": palette_png(labels), "overlays": overlay_png(image, labels, segmenter.display)}
            for part, content in files.items():
                file = home / part / f"{name}.png"
                write_files(file.parent, {file.name: content})
    if unreadable:
        raise UserError(f"{unreadable} of {len(paths)} pictures could not be read")


def _measure(classifier: "Classifier", options: Predict, images: Sequence[tuple[str, str | None]]) -> None:
    """Print and write the metrics of the classifier on labelled images."""
    from ssvit.evaluation.evaluators.other_images import measure

    names: dict[str, str] = {}
    if options.class_names is not None:
        with suppress(OSError, ValueError):
            names = json.loads(Path(options.class_names).read_bytes())
        is_names = isinstance(names, dict) and all(isinstance(name, str) for name in names.values())
        if not names or not is_names or not names.keys() <= {*classifier.classes}:
            expected = "must be a JSON file {class of the classifier: subfolder}"
            raise OptionError("class_names", options.class_names, expected)
    result, unreadable = measure(classifier, images, names)
    print_lines(*result.lines)
    if options.output is not None:
        files = {f"{name}.png": figure.png() for name, figure in result.figures.items()}
        files |= {name: text.encode() for name, text in result.tables.items()}
        files["metrics.json"] = json.dumps(result.metrics, indent=1).encode()
        write_files(Path(options.output), files)
    if unreadable:
        raise UserError(f"{unreadable} of {len(images)} pictures could not be read")


command = Command("predict", run, positional="images", options=Predict)
