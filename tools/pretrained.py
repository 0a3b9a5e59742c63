"""The choices encoder=pretrained and data=pretrained: what an earlier run trained, and on which images. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from ssvit.exchange import reading
from ssvit.options import OptionError, UserError, within
from ssvit.rules import CHANGEABLE
from ssvit.training import manifest

SCRATCH = "scratch"


def offer(arguments: dict[str, str]) -> None:
    """Find the checkpoint that the command line means, and add its encoder and its data set to Hydra's choices.

    OptionError or UserError if it is not there, or if its run does not tell the data set and the command line neither.
    """
    if "encoder.path" in arguments:
        where = arguments["encoder.path"]
        raise OptionError("encoder.path", where, f"must be checkpoint={where}, with which its run's images come too")
    asked = arguments.get("checkpoint", "newest")
    if asked == SCRATCH:
        if "encoder" in arguments and ("data" in arguments or "experiment" in arguments):
            return
        asked = "newest"
    elif "encoder" in arguments:
        raise OptionError("encoder", arguments["encoder"], f"a checkpoint brings its own; or give checkpoint={SCRATCH}")
    path = manifest.find(asked, outputs=arguments.get("outputs", "outputs"), stage=manifest.PRETRAIN)
    told = _told(path, arguments)
    with within("encoder"):
        trained = manifest.read(path, told)["encoder"]
    store = ConfigStore.instance()
    node = {
        "_target_": "ssvit.training.checkpoint.load_encoder",
        "path": str(path),
        "resize": "paper",
        "announce": True,
        "attention_dropout": 0.0,  # of this and the next, older checkpoints say nothing
        "activation_checkpointing": False,
        **{name: trained[name] for name in CHANGEABLE if name in trained},
        "image_size": "${data.image_size}",
        **told,
    }
    store.store(group="encoder", name="pretrained", node=node)
    try:
        data = yaml.safe_load((path.parent / "config.yaml").read_text())["data"]
    except (OSError, yaml.YAMLError, TypeError, KeyError):
        if "data" not in arguments and "experiment" not in arguments:
            raise UserError(f"{path}: no config.yaml of a run beside it tells its images; give data=…") from None
    else:
        store.store(group="data", name="pretrained", node=data)


def _told(path: Path, arguments: Mapping[str, str]) -> dict[str, Any]:
    """What the command line tells of a foreign file, each option that may, None where it does not."""
    if not path.is_file():
        return {}
    try:
        return {name: yaml.safe_load(arguments.get(f"encoder.{name}", "null")) for name in reading.TOLD}
    except yaml.YAMLError:
        raise OptionError("checkpoint", path, "an option encoder.… beside it cannot be read") from None


def default_name(config: DictConfig) -> str:
    """What a run's folder is called: what it does, with what, and on which images if they are not the same run's."""
    choices = HydraConfig.get().runtime.choices
    what = "compare" if config.compare else config.sweep or ("scratch" if config.checkpoint == SCRATCH else "finetune")
    path = Path(config.encoder.get("path", choices.encoder))
    start = path.parent.name if path.is_dir() else path.stem
    return "_".join([what, start] if choices.data == "pretrained" else [what, start, choices.data])


def from_scratch(config: DictConfig) -> DictConfig:
    """The same configuration with random weights in place of those of the checkpoint."""
    if "path" not in config.encoder:
        return config
    options: dict[str, Any] = OmegaConf.to_container(config.encoder, resolve=False)
    changes = {name: options[name] for name in CHANGEABLE}
    config = config.copy()
    OmegaConf.set_struct(config, False)
    config.encoder = {
        "_target_": "ssvit.encoder.vit.ViT",
        **manifest.read(Path(options["path"]), options)["encoder"],
        **changes,
    }
    config.checkpoint = SCRATCH
    OmegaConf.set_struct(config, True)
    return config
