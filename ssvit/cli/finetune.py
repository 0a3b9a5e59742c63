"""Train a classifier from a pre-training run: ssvit finetune

By default the newest finished run under outputs/, on its images. The same command again goes on with the run.
"""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from ssvit.checkpoints.checkpoint import FINETUNE
from ssvit.checkpoints.run_folder import RunFolder, is_main_process
from ssvit.cli.launch import ALIASES, Plain, Tool, announce, job_name, say
from ssvit.cli.pretrained import (
    EMBEDDED,
    SCRATCH,
    configuration,
    default_name,
    from_scratch,
    offer_again,
    origin,
)
from ssvit.options import print_lines
from ssvit.training import comparison, preflight
from ssvit.training.recipe import Recipe

FIRST = "finetune_shapes"  # the experiment that follows a pre-training on the embedded images


def check(config: DictConfig, plain: Plain) -> tuple[DictConfig, Recipe]:
    """Check and complete the configuration; returns it with its recipe."""
    recipe = preflight.check(plain)
    comparison.check(plain)
    config.name = job_name(str(default_name(config) if plain["name"] is None else plain["name"]))
    return from_scratch(config) if plain["checkpoint"] == SCRATCH else config, recipe


def dry_run(config: DictConfig, plain: Plain) -> DictConfig:
    """Print the sizes, time and memory of the run, write nothing, and return the completed configuration."""
    config, _ = check(config, plain)

    from ssvit.cli.session import Session

    announce()
    Session(config, Path(config.outputs, config.name), stage=FINETUNE).preview(config)
    if plain["compare"]:
        for side, changes in comparison.sides(plain).items():
            changed = "".join(f" {name}={value}" for name, value in changes.items())
            print(f"compare: {plain['seeds']} such runs {side}{changed}")
    elif plain["sweep"]:
        print(f"sweep: {len(plain['table4']['learning_rates']) + 1} such runs")
    return config


def run(config: DictConfig, plain: Plain) -> Path:
    """Check the configuration and take the run folder; then load torch, build and train. Returns the folder."""
    config, recipe = check(config, plain)
    with RunFolder(config.outputs, config.name) as folder:
        if is_main_process():
            folder.open(configuration(config), overwrite=config.overwrite)
            announce()
            print_lines(f"{config.name}: starts from {config.encoder.get('path', 'random weights')}")

        from ssvit.cli.session import Session

        session = Session(config, folder.path, stage=FINETUNE)
        if plain["compare"]:
            sides = comparison.sides(plain)
            comparison.compare(session.run, sides, seed=recipe.seed, seeds=plain["seeds"], folder=folder.path)
        elif plain["sweep"]:
            comparison.choose(session.run, folder=folder.path, **plain["table4"])
        else:
            session.train(config, folder.path)
    return folder.path


def before(typed: dict[str, str]) -> Sequence[str]:
    """The checkpoint's encoder and images; on the embedded images, also the comparison with random weights."""
    added = offer_again(typed)
    named = {"data", "experiment", "compare", "sweep"} & typed.keys() or typed.get("checkpoint") == SCRATCH
    if not named and origin("data", "pretrained") == EMBEDDED:
        say(f"experiment={FIRST}: the embedded images, with few labels")
        return [*added, f"experiment={FIRST}"]
    return added


tool = Tool(
    "finetune",
    "turn what a pre-training run left into a classifier",
    run,
    before=before,
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
