"""Build training runs from their configuration, for the commands that train. Loading this module imports torch."""

import contextlib
import functools
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ssvit.checkpoints.checkpoint import FINETUNE, PRETRAIN
from ssvit.checkpoints.configuration import Configuration
from ssvit.checkpoints.run_folder import FLOPS, RunFolder, discard_former, rows
from ssvit.config.declaration import Options
from ssvit.data import fingerprints
from ssvit.data.loader import Loader
from ssvit.data.sources.base import Data, Source, missing_labels, subset
from ssvit.data.sources.base_options import NO_MASKS, PERMUTATION
from ssvit.engine.clock import cpu_time
from ssvit.engine.processes import is_main_process
from ssvit.engine.randomness import key
from ssvit.errors import UserError, print_lines, within
from ssvit.evaluation.evaluators.base import Evaluator
from ssvit.evaluation.evaluators.online import Probing
from ssvit.evaluation.evaluators.options import Probing as ProbingOptions
from ssvit.evaluation.features import Frozen, timed
from ssvit.evaluation.options import Features
from ssvit.evaluation.probes.options import Ridge
from ssvit.kernels.inference import resolved
from ssvit.models.lora import restrict
from ssvit.objectives.base import Objective
from ssvit.training import launch, loop, runtime
from ssvit.training.estimate import Estimate, Recipes, estimate, flops_of_step
from ssvit.training.evaluators import build_evaluators
from ssvit.training.loggers.base import Logger
from ssvit.training.options import Pretrain, Training
from ssvit.training.recipe import Recipe
from ssvit.training.state import State

_FIGURES = 2.5  # CPU seconds of the figures of a run, roughly
_REPORT = 6.0  # CPU seconds of the probes, the figures and the page of an evaluation, roughly


class Session:
    """Run the training stages of one command, which share the processes and the images.

    Args:
        options: Options of a run of the command: its recipe, devices and images.
        folder: Folder of all runs of the command.
        stage: Stage in the identity of each run: pretrain or finetune.

    Attributes:
        recipes: Function that returns the recipes of all runs in their order, as for `estimate`; None for a single run.
        compared_steps: Number of updates of a further run, with which frozen features are compared.
    """

    def __init__(self, options: Training, folder: Path, *, stage: str) -> None:
        self.folder, self.stage, self.compared_steps = folder, stage, 0
        self.recipes: Recipes | None = None
        self._began, self._runs, self._expected, self._is_announced = cpu_time(), 0, 1, False
        self.processes = launch.start(options.recipe, options.launch)
        with runtime.detect_lost_peers():
            self._data: Data = options.build_part("data")
        if self._data.summary and is_main_process():
            notes = [] if options.objective.needs_masks else [options.data.view.note]  # windows cover whole images
            print_lines(self._data.summary, *notes)

    def data(self, options: Training) -> Data:
        """Return the images of a run."""
        with within("subset"):
            data = replace(self._data, train=subset(self._data.train, **dict(options.subset)))
        return data.for_development(options.development)

    @property
    def labelled(self) -> bool:
        """Return whether the training images have labels."""
        return self._data.train.labels is not None

    @runtime.detect_lost_peers()
    def run(self, name: str, options: Training, configuration: Configuration) -> list[dict[str, Any]]:
        """Train a run in a subfolder, with its configuration as config.yaml, and return its rows of metrics."""
        with RunFolder(str(self.folder), name) as folder:
            if is_main_process():
                folder.open(configuration, overwrite=options.overwrite)
            self.processes.barrier()  # no process may look for checkpoints while rank 0 clears the folder
            self.train(options, folder.path)
            self.processes.barrier()  # rank 0 has written all rows
        return rows(folder.path)

    @runtime.detect_lost_peers()
    def frozen(self, options: Training) -> tuple[float, int] | None:
        """Return the accuracy of ridge regression on the initial features, and its images; None if it is not defined.

        It is trained on the training images of a run and measured on its held-out images.
        """
        _, data, objective, _ = self.build(options)
        test = data.validation_or_test
        probing = Probing(
            ProbingOptions(train_images=len(data.train), test_images=len(test)),
            probes={"ridge": Ridge().build()}, train=data.train, test=test, transform=options.data.view.build(),
        )  # fmt: skip
        return (probing.measure(objective)["ridge"], len(test)) if probing.probes else None

    @runtime.detect_lost_peers()
    def estimate(self, options: Training) -> Estimate:
        """Return the time and memory of a run; nothing is trained or written."""
        with contextlib.redirect_stdout(io.StringIO()):  # the lines that the start of a run prints
            recipe, data, objective, loader = self.build(options)
            evaluators = build_evaluators(options, data)
        return self._estimate(options, State(self.processes, objective, recipe), loader, evaluators)

    def _estimate(
        self, options: Training, state: State, loader: Loader, evaluators: Mapping[str, Evaluator], first_step: int = 0
    ) -> Estimate:
        """Return the time and memory of the runs that have not finished, and of the comparison after them."""

        def remaining(seconds: float) -> Sequence[Recipe]:
            recipes = [state.recipe] if self.recipes is None else self.recipes(seconds)
            self._expected = len(recipes)
            return recipes[self._runs :]

        ending = functools.partial(self._ending, options, loader.source)
        return estimate(state, loader, evaluators, recipes=remaining, first_step=first_step, ending=ending)

    def others(self, options: Training) -> list[Options]:
        """Return the encoders with which pre-training compares its result: its start and the teacher."""
        if not (isinstance(options, Pretrain) and options.probes and self.labelled):
            return []
        start = options.encoder if options.encoder.checkpoint() else None
        return [part for part in (start, options.objective.reference) if part is not None]

    def _ending(self, options: Training, source: Source, step: float) -> float:
        """Return the seconds of figures and comparisons, from the seconds of an update."""
        others = self.others(options)
        drawn = _FIGURES * (self._expected - self._runs) * (options.figures != "none")
        if not others or not isinstance(options, Pretrain):
            return drawn + self.compared_steps * step
        sizes, test = options.probing, self._data.test_or_validation[1]
        images = min(sizes.train_images, len(source)) + min(sizes.test_images, len(test))
        device, seconds = self.processes.device, drawn + _REPORT
        for part in (options.encoder, *others):
            encoder = part.build()
            function = Frozen(encoder, Features(layer="all").specs(encoder.arguments), identity="")
            function.prepare(device, resolved("auto", device))
            view = options.data.view.for_size(encoder.image_size).build()
            seconds += images * timed(function, source, view, device=device)[0]
        return seconds

    @runtime.detect_lost_peers()
    def preview(self, options: Training) -> None:
        """Print sizes, time and memory of a run; nothing is trained or written."""
        recipe, data, objective, loader = self.build(options)
        state = State(self.processes, objective, recipe)
        line = self._estimate(options, state, loader, build_evaluators(options, data)).line
        parameters = {
            "encoder": objective.encoder.parameters(),
            "objective": objective.parameters(),
            "trained": (parameter for parameter in objective.parameters() if parameter.requires_grad),
        }
        sizes = (f"{name} {sum(map(Tensor.numel, part)) / 1e6:.2f} million" for name, part in parameters.items())
        epochs = recipe.steps * recipe.batch_size / len(data.train)
        if is_main_process():
            print_lines(
                f"parameters: {', '.join(sizes)}",
                f"images: {len(data.train)} for training, {len(data.validation_or_test)} held out",
                f"steps: {recipe.steps} of {recipe.batch_size} images, {epochs:.1f} epochs",
                f"devices: {self.processes.world} x {self.processes.device.type}",
                line,
            )

    @runtime.detect_lost_peers()
    def train(self, options: Training, folder: Path) -> None:
        """Build a run, and train it in an open folder from its newest checkpoint."""
        recipe, data, objective, loader = self.build(options)
        images, view = options.data, options.data.view.values()
        if view["size"][0] == view["size"][1]:
            view["size"] = view["size"][0]  # as in runs of former versions
        recorded = False
        if self.processes.is_main:
            start = options.encoder.checkpoint()
            initial = start and start.run_folder
            recorded = fingerprints.start(folder, len(loader.source) if loader.records else 0, initial)
        compares = self.processes.any_process(recorded) and self.stage == FINETUNE
        evaluators = build_evaluators(options, data, folder if compares else None)
        run_identity = objective.metadata | {
            "stage": self.stage,
            "start": objective.encoder.origin,
            "images": len(data.train),
            "data": data.train.fingerprint,
            "contents": data.train.contents,
            **({} if loader.order == PERMUTATION else {"order": loader.order}),
            **{name: value for name in ("range", "background") if (value := getattr(images, name, None))},
            "view": view,
            "precision": self.processes.precision,
            **({"recipe.accumulate": recipe.accumulate} if options.objective.needs_distinct_images else {}),
        }
        # All processes count, since objectives may exchange features between them.
        is_new = not self.processes.any_process(self.processes.is_main and any(folder.glob("step_*")))
        costs = {FLOPS: flops_of_step(objective, loader, recipe)} if is_new else {}
        for written in {folder, self.folder} if self.processes.is_main else ():
            discard_former(written)
        trained = loop.train(
            self.processes,
            objective,
            loader,
            recipe,
            folder,
            evaluators=evaluators,
            run_identity=run_identity,
            loggers=self._loggers(options, folder) if self.processes.is_main else (),
            figures=options.figures,
            announced=None if self._is_announced else functools.partial(self._estimate, options),
            costs=costs,
        )
        self._is_announced |= trained  # the estimate is printed once
        self._runs += 1
        if self._is_announced and self._runs == self._expected > 1 and is_main_process():
            print_lines(f"CPU time of {self._runs} runs: {self.spent}")

    @property
    def spent(self) -> str:
        """Return the CPU time of all runs of the session as text."""
        return tqdm.format_interval(cpu_time() - self._began)

    def end(self) -> None:
        """End the communication between the processes, each of which continues independently."""
        launch.destroy_process_group()

    def _loggers(self, options: Training, folder: Path) -> list[Logger]:
        """Build the loggers of a run. Its name is the path of its folder below the parent of the command's folder."""
        name = str(folder.relative_to(self.folder.parent))
        run = {"folder": folder, "name": name, "hyperparameters": options.values()}
        return [logger.build(**run) for logger in options.logger.values()]

    def build(self, options: Training) -> tuple[Recipe, Data, Objective, Loader]:
        """Build the recipe, the data, the objective with its initial weights, and the data loader of a run.

        Returns:
            The recipe with the chosen backend, the data, the objective and the loader.

        Raises:
            UserError: The objective requires labels, and the data set has none.
        """
        images, recipe, data = options.data, options.recipe, self.data(options)
        torch.manual_seed(key(recipe.seed, "weights"))
        objects: dict[str, object] = {}
        if options.objective.needs_labels:
            if missing := missing_labels(data.train, validation=data.validation, test=data.test):
                raise UserError(missing)
            if len(data.classes) < 2:
                raise UserError(f"fine-tuning requires two or more classes; the only one is {data.classes[0]}")
            objects = {"classes": list(data.classes), "labels": data.train.labels}
        if options.objective.needs_masks:
            if not data.train.mask_classes:
                raise UserError(f"{data.train.name(0)} {NO_MASKS}")
            objects = {"classes": [*data.train.mask_classes], "masks": data.train}
        if options.objective.needs_image_count:
            objects["images"] = len(data.train)
        continuation = options.continuation if isinstance(options, Pretrain) else None
        if continuation is not None:
            objects["encoder"] = restrict(options.encoder.build(), continuation.trained, continuation.lora)
        objective = build_objective(options, **objects)
        if continuation is not None:
            objective = continuation.build(objective=objective)
        backend, reason = runtime.backend(self.processes.device, self.processes.world, recipe, objective.encoder)
        if recipe.backend == "auto" and is_main_process():
            print_lines(f"recipe.backend=auto: {backend} ({reason})")
        recipe = recipe.changed(backend=backend)
        transform = options.build_part("data.augment")
        with within("recipe"):
            loader = Loader(
                source=data.train,
                transform=transform,
                seed=recipe.seed,
                batch_size=recipe.batch_size,
                accumulate=recipe.accumulate,
                repeats=recipe.repeats,
                rank=self.processes.rank,
                world=self.processes.world,
                order=images.order,
                workers=options.workers,
                timeout=options.loader_timeout,
                device=self.processes.device,
                masks=options.objective.needs_masks,
                records=self.stage == PRETRAIN,
            )
        return recipe, data, objective, loader


def build_objective(options: Training, **objects: object) -> Objective:
    """Build the objective of a run with its encoder and, if its options set `needs_target`, its target.

    Args:
        options: Options of the run.
        objects: Further arguments of the objective's constructor. An encoder or a target among them is not built.
    """
    if "encoder" not in objects:
        objects["encoder"] = options.build_part("encoder")
    if options.objective.needs_target and "target" not in objects:
        objects["target"] = options.build_part("target", encoder=objects["encoder"])
    objective: Objective = options.build_part("objective", **objects)
    return objective
