"""Train a classifier from a pre-training run: ssvit finetune

By default the newest finished run under outputs/, on its images. The same command again goes on with the run.
"""

from pathlib import Path

from ssvit.checkpoints.checkpoint import FINETUNE
from ssvit.checkpoints.pretrained import (
    EMBEDDED,
    SCRATCH,
    configuration,
    default_name,
    from_scratch,
    offer_again,
    stand_in,
)
from ssvit.checkpoints.run_folder import RunFolder
from ssvit.config.command import Command
from ssvit.config.command_line import CommandLine
from ssvit.config.composed import Config
from ssvit.data import arguments
from ssvit.options import print_lines
from ssvit.processes import is_main_process
from ssvit.training import comparison, preflight
from ssvit.training.options import ALIASES, Finetune
from ssvit.training.recipe import Recipe
from ssvit.training.sweep import Sweep, job_name

FIRST = "finetune_shapes"  # the experiment that follows a pre-training on the embedded images


def check(config: Config) -> tuple[Config, Recipe]:
    """Check and complete the configuration; returns it with its recipe."""
    values = config.values
    config.options.check_study()
    recipe = preflight.check(values)
    name = default_name(config) if values["name"] is None else values["name"]
    config = config.changed({"name": job_name(config, str(name))})
    return from_scratch(config) if values["checkpoint"] == SCRATCH else config, recipe


def dry_run(config: Config) -> Config:
    """Print the sizes, time and memory of the run, write nothing, and return the completed configuration."""
    config, _ = check(config)
    values = config.values

    from ssvit.training.session import Session

    config.line.announce()
    Session(config, Path(values["outputs"], values["name"]), stage=FINETUNE).preview(config)
    if values["compare"]:
        for side, changes in comparison.sides(values).items():
            changed = "".join(f" {name}={value}" for name, value in changes.items())
            print(f"compare: {values['seeds']} such runs {side}{changed}")
    elif values["sweep"]:
        print(f"sweep: {len(values['table4']['learning_rates']) + 1} such runs")
    return config


def run(config: Config) -> Path:
    """Check the configuration and take the run folder; then load torch, build and train. Returns the folder."""
    config, recipe = check(config)
    values = config.values
    with RunFolder(values["outputs"], values["name"]) as folder:
        if is_main_process():
            folder.open(configuration(config), overwrite=values["overwrite"])
            config.line.announce()
            print_lines(f"{values['name']}: starts from {values['encoder'].get('path', 'random weights')}")

        from ssvit.training.session import Session

        session = Session(config, folder.path, stage=FINETUNE)
        if values["compare"]:
            sides = comparison.sides(values)
            comparison.compare(session.run, sides, seed=recipe.seed, seeds=values["seeds"], folder=folder.path)
        elif values["sweep"]:
            comparison.choose(session.run, folder=folder.path, **values["table4"])
        else:
            session.train(config, folder.path)
    return folder.path


def before(line: CommandLine) -> None:
    """Add the checkpoint's encoder and images; on the embedded images, also the comparison with random weights."""
    offer_again(line)
    typed = line.typed
    named = {"data", "experiment", "compare", "sweep"} & typed.keys() or typed.get("checkpoint") == SCRATCH
    if not named and line.brought.get("data") == EMBEDDED:
        line.say(f"experiment={FIRST}: the embedded images, with few labels")
        line.added.append(f"experiment={FIRST}")


command = Command(
    "finetune",
    run,
    expand=arguments.expand,
    before=before,
    stand_in=stand_in,
    aliases=ALIASES,
    options=Finetune,
    dry_run=dry_run,
    results=Sweep,
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
