"""A run's configuration as its folder keeps it: names of configuration files and values, never what to call.

A builder (`_target_`) is code to run, and a run's folder may come from anybody. So its config.yaml holds the names of
the files chosen in configs/ (`choices`) and the values; a reader takes the builders from its own files of those names.
Files of the first edition do name builders: one that is not in `BUILDERS` is refused. No torch.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ssvit.options import UserError, typed

# What may differ between a run and its continuation: it changes where and how fast, not what is computed, or the
# checkpoint itself tells it (the images' fingerprint, the precision used, the weights that a fine-tuning started from).
FREE = (
    "overwrite", "outputs", "workers", "loader_timeout", "evaluators", "fabric", "data.root",
    "data.cache", "data.download", "data.masks", "data.verify", "data.shown", "data.source", "recipe.precision",
    "recipe.best", "recipe.patience", "checkpoint", "encoder.path", "encoder.activation_checkpointing", "seeds",
    "probe", "probing", "command", "logger", "target.checkpoint", "preset",
)  # fmt: skip
# Groups whose files hold only values, which are compared, and options in `FREE`.
FREE_CHOICES = ("experiment", "recipe", "data", "probe", "evaluator@evaluators", "logger")
# Options that later versions added, with the values that stand for the behaviour before.
ADDED: Mapping[str, object] = {
    "data.augment.blur": 0.0,
    "data.augment.brightness": 0.4,
    "data.augment.contrast": 0.4,
    "data.augment.grayscale": 0.0,
    "data.augment.hue": 0.1,
    "data.augment.jitter": 0.0,
    "data.augment.magnitude": 9,
    "data.augment.quarter_turns": False,
    "data.augment.randaugment": 0,
    "data.augment.rotation": 0.0,
    "data.augment.saturation": 0.2,
    "data.augment.sigma": [0.1, 2.0],
    "data.augment.solarize": 0.0,
    "data.augment.vertical_flip": 0.0,
    "data.channels": 3,
    "data.decoding": "full",
    "data.order": "permutation",
    "data.range": None,
    "data.train": "auto",
    "data.validation": "auto",
    "data.test": "auto",
    "data.view.fit": "cover",
    "encoder.gelu": "exact",
    "encoder.layer_scale": None,
    "encoder.mlp": "gelu",
    "encoder.norm_epsilon": 1e-6,
    "encoder.registers": 0,
    "objective.class_weights": None,
    "objective.decoder": None,
    "objective.distillation.reduction": "batch",
    "objective.head_bias": 0.0,
    "objective.loss": "softmax",
    "objective.lora": None,
    "objective.masking.unit": 1,
    "objective.trained": "all",
    "recipe.lr_end": 0.0,
    "recipe.sam": 0.0,
    "recipe.weight_decay_end": None,
    "target.loss": "l2",
}

# The new names of options, and of their values as they are typed.
RENAMED: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "recipe.compile": ("recipe.backend", {"auto": "auto", "true": "compile", "false": "kernels"}),
}

# The builders that the first edition's config.yaml names, and their names today.
BUILDERS: Mapping[str, str] = {
    "ssvit.data.sources.folder": "ssvit.data.datasets.folder",
    "ssvit.data.sources.imagenet": "ssvit.data.datasets.imagenet",
    "ssvit.data.sources.synthetic": "ssvit.data.datasets.synthetic",
    "ssvit.data.sources.torchvision_set": "ssvit.data.datasets.torchvision_set",
    "ssvit.data.transforms.CenterCrop": "ssvit.data.augment.crop.CenterCrop",
    "ssvit.data.transforms.InceptionCrop": "ssvit.data.augment.crop.InceptionCrop",
    "ssvit.data.transforms.ShiftCrop": "ssvit.data.augment.crop.ShiftCrop",
    "ssvit.encoder.vit.ViT": "ssvit.models.vit.ViT",
    "ssvit.evaluation.classification.Classification": "ssvit.evaluation.classification.Classification",
    "ssvit.evaluation.few_shot_probe.FewShotProbe": "ssvit.evaluation.probes.ridge.FewShot",
    "ssvit.evaluation.knn_probe.KnnProbe": "ssvit.evaluation.probes.knn.Knn",
    "ssvit.evaluation.prediction.Prediction": "ssvit.evaluation.reconstruction.Prediction",
    "ssvit.masking.Masking": "ssvit.objectives.masking.Masking",
    "ssvit.objectives.classify.Classify": "ssvit.objectives.classify.Classify",
    "ssvit.objectives.distillation.Distillation": "ssvit.objectives.distillation.Distillation",
    "ssvit.objectives.masked_patch.MaskedPatch": "ssvit.objectives.masked_patch.MaskedPatch",
    "ssvit.targets.ColorGrid": "ssvit.objectives.targets.ColorGrid",
    "ssvit.targets.MeanColor": "ssvit.objectives.targets.MeanColor",
    "ssvit.targets.Pixels": "ssvit.objectives.targets.Pixels",
    "ssvit.training.checkpoint.load_classifier": "ssvit.checkpoints.loading.load_classifier",
    "ssvit.training.checkpoint.load_encoder": "ssvit.checkpoints.loading.load_encoder",
}
# The files of configs/ for its data sets (None where the set's own name is the file's) and augmentations.
_FILES = {
    "ssvit.data.sources.synthetic": "synthetic",
    "ssvit.data.sources.folder": "folder",
    "ssvit.data.sources.imagenet": "imagenet",
    "ssvit.data.sources.torchvision_set": None,
    "ssvit.data.transforms.InceptionCrop": "inception_crop",
    "ssvit.data.transforms.ShiftCrop": "shift_crop",
}

_LARGEST = 1 << 20  # bytes of a config.yaml; ours have some thousand
_REFERENCE = re.compile(r"\$\{\.*[A-Za-z_][\w.]*\}")  # to another option; a resolver has a colon
_FILE_NAME = re.compile(r"[A-Za-z0-9][\w-]*(/[A-Za-z0-9][\w-]*)*")
_GROUP = re.compile(r"[A-Za-z]\w*(@[A-Za-z][\w.]*)?")


class ConfigurationError(UserError):
    """A run's config.yaml cannot be used."""


def flatten(config: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries: ("recipe.lr", 0.001), …"""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from flatten(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, config


def command(arguments: Iterable[str]) -> str:
    """What identifies a command by its options in any order: a sha256, since they may be private."""
    return hashlib.sha256("\n".join(sorted(arguments)).encode(errors="surrogateescape")).hexdigest()


def is_free(option: str, names: Iterable[str] = FREE) -> bool:
    """Whether an option is one of those named, or in a group of them: by default, those that may change in a run."""
    return any(option == name or option.startswith(f"{name}.") for name in names)


def refers(text: str) -> bool:
    """Whether a text refers to nothing but other options, as ${data.root}, which calls nothing."""
    return "${" not in _REFERENCE.sub("", text)


def is_of_a_run(path: Path) -> bool:
    """Whether a run of any edition wrote a file: it names files of configs/, or builders of ssvit."""
    try:
        config = Configuration.read(path)
    except (FileNotFoundError, ConfigurationError):
        return False
    return bool(config.choices or config.builders)


def foreign(node: object) -> str:
    """The name of the first thing in nested options that is neither a value nor a reference to one, "" if all are."""
    for name, key, value in _walk(node):
        if str(key).startswith("_") or (isinstance(value, str) and not refers(value)):
            return name
    return ""


@dataclass(frozen=True)
class Configuration:
    """values: nested options without builders. choices: by group, the file chosen in configs/, None for none.
    builders: by option, as "data.source", what is called there; only the first edition kept them.
    """

    values: dict[str, Any]
    choices: dict[str, str | None]
    builders: dict[str, str]

    @classmethod
    def of(cls, config: Mapping[str, object], choices: Mapping[str, str | None]) -> "Configuration":
        """From a composed configuration, as plain data that still has its builders."""
        return cls(_values(config), dict(choices), _builders(config))

    @classmethod
    def read(cls, path: Path) -> "Configuration":
        """From a run's config.yaml. FileNotFoundError; ConfigurationError unless it holds names and values alone."""
        config = _load(path)
        builders = {} if "choices" in config else _builders(config)
        for name, builder in builders.items():
            if not isinstance(builder, str) or builder not in BUILDERS:
                right = "is none of the builders of ssvit; nothing of it was run"
                raise ConfigurationError(f"{path}: {name}._target_={builder}: {right}")
        if name := foreign(_values(config) if builders else config):
            raise ConfigurationError(f"{path}: {name}: a run's configuration may hold values only; nothing was run")
        choices = config.pop("choices", {})
        named = isinstance(choices, Mapping) and all(
            _GROUP.fullmatch(group) and (file is None or (isinstance(file, str) and _FILE_NAME.fullmatch(file)))
            for group, file in choices.items()
        )
        if not named:
            raise ConfigurationError(f"{path}: choices={choices}: must name files of configs/, each by its group")
        return cls(_values(config), dict(choices), builders)

    def write(self) -> bytes:
        """The text of a config.yaml."""
        return yaml.safe_dump({"choices": self.choices, **self.values}, sort_keys=False, allow_unicode=True).encode()

    def data(self) -> tuple[dict[str, str | None], dict[str, Any]]:
        """The choices of the group data, such as {"data": "cifar10"}, and its values. KeyError if there are none."""
        values = self.values["data"]
        if self.choices:
            parts = {group: file for group, file in self.choices.items() if group.partition("@")[2].startswith("data.")}
            return {"data": self.choices["data"], **parts}, values
        name = _FILES[self.builders["data.source"]] or values["source"]["name"]
        if not _FILE_NAME.fullmatch(str(name)):
            raise KeyError(name)
        return {"data": name, "augment@data.augment": _FILES[self.builders["data.augment"]]}, values

    def difference(self, old: "Configuration") -> tuple[str, Any, Any] | None:
        """The first option that matters and differs from an old run's, with its value now and then; None if none."""
        sides = [dict(map(_renamed, flatten(side.values))) for side in (old, self)]
        # The first edition's dropout was of attention weights too.
        added = {"encoder.attention_dropout": sides[0].get("encoder.dropout", 0.0), **ADDED}
        kinds: Sequence[Mapping[str, str | None]] = [old.choices, self.choices]
        free: Sequence[str] = FREE_CHOICES
        if not old.choices:  # of the first edition
            kinds = [{name: BUILDERS.get(one, one) for name, one in side.builders.items()} for side in (old, self)]
            free = FREE
        for (before, now), names in ((kinds, free), (sides, FREE)):
            for key in [*now, *before]:
                then, value = (side.get(key, added.get(key, "(absent)")) for side in (before, now))
                if then != value and not is_free(key, names):
                    return key, value, then
        return None


def _renamed(leaf: tuple[str, object]) -> tuple[str, Any]:
    """An option and its value by their names today."""
    name, value = leaf
    today, values = RENAMED.get(name, (name, {}))
    return today, values.get(typed(value), value)


def _load(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            text = file.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise ConfigurationError(f"{path}: has more than {_LARGEST} bytes, so no run of ours wrote it")
        config = yaml.load(text, _Loader)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError):
        raise ConfigurationError(f"{path}: is damaged, or was not written by a run") from None
    if not isinstance(config, dict) or not all(isinstance(key, str | None) for _, key, _ in _walk(config)):
        what = "is empty" if config is None else "is damaged, or was not written by a run"
        raise ConfigurationError(f"{path}: {what}")
    return config


class _Loader(yaml.SafeLoader):
    """Plain data without aliases, by which a few lines could stand for more than any memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


def _walk(node: object, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Everything at any depth, lists included: its dotted name, its key (None in a list), and itself."""
    if isinstance(node, Mapping):
        parts = [(f"{name}.{key}" if name else str(key), key, value) for key, value in node.items()]
    else:
        parts = [(f"{name}[{i}]", None, value) for i, value in enumerate(node if isinstance(node, list) else ())]
    for full, key, value in parts:
        yield full, key, value
        yield from _walk(value, full)


def _builders(node: object) -> dict[str, Any]:
    return {name.removesuffix("._target_"): value for name, key, value in _walk(node) if key == "_target_"}


def _values(node: object) -> Any:
    """A copy without builders."""
    if isinstance(node, Mapping):
        return {key: _values(value) for key, value in node.items() if key != "_target_"}
    return [_values(value) for value in node] if isinstance(node, list) else node
