"""Measure images, existing weights and a short pre-training within a budget of CPU time, and name the best.

Each stage writes its results to report.json, and the same command continues after the last measurement.
"""

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader

from ssvit import advice
from ssvit.analysis import defects, images
from ssvit.checkpoints.checkpoint import PRETRAIN
from ssvit.checkpoints.configuration import Configuration
from ssvit.config.command_line import CommandLine
from ssvit.config.composed import Config
from ssvit.data.loader import TOLERATED
from ssvit.data.sources.base_options import DataSet
from ssvit.data.sources.datasets_options import Csv
from ssvit.engine import atomic_io
from ssvit.engine.clock import cpu_time
from ssvit.engine.progress import QUIET, minutes, progress
from ssvit.errors import OptionError, UserError, aligned, one_line, print_lines, printable
from ssvit.evaluation.baselines import PIXELS
from ssvit.evaluation.evaluators.predictions import as_csv
from ssvit.evaluation.features import Pixels
from ssvit.evaluation.measured import keep
from ssvit.evaluation.report.comparison import HEAD, accuracy_table, percent
from ssvit.evaluation.titles import title as title_of
from ssvit.figures.base import Figure
from ssvit.loading.cached import cached_weights
from ssvit.studies.candidates import Candidate, Sample
from ssvit.studies.options import DOWNLOAD, Try
from ssvit.training.budget import schedule, steps_within
from ssvit.training.session import Session
from ssvit.values import text_of

OWN = "your pre-training"
_RUN, _FILE = "pretraining", "report.json"  # folder of the run, and file of the results
_VERSION = 2  # of this file
_FEW = 16  # images that are checked for transparency
_TRAINING = 0.9  # fraction of the remaining time for training; evaluation and the verdict take the rest
_STEPS = 20  # minimum number of steps of the pre-training
_MOST = 20_000  # training images of the pre-training, which checks the content of all its files
_LISTED = 1000  # files in the page
# Options of a table that kept.csv does not need: its columns and splits have the usual names.
_OF_TABLE = {"table", "root", "path", "label", "split", "mask", "train", "validation", "test", "held_out", "seed"}
_CHECK = "a pass over all files, since too many of them cannot be read for training"
_SAMPLE = {"images": "a sample of the training images"}  # captions of sheets
_START = 5.0  # CPU seconds in which a command starts
_LONGER = 1.5  # the budget of the next command, relative to this one
Changes = Mapping[str, object]
Compose = Callable[[str, Changes], Config]


class FirstLook:
    """Measure a set of images in five stages.

    Args:
        options: Options of the command.
        folder: Folder of the results.
        line: The command line.
        compose: Returns the configuration of another command for the images of `line`, from its name and options.
        finetuning: Returns the seconds of fine-tuning with some options.

    Raises:
        UserError: The images cannot be read.
    """

    def __init__(
        self, options: Try, folder: Path, line: CommandLine, compose: Compose, finetuning: Callable[[Changes], float]
    ) -> None:
        self.options, self.folder, self.line, self.began = options, folder, line, cpu_time()
        self.compose, self.finetuning = compose, finetuning
        self.run_options = compose("pretrain", {}).options
        self.session = Session(self.run_options, folder, stage=PRETRAIN)
        if self._vanishes(self.run_options.data):
            line.typed["data.background"] = "white"
            self.run_options = compose("pretrain", {}).options
            with contextlib.redirect_stdout(io.StringIO()):  # the sentences on the images have been printed
                self.session = Session(self.run_options, folder, stage=PRETRAIN)
            print_lines("data.background=white: on black, many of these transparent images would have one colour")
        self.source, self.device = self.run_options.data, self.session.processes.device
        self.data = self.session.data(self.run_options)
        self.sample = Sample(options, self.source, self.data, self.device)
        self.part, test = self.data.test_or_validation
        typed = {name: value for name, value in line.typed.items() if name.partition(".")[0] == "data"}
        chosen = options.train_images, options.test_images, options.precision
        contents = [source.contents for source in self.sample.sources(self.data)]  # sizes alone may stay the same
        images_of = self.data.train.fingerprint, test.fingerprint, contents
        path = printable(Path(options.path).resolve())
        identity = json.dumps([_VERSION, images_of, chosen, typed], default=str)
        self.report: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            self.report = json.loads((folder / _FILE).read_text())
        if self.report.get("identity") != identity:
            if "identity" not in self.report and folder.is_dir() and any(folder.iterdir()):
                raise OptionError("name", folder.name, f"{folder} exists and has no results of ssvit try")
            if (before := self.report.get("path", path)) != path:
                raise OptionError("name", folder.name, f"must be another folder: {folder} has the results of {before}")
            if self.report:
                print_lines(f"{folder}: the results of other images or options are replaced")
                shutil.rmtree(folder / _RUN, ignore_errors=True)
            self.report = {"identity": identity, "path": path, "cpu_seconds": 0.0, "stages": {}, "encoders": {}}
        self.before: float = self.report["cpu_seconds"]
        self._save()

    @property
    def remaining(self) -> float:
        """Return the CPU time that is left in seconds."""
        return max(0.0, self.options.budget - self.before - (cpu_time() - self.began))

    def run(self) -> None:
        """Run all stages; one that fails is reported, and the next one follows."""
        stages = {
            "images": self._images, "raw pixels": self._pixels, "existing weights": self._weights,
            "pre-training": self._pretraining, "verdict": self._verdict,
        }  # fmt: skip
        if self.options.stages == "images":
            stages = {"images": self._images, "files": self._files}
        for number, (name, stage) in enumerate(stages.items(), start=1):
            print_lines(f"{number}/{len(stages)} {name}: {minutes(self.remaining)} left")
            began = cpu_time()
            try:
                stage()
            except UserError as error:
                if getattr(error, "status", 1) > 128 or self.options.stages == "images":  # 128: stopped by a signal
                    raise
                print_lines(f"  not measured: {error}")
            finally:
                self.report["stages"][name] = round(self.report["stages"].get(name, 0.0) + cpu_time() - began, 1)
                self._save()

    def _save(self, **figures: Figure) -> None:
        self.report["cpu_seconds"] = round(self.before + cpu_time() - self.began, 1)
        written = {f"{name}.png": figure.png() for name, figure in figures.items()}
        atomic_io.write_files(self.folder, {**written, _FILE: (json.dumps(self.report, indent=1) + "\n").encode()})

    def _vanishes(self, source: DataSet) -> bool:
        """Return whether many images of a sample have one colour on black, which no option has chosen."""
        if "data.background" in self.line.typed or not getattr(source, "is_photo", False):
            return False
        train = self.session.data(self.run_options).train
        sample = images.read(source, train.take(torch.arange(0, len(train), max(1, len(train) // _FEW)))).images
        return bool((images.spread(sample) < images.UNIFORM).float().mean() > 0.25)

    def _images(self) -> None:
        if "images" not in self.report:
            parts = zip(("train", "test"), self.sample.sources(self.data), strict=True)
            samples = {name: images.read(self.source, source) for name, source in parts}
            self.report["images"] = list(images.describe(self.source, self.data, samples))
            failures = sum(len(sample.failures) for sample in samples.values())
            self.report["unreadable"] = failures / (failures + sum(len(sample.images) for sample in samples.values()))
            self._save(images=images.contact_sheet(self.source, samples["train"]))
        print_lines(*(f"  {line}" for line in self.report["images"]), f"  contact sheet: {self.folder / 'images.png'}")

    def _files(self) -> None:
        """Check all files, and write the page, found.csv with the defects, and kept.csv with the remaining images."""
        every = defects.all_images(self.data)
        found = defects.find(self.source, every, progress("check all files", " images"))
        left_out = {defect.image for defect in found}
        by_reason = {reason: [*of_reason] for reason, of_reason in groupby(found, lambda defect: defect.reason)}
        table = [[*defects.COLUMNS], *([*defect.row] for defect in found)]
        tables, remark = {"found.csv": table}, ""
        try:
            tables["kept.csv"] = defects.kept_table(self.source, [image for image in every if image not in left_out])
            typed = self.line.retyped(rf"data\.({'|'.join(Csv.model_fields.keys() - _OF_TABLE)})($|\.)")
            options = [f"data={text_of(self.folder / 'kept.csv')}", *typed]
            command = advice.written(self.line, "pretrain", options)
        except UserError as error:
            command, remark = self._command("try", *self._same), f"; kept.csv is not written: {error}"
        counts = "".join(f"; {reason}: {len(of_reason):,}" for reason, of_reason in by_reason.items())
        verdict = f"files left out: {len(found):,} of {len(every):,}{counts}{remark}"
        self.report |= {"verdict": verdict, "next": command, "cost": ""}
        by_reason.pop(defects.UNREADABLE, None)
        sheets = {reason: defects.sheet(self.source, of_reason) for reason, of_reason in by_reason.items()}
        self._save(**sheets)
        written = {name: as_csv(rows[0], rows[1:]).encode() for name, rows in tables.items()}
        page = self._page({name: name for name in sheets} | _SAMPLE, table[: _LISTED + 1])
        atomic_io.write_files(self.folder, written | page)
        print_lines(f"page: {self.folder / 'report.html'}")
        advice.print_next(self.report["next"], verdict)

    def _page(self, sheets: Mapping[str, str], table: Sequence[Sequence[str]]) -> dict[str, bytes]:
        """Return the page of the results, with the captions of pictures by name, and a table with its header first."""
        template = Environment(loader=PackageLoader("ssvit.studies"), autoescape=True).get_template("try.html.j2")
        rows = [[one_line(cell) for cell in row] for row in table]
        page = template.render(self.report, path=printable(self.options.path), table=rows, sheets=sheets)
        return {"report.html": page.encode()}

    def _pixels(self) -> None:
        self._measure(Candidate(PIXELS, Pixels(), self.source, self.source.view))

    def _weights(self) -> None:
        paths = [*map(str, cached_weights())] if self.options.weights is None else [*self.options.weights]
        for path in [*paths, *([DOWNLOAD] if self.options.download else [])]:
            try:
                self._measure(self.sample.encoder(path))
            except UserError as error:
                reason = error.expectation if isinstance(error, OptionError) else error
                print_lines(f"  {path}: not measured: {reason}")
        if not self.options.download and not any(row["is_existing"] for row in self.report["encoders"].values()):
            print_lines(f"  no weights were measured; to download {DOWNLOAD}: {self._longer('download=true')}")

    def _pretraining(self) -> None:
        training = self.report.setdefault("training", {})
        if "step" not in training:
            estimate = self.session.estimate(self.run_options)
            training |= {"step": estimate.step, "all_steps": estimate.total}
        affordable = min(steps_within(_TRAINING * self.remaining, step=training["step"]), self.run_options.recipe.steps)
        if affordable >= max(_STEPS, _LONGER * training.get("steps", 0)):  # longer than with a former budget
            shutil.rmtree(self.folder / _RUN, ignore_errors=True)
            training["steps"] = affordable
            self._save()
        if "steps" not in training:
            raise UserError(f"the remaining time suffices for {affordable} steps only; set a larger budget=…")
        name = f"{OWN} ({training['steps']} steps)"
        if name not in self.report["encoders"]:
            logged = max(1, steps_within(QUIET, step=training["step"]))
            changes = {**schedule(training["steps"]), "evaluate_every": training["steps"], "log_every": logged}
            typed = {f"recipe.{name}": value for name, value in changes.items()}
            if len(self.data.train) > _MOST:
                typed["subset.images"] = _MOST
            config = self.compose("pretrain", {**typed, "probes": [], "evaluator": [], "figures": "none"})
            self.session.run(_RUN, config.options, Configuration.of_run(config))
        self._measure(self.sample.encoder(str(self.folder / _RUN), name))

    def _measure(self, candidate: Candidate) -> None:
        """Measure features, or show their neighbours if there are no labels, unless this has been done.

        Raises:
            UserError: Existing weights take more than half of the remaining time.
        """
        name, rows = candidate.name, self.report["encoders"]
        if name in rows and rows[name]["checksum"] != candidate.checksum:  # other weights of this name
            name = f"{name}, {candidate.checkpoint and candidate.checkpoint.path}"
        if name not in rows or rows[name]["checksum"] != candidate.checksum:
            row, figure = self.sample.measure(candidate, self.remaining / 2)
            sheet = f"neighbours_{[*rows, name].index(name) + 1}"
            rows[name] = row if figure is None else row | {"sheet": sheet}
            self._save(**{} if figure is None else {sheet: figure})
        scores = [f"{title} {percent(probe['value'])} %" for title, probe in rows[name]["probes"].items()]
        print_lines(f"  {name}: {', '.join(scores) or self.folder / (rows[name]['sheet'] + '.png')}")

    @property
    def _same(self) -> list[str]:
        """Return the typed options with which this command continues in the same folder."""
        return self.line.retyped("(name|train_images|test_images|weights|precision)$")

    def _command(self, name: str, *options: str) -> str:
        """Return another command for the same images."""
        images = [f"data={self.options.path}", *self.line.retyped(r"data\.(?!root$|table$)")]
        return advice.written(self.line, name, [*options, *images])

    def _longer(self, *options: str) -> str:
        """Return this command with further options and a larger budget."""
        seconds = _LONGER * self.options.budget
        budget = f"budget={seconds:.0f}s" if seconds < 60 else f"budget={seconds / 60:g}min"
        return self._command("try", *self._same, *options, budget)

    def _verdict(self) -> None:
        rows = self.report["encoders"]
        if not rows:
            raise UserError("nothing was measured")
        weights = [name for name, row in rows.items() if row["is_existing"]]
        if self.sample.labelled:
            ranked = sorted(rows.items(), key=lambda row: sorted(-one["value"] for one in row[1]["probes"].values()))
            best = ranked[0][0]
            kept = {
                name: {title_of(of.split()[0]): (one["value"], one["balanced"]) for of, one in row["probes"].items()}
                for name, row in ranked
            }
            table = accuracy_table(kept, f"{rows[best]['images']} {self.part} images")
            print_lines(*(f"  {line}" for line in aligned(table, letters=HEAD)))
            paths = {name: row["path"] or "" for name, row in ranked}
            (train, test), outputs = self.sample.sources(self.data), self.options.outputs
            verdict, _ = keep(outputs, test, self.part, kept, train_images=len(train), paths=paths)
        else:
            best, table = (weights or [*rows])[-1], []
            compared = ", ".join(f"{row['sheet']}.png ({name})" for name, row in rows.items())
            verdict = f"without labels of two or more classes, nothing is ranked: compare {compared}"
        try:
            command, cost = self._next(best, bool(weights))
        except UserError as error:
            command, cost = self._longer(), f"fine-tuning was not estimated: {error}"
        self.report |= {"verdict": verdict, "next": command, "cost": cost}
        neighbours = {row["sheet"]: f"nearest neighbours: {name}" for name, row in rows.items() if "sheet" in row}
        atomic_io.write_files(self.folder, self._page(_SAMPLE | neighbours, table))
        print_lines(f"page: {self.folder / 'report.html'}", f"cost of the next command: {cost}")
        advice.print_next(command, verdict)

    def _next(self, best: str, has_weights: bool) -> tuple[str, str]:
        """Return the next command and its cost.

        Args:
            best: Name of the best encoder, or of the one to use if there are no labels.
            has_weights: Whether existing weights were measured.
        """
        if self.report.get("unreadable", 0.0) > TOLERATED:
            return self._command("try", *self._same, "stages=images"), _CHECK
        row = self.report["encoders"][best]
        more = f"at most {minutes((_LONGER - 1) * self.options.budget)} more"
        if not has_weights and self.options.weights:
            return self._longer(), more
        if not has_weights and not self.options.download:
            return self._longer("download=true"), f"{more}, and a download of 88 MB"
        command, changes, seconds = "pretrain", {}, self.report["training"].get("all_steps")
        if row["is_existing"] and self.sample.labelled:
            command, changes = "finetune", {"checkpoint": row["path"]}
            seconds = self.finetuning(changes)
        elif row["is_existing"]:
            parts = self.data.train, self.data.validation, self.data.test
            command, seconds = "embed", row["cost"] * sum(len(part) for part in parts if part)
            changes = {"checkpoint": row["path"], "image_size": row["image_size"], "output": "features.npz"}
        cost = f"about {minutes(_START + seconds)}" if seconds else "unknown"  # the run cannot be built
        return self._command(command, *self.line.written(changes)), cost
