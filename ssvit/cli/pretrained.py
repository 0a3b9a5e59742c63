"""The choices encoder=pretrained and data=pretrained: what an earlier run trained, and on which images. No torch.

A run's folder tells its data set by the names of files in configs/ and by values; what is built comes from the files of
those names that are installed here, or lie in the user's own --config-dir, never from the run's folder.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from ssvit import options
from ssvit.checkpoints import manifest
from ssvit.checkpoints.checkpoint import PRETRAIN, Checkpoint, find
from ssvit.checkpoints.configuration import Configuration, ConfigurationError
from ssvit.cli.launch import CONFIGS, say, typed_command
from ssvit.exchange import reading
from ssvit.models.options import CHANGEABLE
from ssvit.options import OptionError, UserError

SCRATCH = "scratch"
# What data=pretrained stands for, once `offer` has found it: choices of groups of configuration files.
_brought: dict[str, str | None] = {}


def offer(arguments: dict[str, str], own: str | None = None) -> None:
    """Find the checkpoint that the command line means, and add its encoder and its data set to Hydra's choices.

    own: what stands in place of newest, if that is asked for.
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
    if asked == "newest" and own is not None:
        asked = own
    told = _told(arguments)
    found = find(asked, outputs=arguments.get("outputs", "outputs"), stage=PRETRAIN, say=say, told=told)
    trained = found.encoder
    store = ConfigStore.instance()
    node = {
        "_target_": "ssvit.checkpoints.storage.load_encoder",
        "path": str(found.path),
        "resize": "paper",
        "announce": True,
        "attention_dropout": 0.0,  # of this and the next, older checkpoints say nothing
        "activation_checkpointing": False,
        **{name: trained[name] for name in CHANGEABLE if name in trained},
        "image_size": "${data.image_size}",
        **(told if found.foreign else {}),
    }
    store.store(group="encoder", name="pretrained", node=node)
    chooses = "data" in arguments or "experiment" in arguments
    try:
        data, choices = _data(found.path.parent / "config.yaml")
    except FileNotFoundError:
        if not chooses:
            raise UserError(f"{found.path}: no config.yaml of a run beside it tells its images; give data=…") from None
    except ConfigurationError as error:
        if not chooses:
            raise UserError(f"{error}; or give data=…") from None
    else:
        _brought.update(choices)
        store.store(group="data", name="pretrained", node=data)


def offer_again(arguments: dict[str, str]) -> None:
    """`offer`, for a tool that trains: a run that the same command began, and did not finish, keeps its checkpoint
    while newer ones come; and so does any run that is named.
    """
    own = None
    if arguments.get("overwrite") != "true":
        outputs = Path(arguments.get("outputs", "outputs"))
        named = arguments.get("name")
        files = outputs.rglob("config.yaml") if named is None else [outputs / named / "config.yaml"]
        for file in sorted(files):
            own = own or _began_with(file, named is not None)
    offer(arguments, own)


def _began_with(file: Path, named: bool) -> str | None:
    """The checkpoint that a run took as the newest, if this command began it and is to go on with it."""
    folder = file.parent
    if (folder.parent / "config.yaml").exists():
        return None  # one of the runs of a study
    try:
        values = Configuration.read(file).values
        if values["checkpoint"] != "newest" or not (named or values["command"] == typed_command()):
            return None
        done = any((folder / name).exists() for name in ("comparison.json", "sweep.json"))
        if last := manifest.complete(folder)[-1:]:
            done = manifest.read(last[0])["step"] == values["recipe"]["steps"]
        return None if done and not named else values["encoder"]["path"]
    except (UserError, OSError, KeyError, TypeError):
        return None


def brought() -> dict[str, str | None]:
    """The choices that stand behind data=pretrained, none where another data set was chosen."""
    return _brought if HydraConfig.get().runtime.choices.get("data") == "pretrained" else {}


def _data(file: Path) -> tuple[dict[str, Any], dict[str, str | None]]:
    """The group data of the run whose config.yaml this is, with the builders of the files installed here; its choices.

    ConfigurationError if it holds anything but names of files and values of options that there are.
    """
    try:
        choices, values = Configuration.read(file).data()
    except (KeyError, TypeError):
        raise ConfigurationError(f"{file}: does not tell the run's images") from None
    node = _composed(choices, file)
    if getattr(options.find(node.get("augment", {}).get("_target_", "")), "views", ("image",)) != ("image",):
        # Several views are the method's own: what comes after it has the data set's single one.
        choices = {group: name for group, name in choices.items() if group.partition("@")[2] != "data.augment"}
        values = {name: value for name, value in values.items() if name != "augment"}
        node = _composed(choices, file)
    _fill(node, values, f"{file}: data")
    return node, choices


def _composed(choices: Mapping[str, str | None], file: Path) -> dict[str, Any]:
    """The group data of the files chosen; ConfigurationError if one is not here. file: whose choices these are."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config-dir", "-cd")
    own = parser.parse_known_args(sys.argv[1:])[0].config_dir
    search = [f"hydra.searchpath=[{json.dumps(Path(own).absolute().as_uri())}]"] if own else []
    given = [f"{'+' * (group == 'data')}{group}={name or 'null'}" for group, name in choices.items()]
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return OmegaConf.to_container(compose(overrides=[*search, *given]).data, resolve=False)
    except HydraException:
        named = ", ".join(option.removeprefix("+") for option in given)
        right = "there is no such file here; give the --config-dir that has it"
        raise ConfigurationError(f"{file}: {named}: {right}") from None


def _fill(node: dict[str, Any], values: Any, name: str) -> None:
    """Put values into the options of the same names, and into no other place. ConfigurationError if there is none."""
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{name}={values}: must hold options")
    for key, value in values.items():
        if key not in node or (isinstance(value, Mapping) and not isinstance(node[key], Mapping)):
            raise ConfigurationError(f"{name}.{key}: there is no such option in this version")
        if isinstance(node[key], Mapping):
            _fill(node[key], value, f"{name}.{key}")
        else:
            node[key] = value


def _told(arguments: Mapping[str, str]) -> dict[str, Any]:
    """What the command line tells of a foreign file, each option that may, None where it does not."""
    try:
        return {name: yaml.safe_load(arguments.get(f"encoder.{name}", "null")) for name in reading.TOLD}
    except yaml.YAMLError:
        raise UserError("one of encoder.heads, mean, std and trained_size cannot be read") from None


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
        "_target_": "ssvit.models.vit.ViT",
        **Checkpoint.open(options["path"], options).encoder,
        **changes,
    }
    config.checkpoint = SCRATCH
    OmegaConf.set_struct(config, True)
    return config
