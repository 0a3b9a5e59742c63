"""Provide the choices encoder=pretrained, data=pretrained and its augmentation from a checkpoint and its run. No torch.

A run folder describes its data set by names of choices and by values. Parts are built from the choices of these names
in the installation or in the user's --config-dir, never from the run folder.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ssvit.checkpoints import manifest
from ssvit.checkpoints.checkpoint import PRETRAIN, SCRATCH, Checkpoint
from ssvit.checkpoints.configuration import Configuration, ConfigurationError
from ssvit.choices import PRETRAINED, options_of, part_of
from ssvit.config import composition
from ssvit.config.command_line import CommandLine, Start
from ssvit.config.composed import Config
from ssvit.config.dotted import at
from ssvit.config.filling import is_taken
from ssvit.data.sources import folder
from ssvit.data.sources.base_options import DataSet, Sample
from ssvit.errors import Failure, OptionError, UserError, pair, typed
from ssvit.exchange.options import FOREIGN_OPTIONS
from ssvit.loading.finding import NEWEST, find_checkpoint
from ssvit.loading.options import eval_transform, pixel_format, usual_size
from ssvit.models.timm_options import options_class
from ssvit.models.vit_options import CHANGEABLE, ViT
from ssvit.values import plain

# Options of an encoder that are determined by its weights.
_FIXED = {f"encoder.{name}" for name in ViT.model_fields if name not in {*CHANGEABLE, *FOREIGN_OPTIONS, "channels"}}
_SMALL_RATE = {"recipe.optimizer": "adamw", "recipe.lr": 1e-4}
_OF_OPTIMIZER = {"recipe", "recipe.optimizer", "experiment", "continuation"}  # determine these options
# The continuation that keeps the features of the start, and the objectives of its measurements (docs/starting.md).
_SAFE = {"continuation": "safe", "recipe.lr": 3e-3, "recipe.steps": 200, "recipe.log_every": 10}
_SAFE_OBJECTIVE, _SAFE_OBJECTIVES = "simclr", ("simclr", "mae", "diet")
_SAFE_BATCH_SIZE = 64
_PART = "encoder/checkpoint"
_SAMPLED = 64  # number of images whose size is read


def select_checkpoint(line: CommandLine, newest: str | None = None) -> Checkpoint | None:
    """Find the checkpoint of the command line, and provide the command with its encoder and data set.

    Args:
        line: The command line.
        newest: Checkpoint for checkpoint=newest; None: that of the newest run.

    Returns:
        The checkpoint; None for random weights.

    Raises:
        OptionError: There is no checkpoint, or an option contradicts it.
        UserError: Neither the checkpoint's run nor the command line names a data set.
    """
    arguments = line.typed
    if path := line.text("encoder.path"):
        raise OptionError("encoder.path", path, f"must be checkpoint={path}, which also selects the data set")
    path = line.text("checkpoint") or NEWEST
    if path == SCRATCH:
        if "encoder" in arguments and _selects_data(arguments):
            return None
        path = NEWEST
    elif "encoder" in arguments:
        expected = f"must not be set: the checkpoint contains the encoder; or set checkpoint={SCRATCH}"
        raise OptionError("encoder", arguments["encoder"], expected)
    _check_changes(arguments, _FIXED)
    is_newest = path == NEWEST
    path = newest or line.newest or NEWEST if is_newest else path
    checkpoint = _start(path, line, arguments, changes=(_without_token, _with_format))
    line.newest = str(checkpoint.path) if is_newest else None
    line.implied |= _pixels_of_encoder(checkpoint, arguments)
    return checkpoint


def safe_options(line: CommandLine) -> dict[str, object]:
    """Return the options of pre-training from a checkpoint that are not typed.

    They are empty if typed options determine how weights are trained, or select an objective with which the safe
    continuation was not measured.
    """
    typed = line.typed
    parts = {name.partition(".")[0] for name in typed if "." in name}
    determined = typed.keys() & {*_OF_OPTIMIZER, "recipe.lr", "target"} or parts & {"continuation", "target"}
    is_other = "objective" in parts and "objective" not in typed
    if determined or is_other or typed.get("objective", _SAFE_OBJECTIVE) not in _SAFE_OBJECTIVES:
        return {}
    steps = typed.get("recipe.steps", _SAFE["recipe.steps"])
    options = {"objective": _SAFE_OBJECTIVE, **_SAFE}
    if type(steps) is int and steps > 0:
        every = {"recipe.evaluate_every": steps, "recipe.save_every": math.ceil(steps / 2)}
        options |= {"recipe.warmup": steps // 20, **every}
    return {name: value for name, value in options.items() if name not in typed}


def select_initial_weights(line: CommandLine) -> None:
    """Apply `select_checkpoint` for pre-training, where the default is random weights.

    Raises:
        OptionError: As in `select_checkpoint`, or an option of the encoder is determined by its weights.
    """
    arguments = line.values
    path = str(line.text("checkpoint"))
    if path in (NEWEST, SCRATCH, ""):
        expected = "must be the folder of a run or checkpoint, a file of foreign weights, or null for random weights"
        raise OptionError("checkpoint", path, expected)
    _check_changes(arguments, {"encoder", *_FIXED, "encoder.channels"})
    changes = _without_fixed_options, _with_format, _with_small_rate
    checkpoint = _start(path, line, arguments, changes)
    selects_data = _selects_data(arguments)
    start = re.sub(r"[^\w.+-]+", "-", checkpoint.name)
    run = "_".join(["{objective}", *["{data}"] * selects_data, "from", start])
    line.implied |= {"encoder": PRETRAINED, **_pixels_of_encoder(checkpoint, line.typed)}
    line.implied |= {} if selects_data else {"data": PRETRAINED}
    line.implied |= {} if "name" in arguments else {"name": run}
    if options := safe_options(line):
        if options_class(checkpoint.encoder) is not ViT:  # without low-rank updates
            options = {name: value for name, value in options.items() if name not in ("continuation", "recipe.lr")}
        line.say(f"safe continuation: {' '.join(line.written(options))}")
        line.implied = {"recipe.batch_size": _SAFE_BATCH_SIZE, **line.implied, **options}


def select_checkpoint_again(line: CommandLine) -> Checkpoint | None:
    """Apply `select_checkpoint` for fine-tuning; an existing run of this name or command keeps its checkpoint."""
    newest = None
    if line.typed.get("overwrite") is not True:
        outputs, name = Path(line.text("outputs") or "outputs"), line.text("name")
        files = sorted(outputs.rglob("config.yaml")) if name is None else [outputs / name / "config.yaml"]
        for file in files:
            newest = newest or _checkpoint_of_run(file, line.identity if name is None else None)
    return select_checkpoint(line, newest)


def add_placeholders(line: CommandLine) -> None:
    """Add placeholders for the options of a checkpoint, for a description of the options without a checkpoint."""
    choices: dict[str, str | None] = {"data": "shapes"}
    line.start = Start(_groups({"_part_": _PART}, _composed(choices, Path(), line)), choices)


def with_random_weights(config: Config) -> Config:
    """Return the configuration with random weights instead of the checkpoint's weights."""
    values = config.values["encoder"]
    if "path" not in values:
        return config
    trained = config.options.encoder.loaded()
    changes = {name: config.written["encoder"][name] for name in CHANGEABLE if name in values}
    return config.changed({"encoder": {"_part_": part_of(type(trained)), **trained.values(), **changes}})


def _check_changes(arguments: Mapping[str, object], fixed: Collection[str]) -> None:
    """Raise OptionError if an option is set that a checkpoint's weights determine."""
    for name, value in arguments.items():
        if ".".join(name.split(".")[:2]) in fixed:
            expected = f"must not be set with a checkpoint, which allows only {', '.join(CHANGEABLE)}"
            raise OptionError(name, value, expected)


def _selects_data(arguments: Mapping[str, object]) -> bool:
    return "data" in arguments or "experiment" in arguments


def _pixels_of_encoder(checkpoint: Checkpoint, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the options that make other images match the training images of a run's encoder.

    These are the image size, how images fit into it, the background of transparent pixels and, unless the images are
    photographs in colour or have another number of channels, the channels, their range and their normalisation. Foreign
    weights keep the options in the file of the data set: DINOv2's are trained at 518 px and used at 224.
    """
    if not checkpoint.describes_images or "data" not in arguments or "experiment" in arguments:
        return {}
    options, pixels = {"image_size": checkpoint.encoder["image_size"]}, pixel_format(checkpoint)
    if pixels.background is not None:
        options["background"] = pixels.background
    view = eval_transform(checkpoint)
    if "data.image_size" in arguments:
        view = view.for_size(pair("image_size", arguments["data.image_size"]))
    if view.fit != "cover":
        options |= {"view.fit": view.fit, "view.resize": None}
    elif "data.view.fit" not in arguments:
        options["view.resize"] = view.resize
    is_rgb = pixels.channels == 3 and pixels.range is None
    if not is_rgb and arguments.get("data.channels", pixels.channels) == pixels.channels:
        options |= vars(pixels) | {name: checkpoint.encoder[name] for name in ("mean", "std")}
    return {f"data.{name}": plain(value) for name, value in options.items() if f"data.{name}" not in arguments}


def size_of_images(
    checkpoint: Checkpoint, source: DataSet | None, option: str, images: Sequence[str] = ()
) -> tuple[Any, str]:
    """Return the `usual_size` of foreign weights for the images of a command, and a description of it.

    Args:
        checkpoint: The foreign weights.
        source: Options of the data set.
        option: Name of the option that sets the size.
        images: Files or folders of images that are used instead of the data set.
    """
    from ssvit.data.sources import rasters

    sample: Sample | None = None
    if images:
        sample = Sample.of_paths(folder.paths(images), _SAMPLED)
    elif isinstance(source, DataSet):
        sample = source.sample(_SAMPLED)
    median = rasters.median_side(sample)
    if median is None:  # the images are not files, or cannot be read
        median = min(pair(option, getattr(source, "image_size", None) or usual_size(checkpoint)))
    size = usual_size(checkpoint, median)
    return size, f"{option}={typed(size)}: the images have a median side of {median} pixels"


def _with_format(checkpoint: Checkpoint, config: Config) -> Config:
    """Set the channels and the image size of the encoder.

    The channels are the checkpoint's if the data set has no option for them. The image size is that of the images,
    within the limits of foreign weights, if no option sets it.
    """
    values = config.line.values
    if "channels" not in (config.values["data"] or {}) and "encoder.channels" not in values:
        config = config.changed({"encoder.channels": checkpoint.encoder["channels"]})
    if checkpoint.describes_images or "experiment" in values or "data.image_size" in values:
        return config
    with config.names_as_typed():
        size, line = size_of_images(checkpoint, config.options.data, "data.image_size")
    config.line.say(line)
    return config.changed({"data.image_size": size})


def _without_token(checkpoint: Checkpoint, config: Config) -> Config:
    """Remove the distillation token that distillation=deit adds: weights have one, or a single head is trained."""
    kept = {name: value for name, value in config.written["encoder"].items() if name != "distillation_token"}
    if kept == config.written["encoder"] or "encoder.distillation_token" in config.line.values:
        return config
    if not checkpoint.encoder.get("distillation_token"):
        reason = "the weights have no distillation token; one head learns the labels and the teacher's predictions"
        config.line.say(f"distillation=deit: {reason}")
    return config.changed({"encoder": kept})


def _without_fixed_options(checkpoint: Checkpoint, config: Config) -> Config:
    """Remove options of the encoder that are set by another file but determined by a checkpoint's weights.

    Raises:
        OptionError: The file adds a distillation token, and the checkpoint has none.
    """
    values, trained = config.values["encoder"], checkpoint.encoder
    if values.get("distillation_token") and not trained.get("distillation_token"):
        expected = "must have a distillation token, which distillation=… requires, or be null for random weights"
        raise OptionError("checkpoint", config.values["checkpoint"], expected)
    typed_options = {name.removeprefix("encoder.") for name in config.line.values}
    inapplicable = set(CHANGEABLE) - options_class(trained).model_fields.keys() - typed_options  # set by the objective
    kept = {
        name: value
        for name, value in config.written["encoder"].items()
        if f"encoder.{name}" not in _FIXED and name not in inapplicable
    }
    return config.changed({"encoder": kept})


def _with_small_rate(checkpoint: Checkpoint, config: Config) -> Config:
    """Set AdamW and a small learning rate, unless other options determine them; typed rates of runs have no effect."""
    typed, values = config.line.typed, config.values
    trains_part = values.get("continuation") or values["objective"].get("heads_only")
    is_typed = typed.keys() & _OF_OPTIMIZER or (checkpoint.foreign is None and "recipe.lr" in typed)
    if trains_part or is_typed:
        return config
    changes = {name: value for name, value in _SMALL_RATE.items() if name not in typed}
    chosen = " ".join(f"{name}={value}" for name, value in changes.items())
    config.line.say(f"{chosen}: for existing weights; continuation=safe changes their features less")
    return config.changed(changes)


def _start(
    path: str,
    line: CommandLine,
    arguments: Mapping[str, object],
    changes: Sequence[Callable[[Checkpoint, Config], Config]],
) -> Checkpoint:
    """Let a command start from a checkpoint.

    Args:
        path: Value of the option checkpoint=.
        line: The command line.
        arguments: Values of the options by name.
        changes: Functions that are applied to the composed configuration in this order.

    Returns:
        The checkpoint.
    """
    foreign = {name: arguments.get(f"encoder.{name}") for name in FOREIGN_OPTIONS}  # None for those that are not set
    outputs = line.text("outputs") or "outputs"
    checkpoint = find_checkpoint(path, outputs=outputs, stage=PRETRAIN, say=line.say, options=foreign)
    trained = checkpoint.encoder
    encoder = {
        "_part_": _PART,
        "path": str(checkpoint.path),
        "announce": True,
        # Checkpoints do not contain this option, which only affects the computation of gradients.
        **({"activation_checkpointing": False} if options_class(trained) is ViT else {}),
        **{name: trained[name] for name in CHANGEABLE if name in trained and not is_taken(f"encoder.{name}")},
        "renormalize": [name for name in ("mean", "std") if f"data.{name}" in arguments],
        **(foreign if checkpoint.foreign else {}),
    }
    file = checkpoint.path.parent / "config.yaml"
    data: dict[str, Any] | None = None
    choices: dict[str, str | None] = {}
    try:
        data, choices = _data(file, line)
    except (FileNotFoundError, ConfigurationError) as error:
        if not _selects_data(arguments):
            missing = f"{checkpoint.path}: has no config.yaml of a run next to it"
            reason = missing if isinstance(error, FileNotFoundError) else error
            raise UserError(f"{reason}; select a data set by data=…") from None

    def complete(config: Config) -> Config:
        for change in changes:
            config = change(checkpoint, config)
        return config

    line.start = Start(_groups(encoder, data), choices, complete)
    return checkpoint


def _groups(encoder: dict[str, Any], data: dict[str, Any] | None) -> dict[str, dict[str, Any] | None]:
    """Return the options of an encoder and of a data set; its augmentation is a group, so that it can be replaced."""
    augment = data and data.get("augment")
    data = data and {name: value for name, value in data.items() if name != "augment"}
    return {"encoder": encoder, "data": data, "data.augment": augment}


def _checkpoint_of_run(file: Path, command: str | None) -> str | None:
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
        if values["checkpoint"] != NEWEST or command not in (None, values["command"]):
            return None
        is_finished = any((folder / name).exists() for name in ("comparison.json", "sweep.json"))
        if last := manifest.complete(folder)[-1:]:
            metadata = manifest.read_manifest(last[0])
            is_finished = metadata["step"] == values["recipe"]["steps"]
        return None if is_finished and command is not None else values["encoder"]["path"]
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
        raise ConfigurationError(f"{file}: does not describe a data set") from None
    node = _composed(choices, file, line)
    if getattr(options_of(node.get("augment", {}).get("_part_")), "views", ("image",)) != ("image",):
        # Several views per image belong to the objective; later commands use the data set's single view.
        choices = {group: name for group, name in choices.items() if group.partition("@")[2] != "data.augment"}
        values = {name: value for name, value in values.items() if name != "augment"}
        node = _composed(choices, file, line)
    try:
        _set_options(node, values)
    except UserError as error:
        raise ConfigurationError(f"{file}: data.{error}") from None
    return node, choices


def _set_options(node: dict[str, Any], values: Mapping[str, Any], group: str = "") -> None:
    """Set options by nested names; a mapping is a value where there is no group, as in data.mask_classes."""
    for key, value in values.items():
        name = f"{group}.{key}" if group else key
        if isinstance(value, Mapping) and isinstance(at(node, name), Mapping):
            _set_options(node, value, name)
        else:
            composition.set_option(node, name, value)


def _composed(choices: Mapping[str, str | None], file: Path, line: CommandLine) -> dict[str, Any]:
    """Compose the group data from the files that a config.yaml names; raise ConfigurationError if one is missing."""
    try:
        return composition.group(line, "data", choices)
    except Failure:
        names = ", ".join(f"{group}={name or 'null'}" for group, name in choices.items())
        hint = "is not installed; name its package (--plugin) or its folder (--config-dir)"
        raise ConfigurationError(f"{file}: {names}: {hint}") from None
