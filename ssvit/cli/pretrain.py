"""Pre-train a Vision Transformer: python tools/pretrain.py objective=masked_patch

Every option stands in configs/; give any as group=choice or group.option=value. The same command again goes on where
the run was stopped.
"""

from typing import Any

from omegaconf import DictConfig

from ssvit.checkpoints.checkpoint import PRETRAIN
from ssvit.checkpoints.run_folder import RunFolder, is_main_process
from ssvit.cli.launch import ALIASES, configuration, job_name, launch
from ssvit.training import preflight


def run(config: DictConfig, plain: dict[str, Any]) -> None:
    """Check the configuration, take the run folder, and only then load torch, build and train."""
    preflight.check(plain)
    if plain["name"] is not None:
        config.name = job_name(str(plain["name"]))
    folder = RunFolder(plain["outputs"], config.name)
    if is_main_process():
        folder.open(configuration(config), overwrite=plain["overwrite"])

    from ssvit.cli.session import Session

    Session(config, folder.path, stage=PRETRAIN).train(config, folder.path)


def main() -> None:
    """Start the tool."""
    launch("pretrain", run, aliases=ALIASES)
