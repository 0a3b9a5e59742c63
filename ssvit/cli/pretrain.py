"""Pre-train a Vision Transformer. The same command continues a stopped run.

Usage: ssvit pretrain objective=masked_patch. With checkpoint=PATH, training starts from the weights of a run or of a
foreign file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ssvit.checkpoints.checkpoint import PRETRAIN
from ssvit.checkpoints.configuration import Configuration
from ssvit.checkpoints.run_folder import REPORTS, RunFolder
from ssvit.config.command import Command, named
from ssvit.config.composed import Config
from ssvit.config.declaration import Options, Tree
from ssvit.data.sources.base_options import SHORT_FORMS
from ssvit.engine.processes import is_main_process
from ssvit.errors import Failure, print_lines
from ssvit.training import budget
from ssvit.training.options import ALIASES, Pretrain


def complete(config: Config) -> Config:
    """Check and complete the configuration."""
    options: Pretrain = config.options
    budget.check(config)
    Tree(options).check()
    config.line.announce()
    return named(config, options.name)


def dry_run(config: Config) -> Config:
    """Print the sizes, time and memory of the run, write nothing, and return the completed configuration."""
    config = complete(config)
    folder = RunFolder(config.options.outputs, config.options.name)
    session = budget.session_of(config, folder, PRETRAIN)
    config = budget.planned(config, session, folder)
    session().preview(config.options)
    return config


def run(config: Config) -> Path:
    """Check the configuration and lock the run folder; then import torch, build and train. Returns the folder."""
    config = complete(config)
    options: Pretrain = config.options
    with RunFolder(options.outputs, options.name) as folder:
        session = budget.session_of(config, folder, PRETRAIN)
        config = budget.planned(config, session, folder)
        options = config.options
        if is_main_process():
            folder.open(Configuration.of_run(config), overwrite=options.overwrite)
            if options.encoder.checkpoint():
                print_lines(f"{options.name}: starts from {_written(options.encoder)['path']}")
        session().train(options, folder.path)
        compared = False
        if others := session().others(options):
            session().end()
            if is_main_process():
                compared = _compare(config, folder.path, [_written(part) for part in others])
        if is_main_process() and not compared:
            from ssvit import advice

            advice.print_next(advice.after_pretraining(config, folder.path, labelled=session().labelled))
    return folder.path


def _written(encoder: Options) -> dict[str, object]:
    """Return the options of an encoder that is loaded, without those that have the checkpoint's value."""
    return {name: value for name, value in encoder.values().items() if value is not None}


def _compare(config: Config, folder: Path, others: Sequence[Mapping[str, object]]) -> bool:
    """Evaluate the run's best checkpoint next to its start and its teacher.

    The images are those of the option `forgetting`, and then of the run, whose evaluation ends with the next command.
    If a report exists, its evaluation is not repeated.

    Args:
        config: Configuration of the run.
        folder: The run folder.
        others: Options of the other encoders.

    Returns:
        Whether the evaluation on the images of the run has been printed.
    """
    from ssvit.cli import find_command
    from ssvit.training import best

    options: Pretrain = config.options
    kept = folder / best.NAME
    changes = {
        "checkpoint": str(kept if kept.is_dir() else folder), "against": others, "outputs": options.outputs,
        "train_images": options.probing.train_images, "test_images": options.probing.test_images,
        "probes": list(options.probes), "baselines": False, "duplicates": False,
        "launch.accelerator": options.launch.accelerator, "launch.devices": 1,  # torchrun's other processes have ended
    }  # fmt: skip
    forgetting = {"forgetting": {"data": options.forgetting}} if options.forgetting else {}
    compared = False
    for name, images in {**forgetting, REPORTS: {}}.items():
        if (folder / name / "report.json").is_file():
            continue
        print_lines(f"{name}: comparison with the features of {' and '.join(str(other['path']) for other in others)}")
        values = {**changes, **images, "output": str(folder / name)}
        try:
            replace(find_command("evaluate"), prefix=config.line.prefix).call(config.line.flags, values)
            compared = name == REPORTS
        except Failure as failure:  # the training has succeeded
            print_lines(f"{name}: not compared: {failure}")
    return compared


command = Command(
    "pretrain",
    run,
    expansions={
        **SHORT_FORMS,
        "data": "ssvit.training.preset.expand_images",
        "preset": "ssvit.training.preset.expand",
        "encoder": "ssvit.models.timm_options.check_objective",
        "checkpoint": "ssvit.loading.pretrained.select_initial_weights",
    },
    aliases={"probes": "probe@probes", **ALIASES},
    options=Pretrain,
    dry_run=dry_run,
    results="ssvit.studies.sweep.Sweep",
    common=(
        "name", "checkpoint", "preset", "budget", "overwrite", "objective", "data.root", "data.download", "data.images",
        "data.image_size", "encoder.patch_size", "recipe.steps", "recipe.batch_size", "recipe.lr", "recipe.warmup",
        "recipe.weight_decay", "recipe.precision", "recipe.seed", "recipe.evaluate_every", "subset.images",
        "probing.every", "launch.devices", "workers",
    ),
)  # fmt: skip
