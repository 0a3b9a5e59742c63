"""How accuracy grows with images, model and steps: ssvit scaling images=[2500,10000] width=[64,128] objectives=[mae]

A grid of runs by the other commands: each is pre-trained, evaluated and fine-tuned, and is one row, a separate file.
The table and the figure (the paper's Figures 3, 4, 5 and 8 in their own terms) are made from all existing rows.
"""

import itertools
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ssvit import atomic_io
from ssvit.cli import trials
from ssvit.cli.compare import stages
from ssvit.cli.launch import Plain, Tool
from ssvit.cli.trials import Trials, schedule
from ssvit.evaluation import methods, scaling
from ssvit.options import OptionError, whole
from ssvit.training import preflight

_HEAD = 64  # numbers of a token for each head of attention, as in the paper's models
_GRID = ("images", "depth", "width", "patch", "steps")
# Of the study itself; every other option goes to pre-training.
_OWN = (
    "objectives", *_GRID, "seeds", "seed", "threads", "name", "table", "outputs", "pretrain", "evaluate", "finetune",
)  # fmt: skip


def run(config: DictConfig, plain: Plain) -> Path:
    """Make the rows that are not there yet, then the table and the figure. Returns their folder."""
    grid = check(plain)
    study = Study(plain, _OWN, {})
    for seed, objective, point in itertools.product(
        range(plain["seed"], plain["seed"] + plain["seeds"]), plain["objectives"], grid
    ):
        study.row(objective, point, seed)
    rows = methods.read(study.table)
    text, found = scaling.table(rows), scaling.points(rows)
    atomic_io.replace(study.table / "table.md", text.encode())

    from ssvit.figures.scaling import scaling as figure
    from ssvit.figures.style import png

    picture = study.table / "scaling.png"
    atomic_io.replace(picture, png(figure(found, scaling.curves(found, "images"), scaling.curves(found, "flops"))))
    print(f"\n{text}\n{study.table / 'table.md'}, {picture}")
    return study.table


def check(plain: Plain) -> list[dict[str, Any]]:
    """The points of the grid, by the names of their axes. OptionError or UserError for a wrong configuration."""
    for name in ("objectives", *_GRID):
        values = plain[name]
        if not isinstance(values, list) or not values or len({str(value) for value in values}) < len(values):
            raise OptionError(name, values, "must be a list of one or more different values")
    for name in plain["objectives"]:
        if len(stages(name)) > 1:
            raise OptionError("objectives", name, "has two stages, and a point of the grid has one run")
    for name in _GRID:
        for value in plain[name]:
            if not (name == "images" and value is None):
                whole(name, value)
    trials.check(plain)
    points = [dict(zip(_GRID, values, strict=True)) for values in itertools.product(*(plain[name] for name in _GRID))]
    for point in points:
        own = {"depth": point["depth"], "width": point["width"], "patch_size": point["patch"]}
        changed = plain["encoder"] | own | {"heads": heads(point["width"]), "mlp_width": None}
        preflight.encoder(preflight.parts({**plain, "encoder": changed}))
    return points


def heads(width: int) -> int:
    """The heads of an encoder of this width."""
    return max(1, width // _HEAD)


class Study(Trials):
    """The commands of a study."""

    def row(self, objective: str, point: dict[str, Any], seed: int) -> None:
        """Pre-train, evaluate and fine-tune, unless the row is there."""
        size = "d{depth}_w{width}_p{patch}".format(**point)
        name = f"{objective}_{point['images'] or 'all'}_{size}_s{point['steps']}_seed{seed}"
        if (self.table / f"{name}.json").is_file():
            return
        print(f"\n{name}", flush=True)
        (stage,) = stages(objective)
        model = [
            f"encoder.depth={point['depth']}", f"encoder.width={point['width']}", "encoder.mlp_width=null",
            f"encoder.heads={heads(point['width'])}", f"encoder.patch_size={point['patch']}",
        ]  # fmt: skip
        options = [*stage.options, *self.pretraining, *model]
        cost = self.cost(f"{objective}_{size}", options)
        subset = f"subset.images={'null' if point['images'] is None else point['images']}"
        self.call("pretrain", [*schedule(point["steps"], seed), *options, subset, f"name={name}"])
        report = self.evaluated(str(self.folder / name), name, baselines=False)
        found = {"probes": methods.probes(report), **self.finetuned(str(self.folder / name), name, seed)}
        self.write(name, {"objective": objective, "seed": seed, **point, "cost": cost, **found})


tool = Tool(
    "scaling",
    "train a grid of runs and draw accuracy against images, model size and compute",
    run,
    common=("objectives", *_GRID, "seeds", "name", "table", "data.root", "pretrain", "evaluate", "finetune"),
)
