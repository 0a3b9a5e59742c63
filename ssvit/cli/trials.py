"""The commands that a study of many runs calls, each in a process of its own, and the rows that it makes of them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ssvit import atomic_io
from ssvit.config.command_line import Plain
from ssvit.config.composed import Config
from ssvit.config.declaration import Run
from ssvit.data.source_options import NO_LABELS, DataSet
from ssvit.evaluation import methods
from ssvit.options import Failure, OptionError, UserError, whole

_ELSEWHERE = ("data.root", "workers", "loader_timeout", "fabric")  # options that change no figure
_SUBSET = "subset.images="
_PROBES = "probes="  # which of them there are: none changes another's figures
_REPORTED = ("test/accuracy", "validation/accuracy", "test/map", "validation/map")


def check(plain: Plain, names: Sequence[str] = ()) -> None:
    """OptionError unless the options that every study has are right; names: further lists of options."""
    for name in ("seeds", "threads"):
        whole(name, plain[name])
    whole("seed", plain["seed"], at_least=0)
    for name in ("pretrain", "evaluate", "finetune", *names):
        if not isinstance(plain[name], list):
            raise OptionError(name, plain[name], "must be a list of options")


def check_images(config: Config, *, most: int = 0) -> None:
    """UserError unless there are labels, and as many images to train on as a run of the study is to have.

    most: images of a pre-training, as the option "images" says; those of fine-tuning are in its own options.
    """
    plain = config.values
    source = Run.of(plain).source
    known = source if isinstance(source, DataSet) else DataSet()
    option = next((option for option in reversed(plain["finetune"]) if str(option).startswith(_SUBSET)), _SUBSET)
    tuned = option.removeprefix(_SUBSET)
    wanted = {("images", most): most, ("finetune", option): int(tuned) if tuned.isdigit() else 0}
    labelled, there = known.labelled, known.count(at_most=max(wanted.values()))
    if labelled is None or (there is None and any(wanted.values())):  # the images themselves tell
        train = config.build("data.source").train
        labelled, there = train.labels is not None, len(train)
    if not labelled:
        raise UserError(NO_LABELS)
    for (name, value), images in wanted.items():
        if there is not None and images > there:
            raise OptionError(name, value, f"there are {there} images to choose from")


class Trials:
    """The runs of a study and its table. own: options of the study itself; every other typed one goes to pre-training.

    protocol: what is alike in all rows. OptionError if the table has rows of another one; they may have other probes.
    """

    def __init__(self, config: Config, own: Sequence[str], protocol: Mapping[str, Any]) -> None:
        self.plain = plain = config.values
        self.line = config.line
        self.folder = Path(plain["outputs"], str(plain["name"]))
        self.table = Path(plain["table"] or self.folder / "table")
        forwarded = [option for option in config.overrides if re.split(r"[=.@]", option.lstrip("+"))[0] not in own]
        self.pretraining = [*plain["pretrain"], *forwarded]
        self.protocol = {
            "data": config.choices["data"],
            **protocol,
            "options": _of_figures(self.pretraining),
            "evaluate": plain["evaluate"],
            "finetune": plain["finetune"],
            "threads": plain["threads"],
        }
        for name, row in methods.read(self.table).items():
            theirs, ours = _without_probes(row["protocol"]), _without_probes(self.protocol)
            if different := next((key for key in ours if theirs.get(key) != ours[key]), None):
                found = row["protocol"].get(different)
                raise OptionError("table", str(self.table), f"has {name}.json of another protocol: {different} {found}")
        for folder in (self.folder, self.table):
            folder.mkdir(parents=True, exist_ok=True)

    def cost(self, name: str, options: Sequence[str], alike: Sequence[str] | None = None) -> dict[str, Any]:
        """What a step of a pre-training costs: measured once, then read, until options or threads change.

        name: of its file. alike: the options that all runs of it share, if they are not `options`.
        """
        file = self.table / "costs" / f"{name}.json"
        of = {"options": _of_figures(options if alike is None else alike), "threads": self.plain["threads"]}
        found = json.loads(file.read_text()) if file.is_file() else None
        if found is None or found.get("measured_with") != of:
            print(f"measuring a step of {' '.join(options)}", flush=True)
            found = json.loads(self.call("cost", options, capture=True).splitlines()[-1]) | {"measured_with": of}
            file.parent.mkdir(exist_ok=True)
            atomic_io.replace(file, (json.dumps(found) + "\n").encode())
        return {key: value for key, value in found.items() if key != "measured_with"}

    def evaluated(self, run: str, name: str, *, baselines: bool) -> dict[str, Any]:
        """The report of an evaluation of a run."""
        output = self.folder / f"{name}_evaluation"
        own = [f"checkpoint={run}", f"output={output}", f"baselines={str(baselines).lower()}", "cache=null"]
        self.call("evaluate", [*self.plain["evaluate"], *own])
        return json.loads((output / "report.json").read_text())

    def finetuned(self, checkpoint: str, name: str, seed: int) -> dict[str, float]:
        """The accuracy after fine-tuning, unless there is to be none."""
        if not self.plain["finetune"]:
            return {}
        name = f"{name}_finetuned"
        own = [f"checkpoint={checkpoint}", f"name={name}", f"recipe.seed={seed}"]
        self.call("finetune", [*self.plain["finetune"], *own])
        return {"finetuned": self.tested(name)}

    def tested(self, name: str) -> float:
        """The accuracy at the end of a run that learned from labels."""
        return [row[key] for row in self.history(name) for key in row if key in _REPORTED][-1]

    def history(self, name: str) -> list[dict[str, Any]]:
        """The rows of metrics of a run."""
        from ssvit.training import metrics_log

        return metrics_log.rows(self.folder / name)

    def write(self, name: str, row: Mapping[str, Any]) -> None:
        """Write a row of the table, with the protocol and the versions."""
        shared = {"protocol": self.protocol, "versions": {one: version(one) for one in ("ssvit", "torch")}}
        atomic_io.replace(self.table / f"{name}.json", (json.dumps({**row, **shared}, indent=1) + "\n").encode())

    def call(self, command: str, options: Sequence[str], *, capture: bool = False) -> str:
        """Run a command in a process of its own; Failure with its status if it fails, after its own line.

        Ctrl-C reaches it too, and it may take its time to save.
        """
        threads = {"OMP_NUM_THREADS": str(self.plain["threads"]), "OMP_WAIT_POLICY": "PASSIVE"}
        process = subprocess.Popen(
            [sys.executable, "-m", "ssvit", command, *self.line.flags, *options, f"outputs={self.folder}"],
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


def _of_figures(options: Sequence[str]) -> list[str]:
    """Those options that change a figure."""
    return [option for option in options if not option.startswith(_ELSEWHERE)]


def _without_probes(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """A protocol without its list of probes."""
    options = protocol.get("evaluate", [])
    return {**protocol, "evaluate": [option for option in options if not option.startswith(_PROBES)]}


def schedule(steps: int, seed: int) -> list[str]:
    """The options of a pre-training of so many steps: a twentieth of them as warm-up, ten evaluations."""
    tenth = max(1, steps // 10)
    numbers = {
        "steps": steps, "warmup": steps // 20, "evaluate_every": tenth, "save_every": tenth,
        "log_every": max(1, steps // 100), "seed": seed,
    }  # fmt: skip
    return [*(f"recipe.{key}={value}" for key, value in numbers.items()), f"probing.every={tenth}"]
