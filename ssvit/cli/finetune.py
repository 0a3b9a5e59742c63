"""Train a classifier from a pre-training run: ssvit finetune

By default the newest finished run under outputs/, on its images. The same command again goes on with the run.
"""

from pathlib import Path

from omegaconf import DictConfig

from ssvit.checkpoints.checkpoint import FINETUNE
from ssvit.checkpoints.run_folder import RunFolder, is_main_process
from ssvit.cli.launch import ALIASES, Plain, Tool, announce, job_name
from ssvit.cli.pretrained import SCRATCH, configuration, default_name, from_scratch, offer_again
from ssvit.training import comparison, preflight
from ssvit.training.recipe import Recipe


def check(config: DictConfig, plain: Plain) -> tuple[DictConfig, Recipe]:
    """Check and complete the configuration; returns it with its recipe."""
    recipe = preflight.check(plain)
    comparison.check(plain)
    config.name = job_name(str(default_name(config) if plain["name"] is None else plain["name"]))
    return from_scratch(config) if plain["checkpoint"] == SCRATCH else config, recipe


def dry_run(config: DictConfig, plain: Plain) -> None:
    """Print the configuration, its sizes, and what a run would take. Nothing is written."""
    config, _ = check(config, plain)

    from ssvit.cli.session import Session

    announce()
    Session(config, Path(config.outputs, config.name), stage=FINETUNE).preview(config)
    if plain["compare"]:
        print(f"compare: {2 * plain['seeds']} such runs")
    elif plain["sweep"]:
        print(f"sweep: {len(plain['table4']['learning_rates']) + 1} such runs")


def run(config: DictConfig, plain: Plain) -> Path:
    """Check the configuration and take the run folder; then load torch, build and train. Returns the folder."""
    config, recipe = check(config, plain)
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
    dry_run=dry_run,
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
