"""A training run built from its configuration, for the tools that train. Loading this module loads torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from launch import storable
from omegaconf import DictConfig, OmegaConf
from pretrained import SCRATCH, from_scratch

from ssvit.data.loader import Loader
from ssvit.data.sources import Data, hold_out, subset
from ssvit.evaluation.base import Evaluator
from ssvit.evaluation.probing import Probing
from ssvit.evaluation.probing_rules import interval
from ssvit.options import UserError
from ssvit.randomness import key
from ssvit.training import engine, journal, loop, manifest
from ssvit.training.recipe import Recipe
from ssvit.training.run import RunFolder, is_main_process


class Session:
    """The runs of one command, of one stage, which share the processes and the images."""

    def __init__(self, config: DictConfig, folder: Path, *, stage: str) -> None:
        self.config, self.folder, self.stage = config, folder, stage
        self.fabric = engine.start(Recipe(**OmegaConf.to_object(config.recipe)), **config.fabric)
        with engine.together():
            self._data: Data = instantiate(config.data.source, _convert_="all")

    @engine.together()
    def run(self, name: str, changes: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Train in a subfolder under a configuration changed at some dotted options; returns the rows of metrics."""
        config = self.config.copy()
        for option, value in changes.items():
            OmegaConf.update(config, option, value)
        if config.checkpoint == SCRATCH:
            config = from_scratch(config)
        folder = RunFolder(str(self.folder), name)
        if is_main_process():
            folder.open(storable(config), overwrite=config.overwrite)
        self.fabric.barrier()  # nobody looks for checkpoints in a folder that is being cleared
        self.train(config, folder.path)
        return journal.rows(folder.path)

    @engine.together()
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
            device=self.fabric.device,
        )
        view = instantiate(config.data.view, _convert_="all")
        evaluators = {
            name: instantiate(part, source=data.held_out, transform=view, _convert_="all")
            for name, part in config.evaluators.items()
        } | self._probes(config, data, view)
        start = SCRATCH
        if "path" in config.encoder:
            start = manifest.read(Path(config.encoder.path), _plain(config.encoder))["seal"]
        facts = objective.facts | {
            "stage": self.stage,
            "start": start,
            "data": data.train.fingerprint,
            "view": {name: value for name, value in _plain(config.data.view).items() if name != "_target_"},
            "precision": engine.precision(recipe, self.fabric.device),
        }
        loop.train(self.fabric, objective, loader, recipe, folder, evaluators=evaluators, facts=facts)

    def _probes(self, config: DictConfig, data: Data, view: Any) -> dict[str, Evaluator]:
        """The probes of a pre-training run, as far as its images suffice for them."""
        if not config.get("probe"):
            return {}
        options = _plain(config.probing)
        options["every"] = interval(
            options["every"],
            images=min(options["train_images"], len(data.train)) + min(options["test_images"], len(data.held_out)),
            **{name: config.recipe[name] for name in ("steps", "batch_size", "evaluate_every")},
        )
        probes = instantiate(config.probe, _convert_="all")
        probing = Probing(probes=probes, train=data.train, test=data.held_out, transform=view, **options)
        if is_main_process():
            for line in probing.refused:
                print(line, flush=True)
        return {"probe": probing} if probing.probes else {}

    def _parted(self, config: DictConfig) -> Data:
        """The images that a run trains on and is measured on."""
        train = subset(self._data.train, **_plain(config.subset))
        if config.development is None:
            return Data(train, self._data.held_out, self._data.classes)
        return Data(*hold_out(train, fraction=config.development, seed=0), self._data.classes)

    def _classes(self, data: Data) -> list[str]:
        if data.train.labels is None or data.held_out.labels is None:
            raise UserError(
                "the images have no labels to learn: give each class a folder of its own, or another data set (data=…)"
            )
        return list(data.classes)


def _plain(node: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(node, resolve=True)
