"""The choices encoder=pretrained, data=pretrained and its augment: what was trained, and on which images. No torch.

A run's folder names its data set by files in configs/ and by values. What is built comes from the files of those names
installed here or in the user's --config-dir, never from the run's folder.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from ssvit.checkpoints import manifest
from ssvit.checkpoints.checkpoint import NEWEST, PRETRAIN, Checkpoint, find, name_of
from ssvit.checkpoints.configuration import Configuration, ConfigurationError, refers
from ssvit.checkpoints.options import pixel_format
from ssvit.cli.launch import CONFIGS, as_dict, say, search_path, typed_command
from ssvit.config.declaration import find as find_options
from ssvit.data.options import RGB
from ssvit.exchange import reading
from ssvit.models.options import CHANGEABLE, Timm, ViT, kind
from ssvit.options import OptionError, UserError

SCRATCH = "scratch"
EMBEDDED = "shapes"  # the data set of the first run
# Options of an encoder that its weights decide, and those of them that other options refer to.
_FIXED = set(ViT.model_fields) - {*CHANGEABLE, *reading.FOREIGN_OPTIONS}
_REFERRED = ("patch_size", "width", "channels")
_TARGETS = {ViT: "ssvit.models.vit.ViT", Timm: "ssvit.models.timm.Timm"}
_LATER = {"attention_dropout": 0.0, "activation_checkpointing": False}  # which older checkpoints lack
# What data=pretrained stands for, set by `offer`: choices of groups of configuration files.
_brought: dict[str, str | None] = {}


def offer(arguments: dict[str, str], own: str | None = None) -> Sequence[str]:
    """Find the checkpoint that the command line means, and add its encoder and data set to Hydra's choices.

    own: the checkpoint in place of newest. OptionError or UserError if there is none, or if neither its run nor the
    command line names a data set. Returns options to add.
    """
    if "encoder.path" in arguments:
        where = arguments["encoder.path"]
        raise OptionError("encoder.path", where, f"must be checkpoint={where}, with which its run's images come too")
    wanted = arguments.get("checkpoint", "newest")
    if wanted == SCRATCH:
        if "encoder" in arguments and ("data" in arguments or "experiment" in arguments):
            return ()
        wanted = "newest"
    elif arguments.get("encoder") == "timm":  # whose weights are in a file
        if wanted == NEWEST:
            right = f"must be a file of weights of timm's model, or {SCRATCH}"
            raise OptionError("checkpoint", wanted, right)
        return ["encoder=pretrained", *_own_images(_offer(wanted, arguments), arguments)]
    elif "encoder" in arguments:
        raise OptionError("encoder", arguments["encoder"], f"a checkpoint brings its own; or give checkpoint={SCRATCH}")
    if wanted == "newest" and own is not None:
        wanted = own
    return _own_images(_offer(wanted, arguments), arguments)


def offer_start(arguments: dict[str, str]) -> Sequence[str]:
    """`offer` for pre-training, where the default is random weights. Returns the choices of the weights that are named.

    OptionError also for an option of the encoder that its weights decide.
    """
    wanted = arguments.get("checkpoint", "null")
    objective = arguments.get("objective", "masked_patch")
    built_in = (CONFIGS / "objective" / f"{objective}.yaml").is_file() and "experiment" not in arguments
    if arguments.get("encoder") == "timm" and built_in and objective != "supervised":
        raise OptionError("objective", objective, "must be supervised with encoder=timm, which has no patches")
    if wanted in ("null", ""):
        return ()
    if wanted in (NEWEST, SCRATCH):
        right = "must be the folder of a run or of a checkpoint, a file of foreign weights, or null for random weights"
        raise OptionError("checkpoint", wanted, right)
    for name, value in arguments.items():
        if name == "encoder":
            raise OptionError(name, value, "a checkpoint brings its own")
        if name.startswith("encoder.") and name.split(".")[1] in _FIXED:
            raise OptionError(name, value, f"is the checkpoint's own; {', '.join(CHANGEABLE)} can be changed")
    found = _offer(wanted, arguments, refer=_REFERRED)
    chosen = "data" in arguments or "experiment" in arguments
    start = re.sub(r"[^\w.+-]+", "-", found.name)
    parts = ["${hydra:runtime.choices.objective}", *["${hydra:runtime.choices.data}"] * chosen, "from", start]
    return [
        "encoder=pretrained",
        *([] if chosen else ["data=pretrained"]),
        *([] if "name" in arguments else [f"name={'_'.join(parts)}"]),
        *_own_images(found, arguments),
    ]


def _own_images(found: Checkpoint, arguments: Mapping[str, str]) -> Sequence[str]:
    """Return the options by which other images become what a run's encoder was trained on.

    These are the image size, which the file of a data set has for any encoder, and the channels, their range and their
    normalisation where they are not those of photographs in colour. Public weights keep the file's options: DINOv2's
    are trained at 518 px and used at 224.
    """
    if found.foreign or "data" not in arguments or "experiment" in arguments:
        return ()
    own, pixels = {"image_size": found.encoder["image_size"]}, pixel_format(found)
    if pixels != RGB:
        own |= vars(pixels) | {name: found.encoder[name] for name in ("mean", "std")}
    options = {f"data.{name}": json.dumps(value, separators=(",", ":")) for name, value in own.items()}
    return [f"++{name}={value}" for name, value in options.items() if name not in arguments]


def keep_weights(config: DictConfig) -> None:
    """Remove the options of the encoder that another file sets and a checkpoint's weights decide.

    OptionError if the file adds a distillation token and the checkpoint has none.
    """
    given = as_dict(config.encoder)
    if given.get("distillation_token") and not Checkpoint.open(given["path"], given).encoder.get("distillation_token"):
        right = "has no distillation token, which distillation=… needs: give one that has, or null for random weights"
        raise OptionError("checkpoint", config.checkpoint, right)
    with open_dict(config):
        for name in _FIXED.intersection(config.encoder) - {*_REFERRED}:
            del config.encoder[name]


def _offer(wanted: str, arguments: dict[str, str], refer: Sequence[str] = ()) -> Checkpoint:
    """Add a checkpoint's encoder, its data set and that one's augmentation to Hydra's choices.

    refer: options of the encoder that its weights decide and that other options refer to.
    """
    foreign = _foreign_options(arguments)
    found = find(wanted, outputs=arguments.get("outputs", "outputs"), stage=PRETRAIN, say=say, options=foreign)
    trained = found.encoder
    store = ConfigStore.instance()
    node = {
        "_target_": "ssvit.checkpoints.storage.load_encoder",
        "path": str(found.path),
        "resize": "paper",
        "announce": True,
        **(_LATER if kind(trained) is ViT else {}),
        **{name: trained[name] for name in (*refer, *CHANGEABLE) if name in trained},
        "image_size": "${data.image_size}",
        **(foreign if found.foreign else {}),
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
        _brought.clear()
        _brought.update(choices)
        augment = data.pop("augment", None)
        if augment is not None:  # a choice of its own, which another can replace
            store.store(group="augment", name="pretrained", node=augment)
            data = {"defaults": [{"/augment@augment": "pretrained"}, "_self_"], **data}
        store.store(group="data", name="pretrained", node=data)
    return found


def stand_in() -> None:
    """Add choices in the place of a checkpoint's, for who asks about options and has no checkpoint yet."""
    store = ConfigStore.instance()
    free = {**dict.fromkeys(CHANGEABLE), "image_size": "${data.image_size}"}
    node = {"_target_": "ssvit.checkpoints.storage.load_encoder", "path": "???", "resize": "paper", **free}
    store.store(group="encoder", name="pretrained", node=node)
    _brought.clear()
    _brought["data"] = "synthetic"
    store.store(group="data", name="pretrained", node={"defaults": [_brought["data"]]})


def origin(group: str, file: Any) -> Any:
    """The file of a group that is chosen: the checkpoint's where that is `pretrained`."""
    return _brought.get(group, file) if file == "pretrained" else file


def offer_again(arguments: dict[str, str]) -> Sequence[str]:
    """`offer` for a tool that trains: a run that is named, or that the same command began, keeps its checkpoint."""
    own = None
    if arguments.get("overwrite") != "true":
        outputs = Path(arguments.get("outputs", "outputs"))
        named = arguments.get("name")
        files = outputs.rglob("config.yaml") if named is None else [outputs / named / "config.yaml"]
        for file in sorted(files):
            own = own or _began_with(file, named is not None)
    return offer(arguments, own)


def _began_with(file: Path, named: bool) -> str | None:
    """The checkpoint that a run took as the newest, if this command goes on with the run."""
    folder = file.parent
    if (folder.parent / "config.yaml").exists():
        return None  # one of the runs of a comparison
    try:
        values = Configuration.read(file).values
        if values["checkpoint"] != "newest" or not (named or values["command"] == typed_command()):
            return None
        done = any((folder / name).exists() for name in ("comparison.json", "sweep.json"))
        if last := manifest.complete(folder)[-1:]:
            facts = manifest.read(last[0])
            done = facts["step"] == values["recipe"]["steps"] or facts.get("ended", False)
        return None if done and not named else values["encoder"]["path"]
    except (UserError, OSError, KeyError, TypeError):
        return None


def configuration(config: DictConfig) -> Configuration:
    """What a run's folder keeps of its configuration, with the choices that data=pretrained stands for."""
    chosen = HydraConfig.get().runtime.choices
    choices = {group: file for group, file in chosen.items() if not group.startswith("hydra/")}
    if choices.get("data") == "pretrained":
        pretrained = {group for group, file in choices.items() if file == "pretrained" and group != "encoder"}
        own = {group: file for group, file in choices.items() if group not in pretrained}
        choices = own | {group: file for group, file in _brought.items() if group not in own}
    run = {"name": str(config.name), "command": typed_command()}
    return Configuration.of(settled(config) | run, choices)


def settled(config: DictConfig) -> dict[str, Any]:
    """A configuration's values. References to other options stay as written, so that one can be changed; what a
    resolver gave is kept as its value.
    """
    found = _settled(*(OmegaConf.to_container(config, resolve=resolve) for resolve in (False, True)))
    assert isinstance(found, dict)
    return found


def _settled(written: object, resolved: object) -> Any:
    if isinstance(written, dict) and isinstance(resolved, dict):
        return {key: _settled(value, resolved[key]) for key, value in written.items()}
    if isinstance(written, list) and isinstance(resolved, list):
        return [_settled(*both) for both in zip(written, resolved, strict=True)]
    return resolved if isinstance(written, str) and not refers(written) else written


def _data(file: Path) -> tuple[dict[str, Any], dict[str, str | None]]:
    """The group data of a run's config.yaml, with the builders of the files installed here, and its choices.

    ConfigurationError if it holds anything but names of files and values of known options.
    """
    try:
        choices, values = Configuration.read(file).data()
    except (KeyError, TypeError):
        raise ConfigurationError(f"{file}: does not tell the run's images") from None
    node = _composed(choices, file)
    if getattr(find_options(node.get("augment", {}).get("_target_", "")), "views", ("image",)) != ("image",):
        # Several views belong to the method: what comes after it has the data set's single one.
        choices = {group: name for group, name in choices.items() if group.partition("@")[2] != "data.augment"}
        values = {name: value for name, value in values.items() if name != "augment"}
        node = _composed(choices, file)
    _fill(node, values, f"{file}: data")
    return node, choices


def _composed(choices: Mapping[str, str | None], file: Path) -> dict[str, Any]:
    """The group data of the files chosen in the config.yaml `file`; ConfigurationError if one is not here."""
    given = [f"{'+' * (group == 'data')}{group}={name or 'null'}" for group, name in choices.items()]
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return as_dict(compose(overrides=[*search_path(), *given]).data, resolve=False)
    except HydraException:
        named = ", ".join(option.removeprefix("+") for option in given)
        right = "there is no such file here; give the folder that has it (--config-dir, in Python config_dir)"
        raise ConfigurationError(f"{file}: {named}: {right}") from None


def _fill(node: dict[str, Any], values: Any, name: str) -> None:
    """Set the options of the same names. ConfigurationError if there is none."""
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{name}={values}: must hold options")
    for key, value in values.items():
        if key not in node or (isinstance(value, Mapping) and not isinstance(node[key], Mapping)):
            raise ConfigurationError(f"{name}.{key}: there is no such option in this version")
        if isinstance(node[key], Mapping):
            _fill(node[key], value, f"{name}.{key}")
        else:
            node[key] = value


def _foreign_options(arguments: Mapping[str, str]) -> dict[str, Any]:
    """The options for another project's file on the command line, None for each that is not given."""
    try:
        found = {name: yaml.safe_load(arguments.get(f"encoder.{name}", "null")) for name in reading.FOREIGN_OPTIONS}
        each = {
            name.partition(".arguments.")[2]: yaml.safe_load(value)
            for name, value in arguments.items()
            if name.startswith("++encoder.arguments.")
        }
    except yaml.YAMLError:
        raise UserError(f"one of encoder.{', '.join(reading.FOREIGN_OPTIONS)} cannot be read") from None
    if not isinstance(found["arguments"], dict | None):
        raise OptionError("encoder.arguments", found["arguments"], "must be {name: value}")
    return found | {"arguments": {**(found["arguments"] or {}), **each} or None}


def default_name(config: DictConfig) -> str:
    """The name of a run's folder: what it does, from which checkpoint, and on which images if not that run's."""
    choices = HydraConfig.get().runtime.choices
    what = "compare" if config.compare else config.sweep or ("scratch" if config.checkpoint == SCRATCH else "finetune")
    path = Path(config.encoder.get("path", choices["encoder"]))
    start = name_of(path) if "path" in config.encoder else config.encoder.get("model", path.name)
    return "_".join([what, start] if choices["data"] == "pretrained" else [what, start, choices["data"]])


def from_scratch(config: DictConfig) -> DictConfig:
    """The same configuration with random weights in place of those of the checkpoint."""
    if "path" not in config.encoder:
        return config
    given = as_dict(config.encoder, resolve=False)
    trained = Checkpoint.open(given["path"], given).encoder
    changes = {name: given[name] for name in CHANGEABLE if name in given}
    config = config.copy()
    with open_dict(config):
        config.encoder = {"_target_": _TARGETS[kind(trained)], **trained, **changes}
        config.checkpoint = SCRATCH
    return config
