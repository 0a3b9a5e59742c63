"""A fine-tuned classifier on images of another kind: ssvit robustness checkpoint=PATH 'sets={a:PATH,c:PATH}'"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from annotated_types import MinLen
from pydantic import Field, model_validator

from ssvit import atomic_io
from ssvit.checkpoints.checkpoint import FINETUNE
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Count, Expect, Name, Whole
from ssvit.data.sources import robustness as layouts
from ssvit.loading.finding import find
from ssvit.loading.finding_options import Finetuned
from ssvit.options import OptionError, print_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ssvit.studies.robustness import Row

CLEAN = "clean"


class Robustness(Finetuned):
    """A fine-tuned classifier and the sets of images on which its accuracy is measured.

    The layout of a set follows from its names: class/image (ImageNet-A, -R, -Sketch, ObjectNet),
    corruption/severity/class/image (ImageNet-C), or cat7-elephant3.png (cue conflict: shape of a cat, texture of an
    elephant). Folders have the names of the classes.
    """

    sets: Annotated[Mapping[Name, Name], MinLen(1), Expect("names of sets and their folders, as '{clean:PATH,a:PATH}'")]
    """The folder of each set, by name. The set called clean holds usual test images, for comparison with the others."""
    mappings: Mapping[Name, Name] = Field(default_factory=dict)
    """For sets such as ObjectNet, by name: a JSON or CSV file of the classes that the images of each folder may be
    called."""
    batch_size: Count = 64
    """Images classified at a time."""
    workers: Whole = 0
    """Processes that decode image files; 0: the main process."""
    output: Name | None = None
    """The folder for robustness.md, robustness.json and robustness.png; null: robustness/ in the run's folder."""

    @model_validator(mode="after")
    def _check_mappings(self) -> Self:
        if not self.mappings.keys() <= self.sets.keys() - {CLEAN}:
            right = "must name files of sets other than clean, as {objectnet:FILE}"
            raise OptionError("mappings", dict(self.mappings), right)
        return self


def run(config: Config) -> Path:
    """Print the table; write it with the numbers and the figure into a folder. Returns the folder."""
    options: Robustness = config.options
    kinds, mappings = check(options)
    checkpoint = find(options.checkpoint, outputs=options.outputs, stage=FINETUNE, say=config.line.say)
    folder = Path(options.output or checkpoint.home(options.outputs) / "robustness")
    config.line.announce()

    from ssvit import inference
    from ssvit.figures.png import png
    from ssvit.studies import robustness

    model = inference.classifier(checkpoint)
    if model.is_multi_label:
        raise OptionError("checkpoint", checkpoint.path, "must be a classifier whose images have one class each")
    loading = {"batch_size": options.batch_size, "workers": options.workers}
    measure = robustness.Robustness(model.module, model.transform, model.pixels, **loading)
    first = sorted(kinds, key=lambda name: name != CLEAN)
    rows = [measure(name, options.sets[name], kinds[name], mappings.get(name)) for name in first]
    text = robustness.table(rows)
    found = {"checkpoint": str(checkpoint.path), "classes": len(model.classes), "sets": robustness.facts(rows)}
    folder.mkdir(parents=True, exist_ok=True)
    atomic_io.replace(folder / "robustness.md", text.encode())
    atomic_io.replace(folder / "robustness.json", (json.dumps(found, indent=1) + "\n").encode())
    atomic_io.replace(folder / "robustness.png", png(figure(rows)))
    files = f"{folder}: robustness.md, robustness.json, robustness.png"
    print_lines(f"{checkpoint.path}:", *text.split("\n"), files)
    return folder


def check(options: Robustness) -> tuple[dict[str, str], dict[str, dict[str, list[str]]]]:
    """Read the layout of each set, and the mappings. OptionError if a folder or a file has none."""
    kinds = {name: layouts.layout(f"sets.{name}", root) for name, root in options.sets.items()}
    if kinds.get(CLEAN, layouts.CLASSES) != layouts.CLASSES:
        raise OptionError("sets.clean", options.sets[CLEAN], "must hold a folder for each class")
    return kinds, {name: layouts.read_mapping(f"mappings.{name}", path) for name, path in options.mappings.items()}


def figure(rows: "list[Row]") -> "Figure":
    """The picture of all sets."""
    from ssvit.figures.robustness import Bar, robustness

    bars = [Bar(row.name, row.accuracy, row.clean, row.chance) for row in rows]
    errors: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        for cell in row.cells:
            errors.setdefault(row.name, {}).setdefault(cell.corruption, {})[cell.severity] = cell.error.value
    shapes = {row.name: {"all": row.shape_bias, **row.by_shape} for row in rows if row.shape_bias}
    return robustness(bars, errors, shapes)


command = Command(
    "robustness",
    run,
    options=Robustness,
)
