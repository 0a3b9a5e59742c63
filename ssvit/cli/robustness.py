"""Evaluate a fine-tuned classifier under distribution shift.

Usage: ssvit robustness checkpoint=PATH 'sets={a:PATH,c:PATH}'.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from annotated_types import MinLen
from pydantic import Field, model_validator

from ssvit import atomic_io
from ssvit.checkpoints.checkpoint import FINETUNE
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Count, Expect, Name, Whole
from ssvit.data.sources import robustness
from ssvit.loading.finding import find
from ssvit.loading.finding_options import Finetuned
from ssvit.options import OptionError, print_lines


class Robustness(Finetuned):
    """A fine-tuned classifier and the sets of images on which its accuracy is measured.

    The layout of a set follows from its names: class/image (ImageNet-A, -R, -Sketch, ObjectNet),
    corruption/severity/class/image (ImageNet-C), or cat7-elephant3.png (cue conflict: shape of a cat, texture of an
    elephant). Folders have the names of the classes.
    """

    sets: Annotated[Mapping[Name, Name], MinLen(1), Expect("names of sets and their folders, as '{a:PATH,c:PATH}'")]
    """Folder of each set by name."""
    mappings: Mapping[Name, Name] = Field(default_factory=dict)
    """For sets such as ObjectNet, by name: a JSON or CSV file of the classes that match the images of each folder."""
    batch_size: Count = 64
    """Images in a batch."""
    workers: Whole = 0
    """Processes that decode image files; 0: only the main process."""
    output: Name | None = None
    """Folder for robustness.md and robustness.json; None: robustness/ in the run's folder."""

    @model_validator(mode="after")
    def _check_mappings(self) -> Self:
        if not self.mappings.keys() <= self.sets.keys():
            right = "must name files of sets, as {objectnet:FILE}"
            raise OptionError("mappings", dict(self.mappings), right)
        return self


def run(config: Config) -> Path:
    """Print the table, and write it and the numbers to a folder, which is returned."""
    options: Robustness = config.options
    layouts = {name: robustness.layout(f"sets.{name}", root) for name, root in options.sets.items()}
    mappings = {name: robustness.read_mapping(f"mappings.{name}", path) for name, path in options.mappings.items()}
    checkpoint = find(options.checkpoint, outputs=options.outputs, stage=FINETUNE, say=config.line.say)
    folder = Path(options.output or checkpoint.home(options.outputs) / "robustness")
    config.line.announce()

    from ssvit import inference
    from ssvit.studies.robustness import RobustnessEvaluation, table

    model = inference.classifier(checkpoint)
    if model.is_multi_label:
        raise OptionError("checkpoint", checkpoint.path, "must be a classifier whose images have one class each")
    loading = {"batch_size": options.batch_size, "workers": options.workers}
    measure = RobustnessEvaluation(model.module, model.transform, model.pixels, **loading)
    results = [measure(name, root, layouts[name], mappings.get(name)) for name, root in options.sets.items()]
    text = table(results)
    numbers = {
        "checkpoint": str(checkpoint.path),
        "classes": len(model.classes),
        "sets": [vars(one) for one in results],
    }
    data = (json.dumps(numbers, indent=1) + "\n").encode()
    atomic_io.write_files(folder, {"robustness.md": text.encode(), "robustness.json": data})
    print_lines(f"{checkpoint.path}:", *text.split("\n"), f"{folder}: robustness.md, robustness.json")
    return folder


command = Command("robustness", run, options=Robustness)
