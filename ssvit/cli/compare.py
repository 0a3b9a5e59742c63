"""Compare objectives at equal CPU time, with the same evaluation.

Usage: ssvit compare objectives=[masked_patch,mae,dino] budget=6min. Other commands pre-train, evaluate and fine-tune
for each objective and seed. The results are one row, in a file; the table and the figure are computed from all existing
rows. The number of steps within the budget is measured once for each objective and stored with the rows, so that
schedules, which depend on it, do not change.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.run_folder import rows
from ssvit.cli import evaluate, finetune
from ssvit.config.command import Command
from ssvit.config.composed import Config
from ssvit.config.declaration import Name, Seconds, Tree
from ssvit.data.sources.base_options import SHORT_FORMS
from ssvit.engine.progress import minutes
from ssvit.errors import OptionError, print_lines
from ssvit.evaluation.baselines import PIXELS, RANDOM
from ssvit.studies import methods
from ssvit.studies.trials import Names, Stage, Study, Trials, Typed, check_images, check_options, recipe_options, stages
from ssvit.training.budget import steps_within

# Placeholders in a stage's options: the run of the previous stage, and the option teacher.
_BEFORE, _TEACHER = "{before}", "{teacher}"
_SET_BY = {"recipe.steps": "budget", "recipe.seed": "seed"}  # options of a run that are set by those of the study
_BESIDES = "measurements of steps, evaluations and fine-tuning are added"


class Compare(Study):
    """Objectives that are trained for equal CPU time, with the same evaluation."""

    objectives: Names = ("masked_patch", "mae", "dino")
    budget: Seconds = Field("6min", validate_default=True)
    """CPU time of the pre-training of each objective: seconds, or 90s, 6min, 1h."""
    teacher: Name | None = None
    """Teacher of objectives that have one: a run, a file or folder of weights, hf://OWNER/NAME or timm:NAME."""
    pretrain: Typed = ("probing.train_images=2000", "probing.test_images=2000")
    evaluate: Typed = (
        "probes=[ridge,few_shot,few_shot_big_vision,logistic,knn,knn_standardized]",
        "probes.few_shot.shots=100",
        "probes.knn.k=20",
        "train_images=20000",
        "test_images=null",
    )
    finetune: Typed = ("subset.images=5000", "recipe.steps=600", "recipe.evaluate_every=200")


def run(config: Config) -> Path:
    """Compute the missing rows, then the table and the figure; return their folder."""
    options: Compare = config.options
    Tree(options).check()
    check_images(options)
    chosen = {name: stages(name, config.line) for name in options.objectives}
    for name, parts in chosen.items():
        if options.teacher is None and _has_teacher(parts):
            raise OptionError("teacher", None, f"must be set for {name}")
    check_options(options, _SET_BY, evaluate=evaluate.command, finetune=finetune.command)
    comparison = Comparison(config, {"budget": options.budget})
    comparison.check_rows(chosen)
    planned = [(name, seed) for seed in range(options.seed, options.seed + options.seeds) for name in chosen]
    missing = sum(not comparison.file(*row).is_file() for row in planned)
    spent = minutes(missing * options.budget)
    print_lines(f"missing: {missing} of {len(planned)} rows, with {spent} of pre-training in total; {_BESIDES}")
    for name, parts in chosen.items():
        for index, stage in enumerate(parts):
            if not any(_BEFORE in option for option in stage.options):
                comparison.stage_cost(name, index, stage)
    for name, seed in planned:
        comparison.row(name, seed, chosen[name])
    results = methods.read_rows(comparison.table)
    curves = methods.curves(results)
    probes = [*methods.probes_in(curves)] if curves else []
    figures = {"accuracy.png": methods.plot(curves, probes[0])} if probes else {}
    return comparison.publish(methods.methods_table(results), figures, methods.conclusion(results))


class Comparison(Trials):
    """Run the commands of a comparison."""

    options: Compare

    def file(self, name: str, seed: int) -> Path:
        """Return the file of a row."""
        return self.table / f"{name}_seed{seed}.json"

    def check_rows(self, chosen: Mapping[str, Sequence[Stage]]) -> None:
        """Check that the rows of the objectives have their options and their teacher.

        Raises:
            OptionError: A row has others.
        """
        for file, row in methods.read_rows(self.table).items():
            if (name := row.get("objective", "")) not in chosen:
                continue
            stored = {"teacher": row.get("teacher"), "stages": [stage["options"] for stage in row["stages"]]}
            wanted = {"stages": [[*stage.options] for stage in chosen[name]], **self._teacher(chosen[name])}
            for key, value in wanted.items():
                if stored[key] not in (value, None):
                    expected = f"must not contain {name} with other options: {file}.json has {key}={stored[key]}"
                    raise OptionError("table", str(self.table), expected)

    def _teacher(self, parts: Sequence[Stage]) -> dict[str, str]:
        """Return the name of the teacher's file or folder, if a stage has one."""
        return {"teacher": Path(self.options.teacher or "").name} if _has_teacher(parts) else {}

    def stage_cost(self, name: str, index: int, stage: Stage, before: str = "") -> dict[str, Any]:
        """Return the cost of a step of a stage.

        Args:
            name: Name of the objective.
            index: Index of the stage, from 0.
            stage: The stage.
            before: Folder of the run of the previous stage.
        """
        return self.cost(f"{name}_{index + 1}", self._options(stage, before), self._written(stage))

    def row(self, name: str, seed: int, parts: Sequence[Stage]) -> None:
        """Pre-train, evaluate and fine-tune unless the row exists.

        Args:
            name: Name of the objective.
            seed: Seed of the runs.
            parts: Stages of the objective.
        """
        file, before = self.file(name, seed), ""
        if file.is_file():
            return
        run_name = file.stem
        trained: list[dict[str, Any]] = []
        curve: list[dict[str, float]] = []
        for index, stage in enumerate(parts):
            cost = self.stage_cost(name, index, stage, before)
            seconds = stage.share * self.protocol["budget"]
            steps = max(1, steps_within(seconds, step=cost["cpu_seconds"], preparation=cost["preparation"]))
            stage_name = run_name + (f"_stage{index + 1}" if len(parts) > 1 else "")
            print(f"\n{stage_name}: {steps} steps of {cost['images']} images", flush=True)
            self.call(
                "pretrain", [*recipe_options(steps, seed, cost), *self._options(stage, before), f"name={stage_name}"]
            )
            before = str(self.folder / stage_name)
            curve += methods.curve(rows(Path(before)), cost, trained)
            precision = Checkpoint.open(Path(before)).manifest["precision"]
            trained.append(cost | {"options": list(stage.options), "steps": steps, "precision": precision})
        missing = not (self.table / f"{methods.BASELINES}.json").is_file()
        report = self.evaluated(before, run_name, baselines=missing)
        results = {"probes": methods.probes(report), **self.finetuned(before, run_name, seed)}
        if missing:  # written before the row, since an existing row is skipped
            scratch = self.finetuned("scratch", f"scratch_seed{seed}", seed)
            baselines = {name: methods.probes(report, name) for name in (RANDOM, PIXELS)}
            self.write(methods.BASELINES, {"baselines": baselines, **scratch})
        about = {"objective": name, "seed": seed, **self._teacher(parts)}
        self.write(run_name, {**about, "stages": trained, "curve": curve, **results})

    def _options(self, stage: Stage, before: str) -> list[str]:
        teacher = self.options.teacher or ""
        return [option.replace(_BEFORE, before).replace(_TEACHER, teacher) for option in self._written(stage)]

    def _written(self, stage: Stage) -> list[str]:
        """Return the options of a stage with their placeholders."""
        if any(option.startswith("checkpoint=") for option in stage.options):  # the checkpoint determines the encoder
            return [*(option for option in self.pretraining if not option.startswith("encoder")), *stage.options]
        return [*self.pretraining, *stage.options]


def _has_teacher(parts: Sequence[Stage]) -> bool:
    return any(_TEACHER in option for stage in parts for option in stage.options)


command = Command(
    "compare",
    run,
    expansions=SHORT_FORMS,
    study=True,
    options=Compare,
    common=(
        "objectives", "teacher", "budget", "seeds", "seed", "threads", "name", "table", "data.root", "data.image_size",
        "encoder.patch_size", "pretrain", "evaluate", "finetune",
    ),
)  # fmt: skip
