"""Pre-train a Vision Transformer: ssvit pretrain objective=masked_patch. The same command again goes on.

checkpoint=PATH starts from weights that exist, a run's or another project's.
"""

from pathlib import Path

from omegaconf import DictConfig

from ssvit.checkpoints.checkpoint import PRETRAIN
from ssvit.checkpoints.run_folder import RunFolder, is_main_process
from ssvit.cli.launch import ALIASES, Plain, Tool, as_dict, job_name
from ssvit.cli.pretrained import configuration, keep_weights, offer_start
from ssvit.training import preflight


def check(config: DictConfig, plain: Plain) -> Plain:
    """Check and complete the configuration; returns it as plain data."""
    if "path" in config.encoder:
        keep_weights(config)
        plain = as_dict(config)
    preflight.check(plain)
    if plain["name"] is not None:
        config.name = job_name(str(plain["name"]))
    return plain


def dry_run(config: DictConfig, plain: Plain) -> None:
    """Print the configuration, its sizes, and what the run would take. Nothing is written."""
    check(config, plain)

    from ssvit.cli.session import Session

    Session(config, Path(config.outputs, config.name), stage=PRETRAIN).preview(config)


def run(config: DictConfig, plain: Plain) -> Path:
    """Check the configuration and take the run folder; then load torch, build and train. Returns the folder."""
    plain = check(config, plain)
    with RunFolder(plain["outputs"], config.name) as folder:
        if is_main_process():
            folder.open(configuration(config), overwrite=plain["overwrite"])
            if "path" in config.encoder:
                print(f"{config.name}: starts from {config.encoder.path}", flush=True)

        from ssvit.cli.session import Session

        Session(config, folder.path, stage=PRETRAIN).train(config, folder.path)
    return folder.path


tool = Tool(
    "pretrain",
    "pre-train a Vision Transformer",
    run,
    before=offer_start,
    aliases=ALIASES,
    groups=preflight.GROUPS,
    dry_run=dry_run,
    common=(
        "name",
        "checkpoint",
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
)
