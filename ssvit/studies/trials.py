"""Execute the commands of a study of many runs in separate processes, and collect their rows."""

import contextlib
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import yaml
from annotated_types import MinLen

from ssvit.checkpoints.run_folder import rows
from ssvit.config.command import Command
from ssvit.config.command_line import CommandLine
from ssvit.config.composed import Config
from ssvit.config.declaration import Count, Distinct, Expect, Name, Positive, Whole
from ssvit.data.sources.base_options import NO_LABELS, DataSet
from ssvit.engine import atomic_io
from ssvit.errors import Failure, OptionError, UserError, print_lines
from ssvit.figures.base import Figure
from ssvit.studies import methods
from ssvit.studies.comparison import TEST_OR_VALIDATION, scored
from ssvit.training.budget import schedule
from ssvit.training.options import RunOptions
from ssvit.values import text_of, value_of

_ELSEWHERE = ("data.root", "workers", "loader_timeout", "launch")  # options that do not affect results
_OF_PROCESSES = ("launch.devices", "launch.num_nodes")  # a step is timed in a single process
_NAMED_BY_ROOT = ("folder", "huggingface", "shards")  # data sets whose images are those of the folder data.root
_CHOICES = ("data", "encoder")  # choices of a study, whose defaults are not those of pre-training
_SUBSET = "subset.images="
_PAIRS = 3  # measurements of a step and the reference

_SIGNALS = {
    128 + signal.SIGTERM: "was stopped by SIGTERM",
    128 + signal.SIGKILL: "was ended by SIGKILL, which the system sends if memory is short",
}  # by exit status

Names = Annotated[Sequence[Name], Distinct, MinLen(1), Expect("a list of one or more different names")]
Typed = Annotated[Sequence[Name], Expect("a list of options")]


class Study(RunOptions):
    """Configure a study of many runs with the same images, model and options."""

    objectives: Names
    """Names of files in configs/comparison/ (settings for small images) or configs/objective/."""
    seeds: Count = 1
    """Runs of each point of the study, which differ only in the seed."""
    seed: Whole = 0
    """The first seed."""
    threads: Count = 1
    """CPU threads of each run."""
    reference: Typed = ()
    """Options of a pre-training whose step is the unit of cost, so that rows of different machines are the same work.
    Each step is measured alternately with it; []: costs are those of this machine."""
    reference_seconds: Positive = 1.0
    """CPU time of a step of the reference."""
    name: Name
    """Folder of the study within outputs, which contains the runs."""
    table: Name | None = None
    """Folder of rows, table and figures, whose path is appended to the default of `name`. None: table/ in the
    study's folder."""
    pretrain: Typed = ()
    """Options of ssvit pretrain, as on the command line."""
    evaluate: Typed = (
        "probes=[ridge,few_shot,knn]",
        "probes.few_shot.shots=5",
        "probes.knn.k=20",
        "train_images=20000",
        "test_images=null",
    )
    """Options of ssvit evaluate."""
    finetune: Typed = ("subset.images=5000", "recipe.steps=600", "recipe.evaluate_every=600")
    """Options of ssvit finetune; []: no fine-tuning."""


@dataclass(frozen=True)
class Stage:
    """Describe a stage of a method: its share of the budget, and the options of its pre-training."""

    options: Sequence[str]
    share: float = 1.0


def stages(name: str, line: CommandLine) -> list[Stage]:
    """Return the stages of a method.

    They are defined by its file in configs/comparison/, or else there is one stage with the objective of that name.

    Args:
        name: Name of the method.
        line: Command line.

    Raises:
        OptionError: If there is no method of that name.
    """
    if file := line.file(f"comparison/{name}"):
        return [Stage(**stage) for stage in yaml.safe_load(file.read_text())["stages"]]
    if name in line.names("objective"):
        return [Stage([f"objective={name}"])]
    names = {*line.names("comparison"), *line.names("objective")}
    raise OptionError("objectives", name, f"must be one of {', '.join(sorted(names))}")


def check_images(options: Study, *, most: int = 0) -> None:
    """Check that images have labels and suffice for the runs of a study.

    Args:
        options: Options of the study.
        most: Maximum number of pre-training images in the option "images"; options of fine-tuning have a separate one.

    Raises:
        UserError: If images have no labels.
        OptionError: If there are too few images.
    """
    source = options.data
    data_set = source if isinstance(source, DataSet) else DataSet()
    option = next((option for option in reversed(options.finetune) if option.startswith(_SUBSET)), _SUBSET)
    subset = value_of(option.removeprefix(_SUBSET) or "0")
    required = {("images", most): most, ("finetune", option): subset if isinstance(subset, int) else 0}
    labelled, available = data_set.labelled, data_set.count(at_most=max(required.values()))
    if labelled is None or (available is None and any(required.values())):  # the options do not determine them
        train = options.build_part("data").train
        labelled, available = train.labels is not None, len(train)
    if not labelled:
        raise UserError(NO_LABELS)
    for (name, value), images in required.items():
        if available is not None and images > available:
            raise OptionError(name, value, f"must be at most {available}, the number of training images")


def check_options(options: Study, set_by: Mapping[str, str], *, evaluate: Command, finetune: Command) -> None:
    """Check the typed options of the commands of a study, whose mistakes would appear only after a pre-training.

    Args:
        options: Options of the study.
        set_by: Options of the study, by the options of pre-training that they set.
        evaluate: The command for evaluations.
        finetune: The command for fine-tuning.

    Raises:
        Failure: An option does not exist, or a value cannot be parsed.
        OptionError: A value is invalid, or an option of pre-training is set by the study.
    """
    check_set_by(CommandLine(options.pretrain).typed, set_by)
    for command, of_command in ((evaluate, options.evaluate), (finetune, options.finetune)):
        _ = command.described(of_command).options


def check_set_by(options: Mapping[str, object], set_by: Mapping[str, str]) -> None:
    """Check that typed options of pre-training are not those that options of the study set.

    Args:
        options: Typed options by name.
        set_by: Options of the study, by the options that they set.

    Raises:
        OptionError: An option is set by the study.
    """
    for name in options.keys() & set_by.keys():
        raise OptionError(name, options[name], f"must be set by {set_by[name]}=…")


class Trials:
    """Execute the runs of a study and write the rows of its table.

    Overrides of options that are not the study's are passed to pre-training.

    Args:
        config: Configuration of the study.
        protocol: Settings that are the same in all rows.

    Raises:
        OptionError: If the table has rows of another protocol.
    """

    def __init__(self, config: Config, protocol: Mapping[str, Any]) -> None:
        self.options: Study = config.options
        self.line = config.line
        name, table = self.options.name, self.options.table
        if table is not None and "name" not in self.line.typed:
            parts = (part for part in Path(table).parts if part not in ("/", ".."))
            name = "_".join([name, *parts])  # equal names of runs in different tables
        self.folder = Path(self.options.outputs, name)
        self.table = Path(table or self.folder / "table")
        development = self.options.development
        self.development = {} if development is None else {"development": development}
        # All options but those of the study are options of its runs.
        names = type(self.options).model_fields.keys() - RunOptions.model_fields.keys() | {"outputs"}
        values = self.line.values
        others = (name for name in values if re.split(r"[.@]", name)[0] not in names and name not in _CHOICES)
        forwarded = {name: values[name] for name in others}
        choices = {group: config.choices[group] for group in _CHOICES}
        self.pretraining = [*self.options.pretrain, *self.line.written({**choices, **forwarded})]
        self.protocol = {
            "data": config.choices["data"],
            **({"images": Path(self.options.data.root).name} if config.choices["data"] in _NAMED_BY_ROOT else {}),
            **protocol,
            "options": _of_figures(self.pretraining),
            "evaluate": [*self.options.evaluate],
            "finetune": [*self.options.finetune],
            "threads": self.options.threads,
            "reference": [*self.options.reference],
            "reference_seconds": self.options.reference_seconds,
        }
        for name, row in methods.read_rows(self.table).items():
            of_row = _ordered(self.protocol | row["protocol"])  # rows of earlier versions have fewer settings
            for key, value in _ordered(self.protocol).items():
                if (before := of_row[key]) != value:
                    expected = f"must not contain results of another protocol: {name}.json has {key}={before}"
                    raise OptionError("table", str(self.table), expected)
        for folder in (self.folder, self.table):
            folder.mkdir(parents=True, exist_ok=True)

    def cost(self, name: str, options: Sequence[str], shared: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the cost of a pre-training step, measured once and again if options or threads change.

        Args:
            name: Name of the file of the cost.
            options: Options of the pre-training.
            shared: Options that all runs with this cost share, if they differ from `options`.
        """
        file = self.table / "costs" / f"{name}.json"
        settings = {"options": _of_figures(options if shared is None else shared), "threads": self.options.threads}
        stored = json.loads(file.read_text()) if file.is_file() else {}
        if self.options.reference:
            settings["reference"] = [*self.options.reference]
        if _ordered(stored.pop("measured_with", {"options": []})) != _ordered(settings):
            print(f"measuring the cost of a step: {' '.join(options)}", flush=True)
            stored = self._measured(options)
            file.parent.mkdir(exist_ok=True)
            atomic_io.replace(file, (json.dumps(stored | {"measured_with": settings}) + "\n").encode())
        return stored

    def _measured(self, options: Sequence[str]) -> dict[str, Any]:
        """Measure the cost of a pre-training step, alternately with the reference step if there is one."""

        def measure(options: Sequence[str]) -> dict[str, Any]:
            single = [option for option in options if not option.startswith(_OF_PROCESSES)]
            cost: dict[str, Any] = json.loads(self.call("cost", single, capture=True).splitlines()[-1])
            return cost

        if not self.options.reference:
            return measure(options)
        pairs = [(measure([*self.pretraining, *self.options.reference]), measure(options)) for _ in range(_PAIRS)]
        multiple = statistics.median(step["cpu_seconds"] / unit["cpu_seconds"] for unit, step in pairs)
        seconds = multiple * self.options.reference_seconds
        scale = self.options.reference_seconds / statistics.median(unit["cpu_seconds"] for unit, _ in pairs)
        cost = pairs[-1][1]
        preparation = scale * cost["preparation"]
        return cost | {
            "cpu_seconds": seconds, "seconds": seconds, "preparation": preparation, "multiple": multiple,
        }  # fmt: skip

    def evaluated(self, run: str, name: str, *, baselines: bool) -> dict[str, Any]:
        """Evaluate a run and return the report.

        Args:
            run: The run.
            name: Prefix of the output folder.
            baselines: Whether to evaluate the baselines.
        """
        output = self.folder / f"{name}_evaluation"
        options = {"checkpoint": run, "output": output, "baselines": baselines, "cache": None, **self.development}
        self.call("evaluate", [*self.options.evaluate, *self.line.written(options)])
        return json.loads((output / "report.json").read_text())

    def finetuned(self, checkpoint: str, name: str, seed: int) -> dict[str, float]:
        """Fine-tune a checkpoint and return its accuracy; an empty mapping if the study has no fine-tuning.

        Args:
            checkpoint: The checkpoint.
            name: Prefix of the run's name.
            seed: Seed of the run.
        """
        if not self.options.finetune:
            return {}
        name = f"{name}_finetuned"
        # One run with the same schedule for all checkpoints.
        alike = ["preset=null", "check_frozen=false", "compare=null", "sweep=null"]
        options = self.line.written({"checkpoint": checkpoint, "name": name, "recipe.seed": seed, **self.development})
        self.call("finetune", [*self.options.finetune, *options, *alike])
        return {"finetuned": self.tested(name)}

    def publish(self, text: str, figures: Mapping[str, Figure], closing: Sequence[str]) -> Path:
        """Write the table and the figures, print the table, and return their folder.

        Args:
            text: The table, as Markdown.
            figures: Figures by file name.
            closing: Lines to print after the table.
        """
        files = {"table.md": text.encode(), **{name: figure.png() for name, figure in figures.items()}}
        written = atomic_io.write_files(self.table, files)
        print_lines("", *text.split("\n"), *closing, f"written: {', '.join(map(str, written))}")
        return self.table

    def tested(self, name: str) -> float:
        """Return the final accuracy of a supervised run."""
        return scored(rows(self.folder / name), TEST_OR_VALIDATION)[-1].accuracy

    def write(self, name: str, row: Mapping[str, Any]) -> None:
        """Write a row of the table, with protocol, versions and processor."""
        versions = {package: version(package) for package in ("ssvit", "torch")} | _commit()
        shared = {"protocol": self.protocol, "versions": versions, "processor": _processor()}
        atomic_io.replace(self.table / f"{name}.json", (json.dumps({**row, **shared}, indent=1) + "\n").encode())

    def call(self, command: str, options: Sequence[str], *, capture: bool = False) -> str:
        """Run a command in a separate process.

        Ctrl-C reaches the process, and SIGTERM is passed to it. This function returns after it has saved its state.

        Args:
            command: Name of the command.
            options: Options of the command.
            capture: Whether to return the standard output.

        Returns:
            The standard output; "" if it is not captured.

        Raises:
            Failure: With the exit status, if the command fails.
        """
        threads = {"OMP_NUM_THREADS": str(self.options.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        process = subprocess.Popen(
            [sys.executable, "-m", "ssvit", command, *self.line.flags, *options, f"outputs={text_of(self.folder)}"],
            env={**os.environ, **threads},
            stdout=subprocess.PIPE if capture else None,
            text=True,
        )
        former = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, former)
        if (status := process.returncode) < 0:  # ended by a signal
            status = 128 - status
        if status:
            reason = _SIGNALS.get(status, "failed")
            raise Failure(f"{command} {' '.join(options)}: {reason}; the same command continues the study", status)
        return output or ""


def _commit() -> dict[str, str]:
    """Return the commit of the code, if it is a checkout of git."""
    root = Path(__file__).parents[2]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        if (root / ".git").exists():
            head = ["git", "-C", str(root), "rev-parse", "HEAD"]
            return {"commit": subprocess.run(head, capture_output=True, check=True, text=True).stdout.strip()}
    return {}


def _processor() -> str:
    """Return the name of the processor; "" if the system does not have it."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1]
    return platform.processor()


def _of_figures(options: Sequence[str]) -> list[str]:
    """Return the options that affect results."""
    return [option for option in options if not option.startswith(_ELSEWHERE)]


def _ordered(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with their options in alphabetical order; that of the command line does not matter."""
    return {**settings, "options": sorted(settings["options"])}


def recipe_options(steps: int, seed: int, cost: Mapping[str, Any]) -> list[str]:
    """Return the recipe options of a pre-training run, with at most ten evaluations.

    Args:
        steps: Number of steps.
        seed: Seed of the run.
        cost: Cost of a step, whose backend and batch size the run uses too.

    Returns:
        The options.
    """
    options = {**schedule(steps), "seed": seed, "backend": cost["backend"], "batch_size": cost["images"]}
    return [*(f"recipe.{key}={value}" for key, value in options.items()), f"probing.every={options['evaluate_every']}"]
