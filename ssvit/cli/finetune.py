"""Fine-tune a pre-trained encoder as a classifier.

Usage: ssvit finetune. The default is the newest finished run under outputs/, with its images. The same command
continues a stopped run.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ssvit.checkpoints.checkpoint import FINETUNE, SCRATCH
from ssvit.checkpoints.configuration import Configuration
from ssvit.checkpoints.run_folder import RunFolder
from ssvit.config.command import Command, named
from ssvit.config.command_line import CommandLine
from ssvit.config.composed import Config
from ssvit.config.declaration import Run
from ssvit.data.sources.base_options import SHORT_FORMS
from ssvit.data.sources.files_options import ImageFiles
from ssvit.loading.pretrained import add_placeholders, select_checkpoint_again, with_random_weights
from ssvit.options import print_lines
from ssvit.processes import is_main_process
from ssvit.studies import comparison
from ssvit.training.options import ALIASES, EMBEDDED, Finetune
from ssvit.training.recipe import Recipe

FIRST = "finetune_shapes"  # default experiment after a pre-training on the embedded images
_FOREIGN_LR = 2e-4  # for weights of other projects, see docs/starting.md
_MANY = 10  # batches of images, of which at least one is left for training, since data.held_out is at most 0.9
_OF_RATE = {"recipe", "recipe.lr", "recipe.optimizer", "experiment", "sweep"}  # determine the learning rate


def complete(config: Config) -> Config:
    """Check and complete the configuration."""
    options: Finetune = config.options
    options.check_study()
    config = _with_fitting_batch(config)
    Run(config.options).check()
    config = named(config, _default_name(config) if options.name is None else options.name)
    return with_random_weights(config) if options.checkpoint == SCRATCH else config


def _with_fitting_batch(config: Config) -> Config:
    """Return the configuration with a default batch size of at most the number of training images."""
    options: Finetune = config.options
    source, batch_size = options.data.source, options.recipe.batch_size
    if "recipe.batch_size" in config.line.values or not isinstance(source, ImageFiles):  # other sets have many images
        return config
    many = _MANY * batch_size
    count = source.count(at_most=many)
    if count is None and (sample := source.sample(1)) is not None:
        count = sample.images
    if min(count or 0, options.subset.images or many) >= many:
        return config

    from ssvit.data.sources.base import Data, subset

    data: Data = config.build("data.source")
    data = replace(data, train=subset(data.train, **dict(options.subset)))
    development = options.table4.development if options.sweep else options.development
    images = len((data if development is None else data.without_test(development)).train)
    share = (options.fabric.processes or 1) * options.recipe.accumulate
    fitting = images // share * share
    if not 0 < fitting < batch_size:
        return config
    config.line.say(f"recipe.batch_size={fitting}: there are {images:,} training images")
    return config.changed({"recipe.batch_size": fitting})


def _default_name(config: Config) -> str:
    """Return a name for the run: type of run, checkpoint, and data set if it differs from the checkpoint's."""
    options: Finetune = config.options
    prefix = "scratch" if options.checkpoint == SCRATCH else "finetune"
    prefix = "compare" if options.compare else options.sweep or prefix
    if hasattr(options.encoder, "path"):
        start = options.encoder.checkpoint().name
    else:
        start = getattr(options.encoder, "model", Path(config.choices["encoder"]).name)
    data = config.choices["data"]
    return "_".join([prefix, start] if data == "pretrained" else [prefix, start, data])


def dry_run(config: Config) -> Config:
    """Print the sizes, time and memory of the run, write nothing, and return the completed configuration."""
    config = complete(config)
    options: Finetune = config.options

    from ssvit.training.session import Session

    config.line.announce()
    folder = Path(options.outputs, str(options.name))
    Session(config, folder, stage=FINETUNE, recipes=_recipes(options)).preview(config)
    if options.compare:
        for side, changes in comparison.sides(options.scratch).items():
            changed = "".join(f" {name}={value}" for name, value in changes.items())
            print(f"compare: {options.seeds} runs like this one, {side}{changed}")
    elif options.sweep:
        print(f"sweep: {len(options.table4.learning_rates) + 1} runs like this one")
    return config


def _recipes(options: Finetune) -> list[Recipe]:
    """Return the recipes of all runs in their order."""
    recipe = options.recipe
    if options.compare:
        return [recipe, recipe.changed(**options.scratch)] * options.seeds
    return [recipe] * (len(options.table4.learning_rates) + 1 if options.sweep else 1)


def run(config: Config) -> Path:
    """Check the configuration, lock the run folder, train, and return the folder."""
    config = complete(config)
    options: Finetune = config.options
    with RunFolder(options.outputs, options.name) as folder:
        if is_main_process():
            folder.open(Configuration.of_run(config), overwrite=options.overwrite)
            config.line.announce()
            print_lines(f"{options.name}: starts from {getattr(options.encoder, 'path', 'random weights')}")

        from ssvit.training.session import Session

        session = Session(config, folder.path, stage=FINETUNE, recipes=_recipes(options))

        def trained(name: str, changes: Mapping[str, object]) -> list[dict[str, Any]]:
            changed = config.changed(changes)
            return session.run(name, with_random_weights(changed) if changed.options.checkpoint == SCRATCH else changed)

        if options.compare:
            sides = comparison.sides(options.scratch)
            comparison.compare(
                trained, sides, seed=options.recipe.seed, seeds=options.seeds, folder=folder.path,
                earlier_gains=options.earlier_gains,
            )  # fmt: skip
        elif options.sweep:
            comparison.choose(trained, folder=folder.path, **options.table4.values())
        else:
            session.train(config, folder.path)
    return folder.path


def _with_foreign_rate(config: Config) -> Config:
    """Return the configuration with the learning rate of foreign weights; random weights keep that of the recipe."""
    scratch = {"lr": config.value("recipe.lr"), **config.value("scratch")}
    return config.changed({"recipe.lr": _FOREIGN_LR, "scratch": scratch})


def before(line: CommandLine) -> None:
    """Add the checkpoint's encoder and images; on the embedded images, also the comparison with random weights.

    Weights of other projects are fine-tuned with a lower learning rate.
    """
    checkpoint = select_checkpoint_again(line)
    typed = line.typed
    if checkpoint and checkpoint.foreign and not _OF_RATE & typed.keys():
        line.say(f"recipe.lr={_FOREIGN_LR}: the weights are of another project")
        finish = line.finish
        line.finish = lambda config: _with_foreign_rate(finish(config) if finish else config)
    named = {"data", "experiment", "compare", "sweep"} & typed.keys() or typed.get("checkpoint") == SCRATCH
    if not named and line.brought.get("data") == EMBEDDED:
        line.say(f"experiment={FIRST}: the embedded images, with few labels")
        line.added.append(f"experiment={FIRST}")


command = Command(
    "finetune",
    run,
    expansions=SHORT_FORMS,
    before=before,
    stand_in=add_placeholders,
    aliases=ALIASES,
    options=Finetune,
    dry_run=dry_run,
    results="ssvit.studies.sweep.Sweep",
    common=(
        "checkpoint", "name", "overwrite", "compare", "seeds", "sweep", "data.root", "data.image_size",
        "objective.trained", "objective.lora", "objective.mixup", "recipe.steps", "recipe.batch_size", "recipe.lr",
        "recipe.warmup", "recipe.seed", "recipe.evaluate_every", "subset.images", "fabric.devices", "workers",
    ),
)  # fmt: skip
