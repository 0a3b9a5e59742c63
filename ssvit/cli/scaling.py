"""Measure accuracy as a function of images, model size and steps.

Usage: ssvit scaling images=[2500,10000] width=[64,128] objectives=[mae]. Other commands pre-train, evaluate and
fine-tune each run of a grid. A run is one row, in a file. The table and the figure (after the paper's Figures 3 to
5) are computed from all existing rows.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import MinLen

from ssvit.cli import evaluate, finetune
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Count, Distinct, Expect, Name, Tree
from ssvit.data.sources.base_options import SHORT_FORMS
from ssvit.errors import OptionError, typed, within
from ssvit.models.timm_options import Timm
from ssvit.studies import methods, scaling
from ssvit.studies.trials import (
    Names,
    Study,
    Trials,
    Typed,
    check_images,
    check_options,
    check_set_by,
    recipe_options,
    stages,
)
from ssvit.values import text_of

_HEAD = 64  # width of an attention head, as in the paper's models
_MODEL = ("depth", "width", "mlp", "patch")
_GRID = ("images", *_MODEL, "steps")
_SUPERVISED = "supervised"
# Options of a run that are set by an axis of the grid.
_SET_BY = {
    "encoder.depth": "depth", "encoder.width": "width", "encoder.heads": "width", "encoder.mlp_width": "mlp",
    "encoder.patch_size": "patch", "recipe.steps": "steps", "subset.images": "images", "recipe.seed": "seed",
}  # fmt: skip
_VALUES = "a list of one or more different whole numbers, 1 or more"
Axis = Annotated[Sequence[Count], Distinct, MinLen(1), Expect(_VALUES)]


class Scaling(Study):
    """A grid of runs: each combination of values of the axes is pre-trained, evaluated and fine-tuned."""

    objectives: Names = ("masked_patch", "mae")
    """Names of files in configs/comparison/ (of one stage) or configs/objective/."""
    images: Annotated[Sequence[Count | None], Distinct, MinLen(1), Expect(f"{_VALUES}, or null")] = (None,)
    """Training images of each run; None: all."""
    depth: Axis = (6,)
    """Number of layers."""
    width: Axis = (192,)
    """Width of a token; there is one attention head for each 64 channels."""
    mlp: Annotated[Sequence[Count | None], Distinct, MinLen(1), Expect(f"{_VALUES}, or null")] = (None,)
    """Width of the MLP's hidden layer; None: 4 * width."""
    patch: Axis = (4,)
    """Side of a patch in pixels."""
    steps: Axis = (500,)
    """Optimiser updates."""
    vary: Literal["product", "one"] = "product"
    """product: all combinations of values. one: all axes have their first value, except for one of them, or for depth,
    width, mlp and patch together, whose lists are then read in parallel (Figure 8)."""
    encoders: Annotated[Sequence[Name], Expect("a list of names")] = ()
    """Encoders for comparison, trained by objective=supervised on the same number of images: choices of encoder=
    (small_hybrid) and models of timm (resnetv2_50x1_bit)."""
    pretrain: Typed = ("probes=[]", "evaluator=[]")


def run(config: Config) -> Path:
    """Compute the missing rows, then the table and the figure; return their folder."""
    options: Scaling = config.options
    points = check(config)
    check_images(options, most=max(images or 0 for images in options.images))
    base = {"base": {name: getattr(options, name)[0] for name in _GRID}} if options.vary == "one" else {}
    grid = Grid(config, {"vary": options.vary, **base})
    for seed in range(options.seed, options.seed + options.seeds):
        for objective, point in itertools.product(options.objectives, points):
            grid.row(objective, point, seed)
        for encoder, images, steps in itertools.product(options.encoders, options.images, options.steps):
            grid.compared(encoder, {**dict.fromkeys(_GRID), "images": images, "steps": steps}, seed)
    rows = methods.read_rows(grid.table)
    return grid.publish(
        scaling.scaling_table(rows), {"scaling.png": scaling.plot(scaling.points(rows))}, scaling.conclusion(rows)
    )


def check(config: Config) -> list[dict[str, Any]]:
    """Return the points of the grid by axis; raise OptionError or UserError if the configuration is invalid."""
    options: Scaling = config.options
    for name in options.objectives:
        if len(stages(name, config.line)) > 1:
            raise OptionError("objectives", name, "must be a method of one stage, since a point of the grid is one run")
    check_options(options, _SET_BY, evaluate=evaluate.command, finetune=finetune.command)
    for name in options.encoders:
        if name not in config.line.names("encoder"):
            try:
                Timm(model=name, image_size=1)
            except OptionError as error:
                raise OptionError(
                    "encoders", name, f"must be a choice of encoder= or a model of timm: {error.expectation}"
                ) from None
    points = grid_points({name: getattr(options, name) for name in _GRID}, options.vary)
    for point in points:
        try:
            with within("encoder"):
                encoder = options.encoder.changed(**shape(point))
            Tree(options.changed(encoder=encoder)).check()
        except OptionError as error:
            axis = error.name.removeprefix("encoder.").partition("_")[0]  # such as patch for encoder.patch_size
            raise OptionError(axis if axis in _GRID else error.name, error.value, error.expectation) from None
    return points


def grid_points(axes: Mapping[str, Sequence[Any]], vary: str) -> list[dict[str, Any]]:
    """Return the points of a grid: the value of each axis, and "varied", the name of the axes that vary, or None.

    Args:
        axes: Values of each axis.
        vary: product or one, see `Scaling`.

    Raises:
        OptionError: Axes that vary together have different numbers of values.
    """
    if vary == "product":
        return [dict(zip(axes, values, strict=True)) | {"varied": None} for values in itertools.product(*axes.values())]
    base = {name: values[0] for name, values in axes.items()}
    points = [base | {"varied": scaling.BASE}]
    points += [base | {name: value, "varied": name} for name, values in axes.items() for value in values[1:]]
    together = {name: axes[name] for name in _MODEL if len(axes[name]) > 1}
    if len(together) > 1:
        first, *others = together
        for name in others:
            if len(axes[name]) != len(axes[first]):
                expected = f"must have as many values as {first}={typed(axes[first])} with vary=one"
                raise OptionError(name, axes[name], expected)
        steps = list(zip(*together.values(), strict=True))[1:]
        points += [base | dict(zip(together, step, strict=True)) | {"varied": "all"} for step in steps]
    return points


def shape(point: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the options of the ViT of a point."""
    depth, width = point["depth"], point["width"]
    heads = max(1, width // _HEAD)
    return {"depth": depth, "width": width, "mlp_width": point["mlp"], "heads": heads, "patch_size": point["patch"]}


class Grid(Trials):
    """Run the commands of a grid."""

    def row(self, objective: str, point: dict[str, Any], seed: int) -> None:
        """Compute the row of a ViT with a point's depth, width and patch size.

        Args:
            objective: Name of the objective.
            point: Value of each axis by name.
            seed: Seed of the runs.
        """
        model = [f"encoder.{name}={text_of(value)}" for name, value in shape(point).items()]
        size = "d{depth}_w{width}_p{patch}".format(**point) + (f"_m{point['mlp']}" if point["mlp"] else "")
        self._row(objective, size, [*self.pretraining, *model], point, seed)

    def compared(self, encoder: str, point: dict[str, Any], seed: int) -> None:
        """Compute the row of a supervised encoder for comparison, without the study's options of the encoder.

        Args:
            encoder: Name of a choice of encoder= or of a model of timm.
            point: Value of each axis by name.
            seed: Seed of the runs.
        """
        is_choice = encoder in self.line.names("encoder")
        model = [f"encoder={encoder}"] if is_choice else ["encoder=timm", f"encoder.model={encoder}"]
        rest = [option for option in self.pretraining if not option.lstrip("+").startswith("encoder")]
        self._row(_SUPERVISED, encoder, [*rest, *model], {**point, "encoder": encoder}, seed)

    def _row(self, objective: str, size: str, options: Sequence[str], point: dict[str, Any], seed: int) -> None:
        """Pre-train, evaluate and fine-tune unless the row exists; `size` is the model in the name of the row."""
        name = f"{objective}_{point['images'] or 'all'}_{size}_s{point['steps']}_seed{seed}"
        if (self.table / f"{name}.json").is_file():
            return
        print(f"\n{name}", flush=True)
        (stage,) = stages(objective, self.line)
        options = [*stage.options, *options]
        cost = self.cost(f"{objective}_{size}", options)
        subset = f"subset.images={text_of(point['images'])}"
        # Supervised runs evaluate on all test images each time, so they evaluate only at the start and at the end.
        rarely = [f"recipe.evaluate_every={point['steps']}"] if objective == _SUPERVISED else []
        self.call("pretrain", [*recipe_options(point["steps"], seed, cost), *options, *rarely, subset, f"name={name}"])
        report = self.evaluated(str(self.folder / name), name, baselines=False)
        row = {"objective": objective, "seed": seed, **point, "cost": cost, "probes": methods.probes(report)}
        if objective == _SUPERVISED:
            row["supervised"] = self.tested(name)
        self.write(name, row | self.finetuned(str(self.folder / name), name, seed))


command = Command(
    "scaling",
    run,
    expansions=SHORT_FORMS,
    study=True,
    before=lambda line: check_set_by(line.typed, _SET_BY),
    options=Scaling,
    common=(
        "objectives", *_GRID, "vary", "encoders", "seeds", "name", "table", "data.root", "pretrain", "evaluate",
        "finetune",
    ),
)  # fmt: skip
