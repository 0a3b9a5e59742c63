"""A fine-tuned classifier on images of another kind: ssvit robustness checkpoint=PATH 'sets={a:PATH,c:PATH}'"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ssvit import atomic_io
from ssvit.checkpoints.checkpoint import FINETUNE
from ssvit.checkpoints.finding import find
from ssvit.cli.launch import Tool
from ssvit.config.command_line import Plain
from ssvit.config.composed import Config
from ssvit.data import robustness as layouts
from ssvit.options import OptionError, print_lines, whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ssvit.evaluation.robustness import Row

CLEAN = "clean"


def run(config: Config) -> Path:
    """Print the table; write it with the numbers and the figure into a folder. Returns the folder."""
    plain = config.values
    kinds, mappings = check(plain)
    checkpoint = find(plain["checkpoint"], outputs=plain["outputs"], stage=FINETUNE, say=config.line.say)
    folder = Path(plain["output"] or checkpoint.home(plain["outputs"]) / "robustness")
    config.line.announce()

    from ssvit import inference
    from ssvit.evaluation import robustness
    from ssvit.figures.png import png

    model = inference.classifier(checkpoint)
    if model.is_multi_label:
        raise OptionError("checkpoint", checkpoint.path, "must be a classifier whose images have one class each")
    loading = {"batch_size": plain["batch_size"], "workers": plain["workers"]}
    measure = robustness.Robustness(model.module, model.transform, model.pixels, **loading)
    first = sorted(kinds, key=lambda name: name != CLEAN)
    rows = [measure(name, str(plain["sets"][name]), kinds[name], mappings.get(name)) for name in first]
    text = robustness.table(rows)
    found = {"checkpoint": str(checkpoint.path), "classes": len(model.classes), "sets": robustness.facts(rows)}
    folder.mkdir(parents=True, exist_ok=True)
    atomic_io.replace(folder / "robustness.md", text.encode())
    atomic_io.replace(folder / "robustness.json", (json.dumps(found, indent=1) + "\n").encode())
    atomic_io.replace(folder / "robustness.png", png(figure(rows)))
    files = f"{folder}: robustness.md, robustness.json, robustness.png"
    print_lines(f"{checkpoint.path}:", *text.split("\n"), files)
    return folder


def check(plain: Plain) -> tuple[dict[str, str], dict[str, dict[str, list[str]]]]:
    """The layout of each set, and the mappings. OptionError for a wrong configuration."""
    whole("batch_size", plain["batch_size"])
    whole("workers", plain["workers"], at_least=0)
    sets, mappings = plain["sets"], plain["mappings"] or {}
    if not isinstance(sets, dict) or not sets:
        raise OptionError("sets", sets, "must name sets and their folders, as 'sets={clean:PATH,a:PATH}'")
    if not isinstance(mappings, dict) or not mappings.keys() <= sets.keys() - {CLEAN}:
        raise OptionError("mappings", mappings, "must name files of sets other than clean, as {objectnet:FILE}")
    kinds = {str(name): layouts.layout(f"sets.{name}", root) for name, root in sets.items()}
    if kinds.get(CLEAN, layouts.CLASSES) != layouts.CLASSES:
        raise OptionError("sets.clean", sets[CLEAN], "must hold a folder for each class")
    return kinds, {str(name): layouts.read_mapping(f"mappings.{name}", path) for name, path in mappings.items()}


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


tool = Tool("robustness", "test a classifier on robustness sets, and whether it goes by shape or texture", run)
