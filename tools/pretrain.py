"""Pre-train a Vision Transformer without labels: python tools/pretrain.py objective=masked_patch

Every option stands in configs/; give any as group=choice or group.option=value. The same command again goes on where
the run was stopped.
"""

from typing import Any

from launch import launch
from omegaconf import DictConfig

from ssvit.training import preflight
from ssvit.training.run import RunFolder, is_main_process


def main(config: DictConfig, plain: dict[str, Any]) -> None:
    """Check the configuration, take the run folder, and only then load torch, build and train."""
    recipe = preflight.check(plain)
    folder = RunFolder(plain["outputs"], plain["name"])
    if is_main_process():
        folder.open(plain, overwrite=plain["overwrite"])

    from hydra.utils import instantiate

    from ssvit.data.loader import Loader
    from ssvit.training import engine, loop

    fabric = engine.start(recipe, **plain["fabric"])
    data = instantiate(config.data.source, _convert_="all")
    objective = instantiate(config.objective, _convert_="all")
    loader = Loader(
        source=data.train,
        transform=instantiate(config.data.augment, _convert_="all"),
        seed=recipe.seed,
        batch_size=recipe.batch_size,
        accumulate=recipe.accumulate,
        rank=fabric.global_rank,
        world=fabric.world_size,
        workers=plain["workers"],
        device=fabric.device,
    )
    view = instantiate(config.data.view, _convert_="all")
    evaluators = {
        name: instantiate(part, source=data.held_out, transform=view) for name, part in config.evaluators.items()
    }
    facts = {
        "encoder": objective.encoder.arguments,
        "data": data.train.fingerprint,
        "precision": engine.precision(recipe, fabric.device),
    }
    loop.train(fabric, objective, loader, recipe, folder.path, evaluators=evaluators, facts=facts)


if __name__ == "__main__":
    launch("pretrain", main)
