"""Predict the classes of images.

Usage: ssvit predict checkpoint=PATH IMAGES….
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import model_validator

from ssvit.atomic_io import replace
from ssvit.checkpoints.checkpoint import FINETUNE
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Count, Fraction, Name
from ssvit.data.sources import folder, pseudo_labels
from ssvit.data.sources.pseudo_labels import PseudoLabel
from ssvit.loading.finding import find
from ssvit.loading.finding_options import Finetuned
from ssvit.options import OptionError, UserError, file_to_write, print_lines

_ANSWERS = ('[\n {\n  "image": ', "[]\n")  # prefixes of its JSON files


class Predict(Finetuned):
    """Images and their predicted classes."""

    images: Sequence[Name] = ()
    """Images: files, or folders of files."""
    top: Count = 3
    """Number of classes to print for each image, if an image has one class."""
    threshold: Fraction = 0.5
    """Minimum probability of the printed classes, for multi-label classification."""
    output: Name | None = None
    """JSON file for the predictions; NAME.csv: a table of pseudo-labels, for data=csv data.table=NAME.csv; None: no
    file."""
    confidence: Fraction = 0.0
    """Minimum probability of a pseudo-label."""
    per_class: Count | None = None
    """Maximum number of pseudo-labels per class, in order of probability; None: all."""
    labelled: Name | None = None
    """Table of labelled images, whose rows precede the pseudo-labels in the output; None: no such rows."""

    @property
    def as_table(self) -> bool:
        """Return whether the output is a table of pseudo-labels."""
        return self.output is not None and self.output.endswith(".csv")

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if self.labelled is not None:
            pseudo_labels.check(self.labelled)
            if not self.as_table:
                raise OptionError("labelled", self.labelled, "requires a table as the output: output=NAME.csv")
        if self.output is not None:
            file_to_write("output", self.output, begins=[pseudo_labels.HEADING] if self.as_table else _ANSWERS)
        if not self.images:
            raise OptionError("images", "", "must be pictures, or folders of pictures, after the options")
        return self


def run(config: Config) -> None:
    """Print the most probable classes of each image, or for multi-label classification those above the threshold.

    Images that cannot be read are reported, and the exit status is then 1.
    """
    options: Predict = config.options
    paths = [path for image in options.images for path in folder.pictures(image)]
    checkpoint = find(options.checkpoint, outputs=options.outputs, stage=FINETUNE, say=config.line.say)
    config.line.announce()

    from ssvit import inference

    classifier = inference.classifier(checkpoint)
    names = classifier.classes
    print_lines(f"{checkpoint.path}: {len(names)} classes")
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
        several, least = classifier.is_multi_label, options.threshold
        answers.append(
            {
                "image": path,
                "classes": [
                    {"class": name, "probability": p, **({"present": p >= least} if several else {})}
                    for name, p in named
                ],
            }
        )
        if several:
            named = [(name, p) for name, p in named if p >= least]
        print_lines(f"{path}: {', '.join(f'{name} {100 * p:.1f} %' for name, p in named) or 'none of the classes'}")
    if options.output is not None and options.as_table:
        kept = pseudo_labels.select(labels, confidence=options.confidence, per_class=options.per_class)
        replace(Path(options.output), pseudo_labels.table_of(kept, options.labelled))
        print_lines(f"{options.output}: {len(kept)} of {len(labels)} pictures have a pseudo-label")
    elif options.output is not None:
        replace(Path(options.output), (json.dumps(answers, indent=1) + "\n").encode())
    if unreadable:
        raise UserError(f"{unreadable} of {len(paths)} pictures could not be read")


command = Command("predict", run, positional="images", options=Predict)
