"""Pre-train a Vision Transformer: ssvit pretrain objective=masked_patch. The same command continues a stopped run.

checkpoint=PATH starts from weights that exist, a run's or another project's.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from ssvit.checkpoints.checkpoint import PRETRAIN
from ssvit.checkpoints.run_folder import RunFolder, is_main_process
from ssvit.cli import preset
from ssvit.cli.launch import ALIASES, CONFIGS, Plain, Tool, announce, as_dict, job_name
from ssvit.cli.pretrained import EMBEDDED, configuration, keep_weights, offer_start
from ssvit.options import command, print_lines
from ssvit.training import preflight


def check(config: DictConfig, plain: Plain) -> Plain:
    """Check and complete the configuration; returns it as plain data."""
    if "path" in config.encoder:
        keep_weights(config)
        plain = as_dict(config)
    preflight.check(plain)
    announce()
    if plain["name"] is not None:
        config.name = job_name(str(plain["name"]))
    return plain


def dry_run(config: DictConfig, plain: Plain) -> DictConfig:
    """Print the sizes, time and memory of the run, write nothing, and return the completed configuration."""
    check(config, plain)

    from ssvit.cli.session import Session

    Session(config, Path(config.outputs, config.name), stage=PRETRAIN).preview(config)
    return config


def run(config: DictConfig, plain: Plain) -> Path:
    """Check the configuration and take the run folder; then load torch, build and train. Returns the folder."""
    plain = check(config, plain)
    with RunFolder(plain["outputs"], config.name) as folder:
        if is_main_process():
            folder.open(configuration(config), overwrite=plain["overwrite"])
            if "path" in config.encoder:
                print_lines(f"{config.name}: starts from {config.encoder.path}")

        from ssvit.cli.session import Session

        session = Session(config, folder.path, stage=PRETRAIN)
        session.train(config, folder.path)
        if is_main_process():
            print_lines(f"next: {_next(config, labelled=session.labelled)}")
    return folder.path


def _next(config: DictConfig, *, labelled: bool) -> str:
    """The command that shows whether it helped: that of the experiment, or else of any images."""
    choices = HydraConfig.get().runtime.choices
    if choices["data"] == EMBEDDED:
        return command("finetune")
    experiment = f"finetune_{choices.get('experiment')}"
    if (CONFIGS / "experiment" / f"{experiment}.yaml").is_file():
        root = "" if config.data.get("root") is None else f" data.root={shlex.quote(str(config.data.root))}"
        return f"{command('finetune')} experiment={experiment}{root}"
    if labelled:
        return f"{command('finetune')} compare=scratch, or {command('evaluate')} for the frozen features"
    return f"{command('visualize')}, or {command('finetune')} data=PATH with labelled images"


def before(typed: dict[str, str]) -> Sequence[str]:
    """The options that preset=auto adds, and the choices of the weights to start from."""
    chosen = preset.options(typed)
    added = dict(option.split("=", 1) for option in chosen if option.partition("=")[0] != "preset")
    return [*chosen, *offer_start({**added, **typed})]


tool = Tool(
    "pretrain",
    "pre-train a Vision Transformer",
    run,
    before=before,
    aliases=ALIASES,
    groups=preflight.GROUPS,
    dry_run=dry_run,
    common=(
        "name",
        "checkpoint",
        "preset",
        "overwrite",
        "data.root",
        "data.download",
        "data.images",
        "data.image_size",
        "encoder.patch_size",
        "objective",
        "recipe.steps",
        "recipe.batch_size",
        "recipe.lr",
        "recipe.warmup",
        "recipe.weight_decay",
        "recipe.precision",
        "recipe.seed",
        "recipe.evaluate_every",
        "subset.images",
        "probing.every",
        "fabric.devices",
        "workers",
    ),
    own_images=("preset=auto",),
)
