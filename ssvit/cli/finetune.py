"""Turn what a pre-training run left into a classifier: ssvit finetune

By default the newest finished run under outputs/, on its images. The same command again goes on with the run.
"""

from pathlib import Path

from omegaconf import DictConfig

from ssvit.checkpoints.checkpoint import FINETUNE
from ssvit.checkpoints.run_folder import RunFolder, is_main_process
from ssvit.cli.launch import ALIASES, Plain, Tool, announce, job_name
from ssvit.cli.pretrained import SCRATCH, configuration, default_name, from_scratch, offer_again
from ssvit.training import comparison, preflight


def run(config: DictConfig, plain: Plain) -> Path:
    """Check the configuration and take the run folder; then load torch, build and train. Returns the folder."""
    recipe = preflight.check(plain)
    comparison.check(plain)
    config.name = job_name(str(default_name(config) if plain["name"] is None else plain["name"]))
    if plain["checkpoint"] == SCRATCH:
        config = from_scratch(config)
    with RunFolder(config.outputs, config.name) as folder:
        if is_main_process():
            folder.open(configuration(config), overwrite=config.overwrite)
            announce()
            print(f"{config.name}: starts from {config.encoder.get('path', 'random weights')}", flush=True)

        from ssvit.cli.session import Session

        session = Session(config, folder.path, stage=FINETUNE)
        if plain["compare"]:
            comparison.compare(session.run, seed=recipe.seed, seeds=plain["seeds"], folder=folder.path)
        elif plain["sweep"]:
            comparison.choose(session.run, folder=folder.path, **plain["table4"])
        else:
            session.train(config, folder.path)
    return folder.path


tool = Tool(
    "finetune",
    "turn what a pre-training run left into a classifier",
    run,
    before=offer_again,
    aliases=ALIASES,
    groups=preflight.GROUPS,
    common=(
        "checkpoint",
        "name",
        "overwrite",
        "compare",
        "seeds",
        "sweep",
        "data.root",
        "data.image_size",
        "objective.trained",
        "objective.lora",
        "objective.mixup",
        "recipe.steps",
        "recipe.batch_size",
        "recipe.lr",
        "recipe.warmup",
        "recipe.seed",
        "recipe.evaluate_every",
        "subset.images",
        "fabric.devices",
        "workers",
    ),
)
