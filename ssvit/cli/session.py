"""A training run built from its configuration, for the tools that train. Loading this module loads torch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.run_folder import RunFolder, is_main_process
from ssvit.cli.launch import configuration
from ssvit.cli.pretrained import SCRATCH, brought, from_scratch
from ssvit.data.loader import Loader
from ssvit.data.options import NO_LABELS
from ssvit.data.source import Data, subset
from ssvit.evaluation.base import Evaluator
from ssvit.evaluation.online import Probing
from ssvit.evaluation.options import interval
from ssvit.options import UserError
from ssvit.randomness import key
from ssvit.training import loop, metrics_log, runtime
from ssvit.training.recipe import Recipe


class Session:
    """The runs of one command, of one stage, which share the processes and the images."""

    def __init__(self, config: DictConfig, folder: Path, *, stage: str) -> None:
        self.config, self.folder, self.stage = config, folder, stage
        self.fabric = runtime.start(Recipe(**OmegaConf.to_object(config.recipe)), **config.fabric)
        with runtime.together():
            self._data: Data = instantiate(config.data.source, _convert_="all")
        if self._data.told and is_main_process():
            print(self._data.told, flush=True)

    @runtime.together()
    def run(self, name: str, changes: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Train in a subfolder under a configuration changed at some dotted options; returns the rows of metrics."""
        config = self.config.copy()
        for option, value in changes.items():
            OmegaConf.update(config, option, value)
        if config.checkpoint == SCRATCH:
            config = from_scratch(config)
        folder = RunFolder(str(self.folder), name)
        if is_main_process():
            folder.open(configuration(config, brought()), overwrite=config.overwrite)
        self.fabric.barrier()  # nobody looks for checkpoints in a folder that is being cleared
        self.train(config, folder.path)
        return metrics_log.rows(folder.path)

    @runtime.together()
    def train(self, config: DictConfig, folder: Path) -> None:
        """Build what a configuration describes and train it in a folder that is open, going on from what is there."""
        recipe = Recipe(**OmegaConf.to_object(config.recipe))
        data = self._parted(config)
        torch.manual_seed(key(recipe.seed, "weights"))
        own = {"classes": self._classes(data)} if "classes" in config.objective else {}
        objective = instantiate(config.objective, **own, _convert_="all")
        loader = Loader(
            source=data.train,
            transform=instantiate(config.data.augment, _convert_="all"),
            seed=recipe.seed,
            batch_size=recipe.batch_size,
            accumulate=recipe.accumulate,
            rank=self.fabric.global_rank,
            world=self.fabric.world_size,
            workers=config.workers,
            timeout=config.loader_timeout,
            device=self.fabric.device,
        )
        view = instantiate(config.data.view, _convert_="all")
        evaluators = self._evaluators(config, data, view) | self._probes(config, data, view)
        start = SCRATCH
        if "path" in config.encoder:
            start = Checkpoint.open(config.encoder.path, _plain(config.encoder)).checksum
        facts = objective.facts | {
            "stage": self.stage,
            "start": start,
            "data": data.train.fingerprint,
            "view": {name: value for name, value in _plain(config.data.view).items() if name != "_target_"},
            "precision": runtime.precision(recipe, self.fabric.device),
        }
        loop.train(self.fabric, objective, loader, recipe, folder, evaluators=evaluators, facts=facts)

    def _evaluators(self, config: DictConfig, data: Data, view: Any) -> dict[str, Evaluator]:
        """What the configuration names. `test` is measured on the test images at the end alone, and on the validation
        images as training goes on; on one of them for both, under its name, where the other is missing.
        """
        made: dict[str, Evaluator] = {}
        for name, part in config.evaluators.items():
            if name != "test":
                made[name] = _builder(part)(source=data.watched, transform=view)
                continue
            for own, source in (("validation", data.validation), ("test", data.test)):
                if source is not None:
                    made[own] = _builder(part)(source=source, transform=view, part=own)
            if data.validation is not None and data.test is not None:
                made["test"].at_end = True
        return made

    def _probes(self, config: DictConfig, data: Data, view: Any) -> dict[str, Evaluator]:
        """The probes of a pre-training run, as far as its images suffice for them."""
        if not config.get("probe"):
            return {}
        options = _plain(config.probing)
        options["every"] = interval(
            options["every"],
            images=min(options["train_images"], len(data.train)) + min(options["test_images"], len(data.watched)),
            **{name: config.recipe[name] for name in ("steps", "batch_size", "evaluate_every")},
        )
        probes = {name: instantiate(part, _convert_="all") for name, part in config.probe.items()}
        probing = Probing(probes=probes, train=data.train, test=data.watched, transform=view, **options)
        if is_main_process():
            for line in probing.refused:
                print(line, flush=True)
        return {"probe": probing} if probing.probes else {}

    def _parted(self, config: DictConfig) -> Data:
        """The images that a run trains on and is measured on."""
        train = subset(self._data.train, **_plain(config.subset))
        data = replace(self._data, train=train)
        return data if config.development is None else data.without_test(config.development)

    def _classes(self, data: Data) -> list[str]:
        parts = (data.train, data.validation, data.test)
        if any(part is not None and part.labels is None for part in parts):
            raise UserError(NO_LABELS)
        return list(data.classes)


def _builder(node: DictConfig) -> Callable[..., Any]:
    """What builds a part of a configuration, its options given: Hydra would copy objects that come as more of them."""
    return instantiate(node, _convert_="all", _partial_=True)


def _plain(node: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(node, resolve=True)
