"""Provide the choices encoder=pretrained, data=pretrained and its augmentation from a checkpoint and its run. No torch.

A run folder describes its data set by names of files in configs/ and by values. Parts are built from the files of these
names in the installation or in the user's --config-dir, never from the run folder.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ssvit.checkpoints import manifest
from ssvit.checkpoints.checkpoint import PRETRAIN, SCRATCH, Checkpoint
from ssvit.checkpoints.configuration import Configuration, ConfigurationError
from ssvit.config import composition
from ssvit.config.command_line import CommandLine
from ssvit.config.composed import Config
from ssvit.config.declaration import find as find_options
from ssvit.data.sources.decode_options import RGB
from ssvit.exchange.reading_options import FOREIGN_OPTIONS
from ssvit.loading.encoder_options import LoadEncoder, pixel_format
from ssvit.loading.finding import NEWEST, find, open_checkpoint
from ssvit.models.timm_options import kind, of
from ssvit.models.vit_options import CHANGEABLE, ViT
from ssvit.options import Failure, OptionError, UserError

# Options of an encoder that are determined by its weights, and the subset that other options refer to.
_FIXED = set(ViT.model_fields) - {*CHANGEABLE, *FOREIGN_OPTIONS}
_REFERRED = ("patch_size", "width", "channels")


def offer(line: CommandLine, own: str | None = None) -> None:
    """Find the checkpoint of the command line, and add its encoder and data set to the choices of the command.

    Args:
        line: The command line.
        own: Checkpoint that replaces newest; None for no replacement.

    Raises:
        OptionError: There is no checkpoint, or an option contradicts it.
        UserError: Neither the checkpoint's run nor the command line names a data set.
    """
    arguments = line.typed
    if "encoder.path" in arguments:
        where = arguments["encoder.path"]
        raise OptionError("encoder.path", where, f"must be checkpoint={where}, with which its run's images come too")
    wanted = arguments.get("checkpoint", "newest")
    if wanted == SCRATCH:
        if "encoder" in arguments and ("data" in arguments or "experiment" in arguments):
            return
        wanted = "newest"
    elif arguments.get("encoder") == "timm":  # its weights are in a file
        if wanted == NEWEST:
            right = f"must be a file of weights of timm's model, or {SCRATCH}"
            raise OptionError("checkpoint", wanted, right)
        line.added += ["encoder=pretrained", *_own_images(_offer(wanted, line, arguments), arguments)]
        return
    elif "encoder" in arguments:
        raise OptionError("encoder", arguments["encoder"], f"a checkpoint brings its own; or give checkpoint={SCRATCH}")
    if wanted == "newest" and own is not None:
        wanted = own
    line.added += _own_images(_offer(wanted, line, arguments), arguments)


def offer_start(line: CommandLine) -> None:
    """Apply `offer` for pre-training, where the default is random weights.

    Raises:
        OptionError: As in `offer`, or an option of the encoder is determined by its weights.
    """
    arguments = line.values
    wanted = arguments["checkpoint"]
    if wanted in (NEWEST, SCRATCH):
        right = "must be the folder of a run or of a checkpoint, a file of foreign weights, or null for random weights"
        raise OptionError("checkpoint", wanted, right)
    for name, value in arguments.items():
        if name == "encoder":
            raise OptionError(name, value, "a checkpoint brings its own")
        if name.startswith("encoder.") and name.split(".")[1] in _FIXED:
            raise OptionError(name, value, f"is the checkpoint's own; {', '.join(CHANGEABLE)} can be changed")
    found = _offer(wanted, line, arguments, refer=_REFERRED)
    chosen = "data" in arguments or "experiment" in arguments
    start = re.sub(r"[^\w.+-]+", "-", found.name)
    parts = ["${hydra:runtime.choices.objective}", *["${hydra:runtime.choices.data}"] * chosen, "from", start]
    line.added += [
        "encoder=pretrained",
        *([] if chosen else ["data=pretrained"]),
        *([] if "name" in arguments else [f"name={'_'.join(parts)}"]),
        *_own_images(found, arguments),
    ]
    line.finish = _keep_weights


def _own_images(found: Checkpoint, arguments: Mapping[str, str]) -> Sequence[str]:
    """Return the options that make other images match those on which a run's encoder was trained.

    These are the image size, which the file of a data set sets for any encoder, and the channels, their range and their
    normalisation unless they are those of photographs in colour. Foreign weights keep the options in the file: DINOv2's
    are trained at 518 px and used at 224.
    """
    if found.foreign or "data" not in arguments or "experiment" in arguments:
        return ()
    own, pixels = {"image_size": found.encoder["image_size"]}, pixel_format(found)
    if pixels != RGB:
        own |= vars(pixels) | {name: found.encoder[name] for name in ("mean", "std")}
    options = {f"data.{name}": json.dumps(value, separators=(",", ":")) for name, value in own.items()}
    return [f"++{name}={value}" for name, value in options.items() if name not in arguments]


def _keep_weights(config: Config) -> Config:
    """Remove options of the encoder that are set by another file but determined by a checkpoint's weights.

    Raises:
        OptionError: The file adds a distillation token, and the checkpoint has none.
    """
    given = config.values["encoder"]
    if given.get("distillation_token") and not open_checkpoint(given["path"], given).encoder.get("distillation_token"):
        right = "has no distillation token, which distillation=… needs: give one that has, or null for random weights"
        raise OptionError("checkpoint", config.value("checkpoint"), right)
    return config.without(*(f"encoder.{name}" for name in _FIXED.intersection(given) - {*_REFERRED}))


def _offer(wanted: str, line: CommandLine, arguments: Mapping[str, str], refer: Sequence[str] = ()) -> Checkpoint:
    """Add a checkpoint's encoder, data set and augmentation to the choices of a command.

    Args:
        wanted: Value of the option checkpoint=.
        line: The command line.
        arguments: Values of the options by name.
        refer: Options of the encoder that are determined by its weights and that other options refer to.

    Returns:
        The checkpoint.
    """
    foreign = _foreign_options(arguments)
    found = find(wanted, outputs=arguments.get("outputs", "outputs"), stage=PRETRAIN, say=line.say, options=foreign)
    trained = found.encoder
    line.nodes["encoder", "pretrained"] = {
        "_target_": LoadEncoder.part_name(),
        "path": str(found.path),
        "resize": "paper",
        "announce": True,
        # Checkpoints do not contain this option, which only affects the computation of gradients.
        **({"activation_checkpointing": False} if kind(trained) is ViT else {}),
        **{name: trained[name] for name in (*refer, *CHANGEABLE) if name in trained},
        "image_size": "${data.image_size}",
        **(foreign if found.foreign else {}),
    }
    chooses = "data" in arguments or "experiment" in arguments
    try:
        data, choices = _data(found.path.parent / "config.yaml", line)
    except FileNotFoundError:
        if not chooses:
            raise UserError(f"{found.path}: no config.yaml of a run beside it tells its images; give data=…") from None
    except ConfigurationError as error:
        if not chooses:
            raise UserError(f"{error}; or give data=…") from None
    else:
        line.brought = choices
        augment = data.pop("augment", None)
        if augment is not None:  # a separate choice, so that it can be replaced
            line.nodes["augment", "pretrained"] = augment
            data = {"defaults": [{"/augment@augment": "pretrained"}, "_self_"], **data}
        line.nodes["data", "pretrained"] = data
    return found


def stand_in(line: CommandLine) -> None:
    """Add placeholders for the choices of a checkpoint, for a description of the options without a checkpoint."""
    free = {**dict.fromkeys(CHANGEABLE), "image_size": "${data.image_size}"}
    node = {"_target_": LoadEncoder.part_name(), "path": "???", "resize": "paper", **free}
    line.nodes["encoder", "pretrained"] = node
    line.brought = {"data": "synthetic"}
    line.nodes["data", "pretrained"] = {"defaults": ["synthetic"]}


def offer_again(line: CommandLine) -> None:
    """Apply `offer` for fine-tuning; an existing run of this name or of the same command keeps its checkpoint."""
    own, arguments = None, line.typed
    if arguments.get("overwrite") != "true":
        outputs = Path(arguments.get("outputs", "outputs"))
        named = arguments.get("name")
        files = outputs.rglob("config.yaml") if named is None else [outputs / named / "config.yaml"]
        for file in sorted(files):
            own = own or _began_with(file, None if named is not None else line.identity)
    offer(line, own)


def _began_with(file: Path, command: str | None) -> str | None:
    """Return the checkpoint that a run selected as newest, if a command continues the run; otherwise None.

    Args:
        file: The run's config.yaml.
        command: Identity of the command; None if the command names the run.
    """
    folder = file.parent
    if (folder.parent / "config.yaml").exists():
        return None  # a run of a comparison
    try:
        values = Configuration.read(file).values
        if values["checkpoint"] != "newest" or command not in (None, values["command"]):
            return None
        done = any((folder / name).exists() for name in ("comparison.json", "sweep.json"))
        if last := manifest.complete(folder)[-1:]:
            facts = manifest.read(last[0])
            done = facts["step"] == values["recipe"]["steps"] or facts.get("ended", False)
        return None if done and command is not None else values["encoder"]["path"]
    except (UserError, OSError, KeyError, TypeError):
        return None


def _data(file: Path, line: CommandLine) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Return the group data of a run's config.yaml, with builders from installed files, and its choices.

    Raises:
        ConfigurationError: The file contains more than names of files and values of known options.
    """
    try:
        choices, values = Configuration.read(file).data()
    except (KeyError, TypeError):
        raise ConfigurationError(f"{file}: does not tell the run's images") from None
    node = _composed(choices, file, line)
    if getattr(find_options(node.get("augment", {}).get("_target_", "")), "views", ("image",)) != ("image",):
        # Several views per image belong to the objective; later commands use the data set's single view.
        choices = {group: name for group, name in choices.items() if group.partition("@")[2] != "data.augment"}
        values = {name: value for name, value in values.items() if name != "augment"}
        node = _composed(choices, file, line)
    _fill(node, values, f"{file}: data")
    return node, choices


def _composed(choices: Mapping[str, str | None], file: Path, line: CommandLine) -> dict[str, Any]:
    """Compose the group data from the files that a config.yaml names; raise ConfigurationError if one is missing."""
    try:
        return composition.group(line, "data", choices)
    except Failure:
        named = ", ".join(f"{group}={name or 'null'}" for group, name in choices.items())
        right = "is not here; give the package (--plugin) or the folder (--config-dir) that has it"
        raise ConfigurationError(f"{file}: {named}: {right}") from None


def _fill(node: dict[str, Any], values: Any, name: str) -> None:
    """Set the options of a node to values of the same names; raise ConfigurationError if an option is unknown."""
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
    """Return the options for foreign files on the command line; None for each that is not set."""
    try:
        found = {name: yaml.safe_load(arguments.get(f"encoder.{name}", "null")) for name in FOREIGN_OPTIONS}
        each = {
            name.partition(".arguments.")[2]: yaml.safe_load(value)
            for name, value in arguments.items()
            if name.startswith("encoder.arguments.")
        }
    except yaml.YAMLError:
        raise UserError(f"one of encoder.{', '.join(FOREIGN_OPTIONS)} cannot be read") from None
    if not isinstance(found["arguments"], dict | None):
        raise OptionError("encoder.arguments", found["arguments"], "must be {name: value}")
    return found | {"arguments": {**(found["arguments"] or {}), **each} or None}


def from_scratch(config: Config) -> Config:
    """Return the configuration with random weights instead of the checkpoint's weights."""
    given = config.values["encoder"]
    if "path" not in given:
        return config
    trained = of(open_checkpoint(given["path"], given).encoder)
    changes = {name: config.written["encoder"][name] for name in CHANGEABLE if name in given}
    encoder = {"_target_": trained.part_name(), **trained.values(), **changes}
    return config.changed({"encoder": encoder})
