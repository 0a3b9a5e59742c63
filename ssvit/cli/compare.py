"""Compare objectives at equal CPU time and evaluation: ssvit compare objectives=[masked_patch,mae,dino] budget=6min

For each objective and seed, the other commands pre-train, evaluate and fine-tune. Their results are one row, a separate
file; the table and the figure are made from all existing rows. The number of steps in the budget is measured once for
each objective and stored beside the rows, so that schedules, which follow the steps, stay the same.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ssvit import atomic_io
from ssvit.cli.launch import CONFIGS, Failure, Plain, Tool, config_dir
from ssvit.evaluation import methods
from ssvit.options import OptionError, number, whole
from ssvit.training import preflight

_UNITS = {"": 1, "s": 1, "min": 60, "h": 3600}
# Of the comparison itself; every other option goes to pre-training.
_OWN = (
    "objectives", "budget", "seeds", "seed", "threads", "name", "table", "outputs", "pretrain", "evaluate", "finetune",
)  # fmt: skip
_ELSEWHERE = ("data.root", "workers", "loader_timeout", "fabric")  # options that change no figure
_REPORTED = ("test/accuracy", "validation/accuracy", "test/map", "validation/map")
_BEFORE = "{before}"  # in a stage's options: the run of the stage before


@dataclass(frozen=True)
class Stage:
    """A part of a method: its share of the budget, and the options of its pre-training."""

    options: Sequence[str]
    share: float = 1.0


def run(config: DictConfig, plain: Plain) -> Path:
    """Make the rows that are not there yet, then the table and the figure. Returns their folder."""
    budget = check(plain)
    chosen = {name: stages(name) for name in plain["objectives"]}
    folder = Path(plain["outputs"], str(plain["name"]))
    table = Path(plain["table"] or folder / "table")
    typed = HydraConfig.get().overrides.task
    forwarded = [option for option in typed if re.split(r"[=.@]", option.lstrip("+"))[0] not in _OWN]
    protocol = {
        "data": HydraConfig.get().runtime.choices["data"],
        "budget": budget,
        "options": [*plain["pretrain"], *(option for option in forwarded if not option.startswith(_ELSEWHERE))],
        "evaluate": plain["evaluate"],
        "finetune": plain["finetune"],
        "threads": plain["threads"],
    }
    for name, row in methods.read(table).items():
        if different := next((key for key in protocol if row["protocol"].get(key) != protocol[key]), None):
            found = row["protocol"].get(different)
            raise OptionError("table", str(table), f"has {name}.json of another protocol: {different} {found}")
    folder.mkdir(parents=True, exist_ok=True)
    table.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(plain, folder, table, [*plain["pretrain"], *forwarded], protocol)
    for name, parts in chosen.items():
        for place, stage in enumerate(parts):
            if not any(_BEFORE in option for option in stage.options):
                comparison.cost(name, place, stage)
    for seed in range(plain["seed"], plain["seed"] + plain["seeds"]):
        for name, parts in chosen.items():
            comparison.row(name, seed, parts)
    rows = methods.read(table)

    text = methods.table(rows)
    atomic_io.replace(table / "table.md", text.encode())
    written = [table / "table.md"]
    if curves := methods.curves(rows):
        from ssvit.figures.methods import accuracy
        from ssvit.figures.style import png

        written.append(table / "accuracy.png")
        atomic_io.replace(written[-1], png(accuracy(curves, methods.probes_in(curves))))
    print(f"\n{text}\n{', '.join(map(str, written))}")
    return table


def check(plain: Plain) -> float:
    """The budget in CPU seconds. OptionError or UserError for a wrong configuration."""
    preflight.encoder(preflight.parts(plain))
    names = plain["objectives"]
    if not isinstance(names, list) or not names or len(set(names)) < len(names):
        raise OptionError("objectives", names, "must be a list of one or more different names")
    for name in ("seeds", "threads"):
        whole(name, plain[name])
    whole("seed", plain["seed"], at_least=0)
    for name in ("pretrain", "evaluate", "finetune"):
        if not isinstance(plain[name], list):
            raise OptionError(name, plain[name], "must be a list of options")
    found = re.fullmatch(r"([\d.]+)\s*(s|min|h|)", str(plain["budget"]))
    if found is None:
        raise OptionError("budget", plain["budget"], "must be a number of seconds, or as 90s, 6min, 1h")
    budget = float(found[1]) * _UNITS[found[2]]
    number("budget", budget, 0, above=True)
    return budget


def stages(name: str) -> list[Stage]:
    """The stages of a method: those of its file in configs/comparison/, or else one, of the objective of that name."""
    folders = [own for own in (config_dir(), CONFIGS) if own is not None]
    for file in (own / "comparison" / f"{name}.yaml" for own in folders):
        if file.is_file():
            return [Stage(**stage) for stage in yaml.safe_load(file.read_text())["stages"]]
    if any((own / "objective" / f"{name}.yaml").is_file() for own in folders):
        return [Stage([f"objective={name}"])]
    known = {
        file.stem for own in folders for group in ("comparison", "objective") for file in (own / group).glob("*.yaml")
    }
    raise OptionError("objectives", name, f"must be of {', '.join(sorted(known))}")


class Comparison:
    """The commands of a comparison. pretraining: the options of each pre-training."""

    def __init__(
        self, plain: Plain, folder: Path, table: Path, pretraining: Sequence[str], protocol: Mapping[str, Any]
    ) -> None:
        self.plain, self.folder, self.table = plain, folder, table
        self.pretraining, self.protocol = pretraining, protocol

    def cost(self, name: str, place: int, stage: Stage, before: str = "") -> dict[str, Any]:
        """What a step of a stage costs: measured once, then read."""
        file = self.table / "costs" / f"{name}_{place + 1}.json"
        if not file.is_file():
            print(f"{name}: measuring a step of {' '.join(stage.options)}", flush=True)
            output = self.call("cost", self._options(stage, before), capture=True)
            file.parent.mkdir(exist_ok=True)
            atomic_io.replace(file, (output.splitlines()[-1] + "\n").encode())
        return json.loads(file.read_text())

    def row(self, name: str, seed: int, parts: Sequence[Stage]) -> None:
        """Pre-train, evaluate and fine-tune, unless the row is there."""
        file = self.table / f"{name}_seed{seed}.json"
        if file.is_file():
            return
        before = ""
        trained: list[dict[str, Any]] = []
        curve: list[dict[str, float]] = []
        for place, stage in enumerate(parts):
            cost = self.cost(name, place, stage, before)
            left = stage.share * self.protocol["budget"] - cost["preparation"]
            steps = max(1, round(left / cost["cpu_seconds"]))
            run_name = f"{name}_seed{seed}" + (f"_stage{place + 1}" if len(parts) > 1 else "")
            print(f"\n{run_name}: {steps} steps of {cost['images']} images", flush=True)
            tenth = max(1, steps // 10)
            numbers = {
                "steps": steps, "warmup": steps // 20, "evaluate_every": tenth, "save_every": tenth,
                "log_every": max(1, steps // 100), "seed": seed,
            }  # fmt: skip
            options = [f"recipe.{key}={value}" for key, value in numbers.items()] + [f"probing.every={tenth}"]
            self.call("pretrain", [*options, *self._options(stage, before), f"name={run_name}"])
            before = str(self.folder / run_name)
            curve += methods.curve(_history(self.folder / run_name), cost, trained)
            trained.append(cost | {"options": list(stage.options), "steps": steps})
        baselines = self.table / "baselines.json"
        report = self._evaluate(before, f"{name}_seed{seed}", baselines=not baselines.is_file())
        shared = {"protocol": self.protocol, "versions": {one: version(one) for one in ("ssvit", "torch")}}
        found: dict[str, Any] = {"stages": trained, "curve": curve, "probes": methods.probes(report)}
        found |= self._finetuned(before, f"{name}_seed{seed}", seed)
        if not baselines.is_file():  # before the row: one that is there is not made again, nor what comes after it
            scratch = self._finetuned("scratch", f"scratch_seed{seed}", seed)
            self._write(baselines, {"baselines": methods.baselines(report), **scratch, **shared})
        self._write(file, {"objective": name, "seed": seed, **found, **shared})

    def _options(self, stage: Stage, before: str) -> list[str]:
        options = [option.replace(_BEFORE, before) for option in stage.options]
        if any(option.startswith("checkpoint=") for option in options):  # which brings its encoder
            return [*(option for option in self.pretraining if not option.startswith("encoder")), *options]
        return [*self.pretraining, *options]

    def _evaluate(self, run: str, name: str, *, baselines: bool) -> dict[str, Any]:
        output = self.folder / f"{name}_evaluation"
        own = [f"checkpoint={run}", f"output={output}", f"baselines={str(baselines).lower()}", "cache=null"]
        self.call("evaluate", [*self.plain["evaluate"], *own])
        return json.loads((output / "report.json").read_text())

    def _finetuned(self, checkpoint: str, name: str, seed: int) -> dict[str, float]:
        if not self.plain["finetune"]:
            return {}
        name = f"{name}_finetuned"
        own = [f"checkpoint={checkpoint}", f"name={name}", f"recipe.seed={seed}"]
        self.call("finetune", [*self.plain["finetune"], *own])
        scores = [row[key] for row in _history(self.folder / name) for key in row if key in _REPORTED]
        return {"finetuned": scores[-1]}

    def _write(self, file: Path, row: Mapping[str, Any]) -> None:
        atomic_io.replace(file, (json.dumps(row, indent=1) + "\n").encode())

    def call(self, command: str, options: Sequence[str], *, capture: bool = False) -> str:
        """Run a command in a process of its own; Failure with its status if it fails, after its own line.

        Ctrl-C reaches it too, and it may take its time to save.
        """
        users = config_dir()
        own = [] if users is None else ["--config-dir", str(users)]
        threads = {"OMP_NUM_THREADS": str(self.plain["threads"]), "OMP_WAIT_POLICY": "PASSIVE"}
        process = subprocess.Popen(
            [sys.executable, "-m", "ssvit", command, *own, *options, f"outputs={self.folder}"],
            env={**os.environ, **threads},
            stdout=subprocess.PIPE if capture else None,
            text=True,
        )
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:
            process.wait()
            raise
        if process.returncode:
            raise Failure(f"{command} {' '.join(options)}: did not end; the same command goes on", process.returncode)
        return output or ""


def _history(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics."""
    from ssvit.training import metrics_log

    return metrics_log.rows(run)


tool = Tool(
    "compare",
    "train objectives for equal CPU time and evaluate them alike",
    run,
    common=(
        "objectives",
        "budget",
        "seeds",
        "seed",
        "threads",
        "name",
        "table",
        "data.root",
        "data.image_size",
        "encoder.patch_size",
        "pretrain",
        "evaluate",
        "finetune",
    ),
)
