"""A run's configuration as its folder keeps it: names of configuration files and values, never what to call.

A configuration names builders (`_target_`), and a builder is code to run. A run's folder may come from anybody, so its
config.yaml holds the names of the files that were chosen in configs/ (`choices`) and the values that were set. Whoever
reads it takes the builders from the files of those names in their own installation. Files of the first edition do name
builders; those of `BUILDERS` are known by name, and a file with any other is refused. No torch.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ssvit.options import UserError, typed

# What may differ between a run and its continuation: it changes where and how fast, not what is computed.
# The fingerprint of the images stands for their folder, and the precision that was used for recipe.precision=auto:
# both are in the checkpoint, and so is which weights a fine-tuning started from. Probes look on.
FREE = (
    "overwrite", "outputs", "workers", "loader_timeout", "evaluators.test.timeout", "fabric", "data.root",
    "data.download", "data.masks", "data.verify", "data.source", "recipe.precision", "checkpoint", "encoder.path",
    "encoder.activation_checkpointing", "seeds", "probe", "probing", "command",
)  # fmt: skip
# Groups whose files hold values alone, which are compared, or what `FREE` has.
FREE_CHOICES = ("experiment", "recipe", "data", "probe")
# Options that later versions added, each with the value by which a run does what it did before.
ADDED: Mapping[str, Any] = {
    "data.train": "auto",
    "data.validation": "auto",
    "data.test": "auto",
    "data.view.fit": "cover",
    "encoder.gelu": "exact",
    "objective.distillation.reduction": "batch",
    "objective.head_bias": 0.0,
    "objective.loss": "softmax",
    "recipe.lr_end": 0.0,
    "recipe.weight_decay_end": None,
}

# Options that have another name today, and what their values, as they are typed, are called.
RENAMED: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "recipe.compile": ("recipe.backend", {"auto": "auto", "true": "compile", "false": "kernels"}),
}

# The builders that the first edition's config.yaml names, and what they are called today.
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
    "ssvit.training.checkpoint.load_classifier": "ssvit.checkpoints.storage.load_classifier",
    "ssvit.training.checkpoint.load_encoder": "ssvit.checkpoints.storage.load_encoder",
}
# The files of configs/ that stand for those of a data set (None where the set's own name tells it) and an augmentation.
_DATA = {
    "ssvit.data.sources.synthetic": "synthetic",
    "ssvit.data.sources.folder": "folder",
    "ssvit.data.sources.imagenet": "imagenet",
    "ssvit.data.sources.torchvision_set": None,
}
_AUGMENTATIONS = {
    "ssvit.data.transforms.InceptionCrop": "inception_crop",
    "ssvit.data.transforms.ShiftCrop": "shift_crop",
}

_LARGEST = 1 << 20  # bytes of a config.yaml; ours have some thousand
_REFERENCE = re.compile(r"\$\{\.*[A-Za-z_][\w.]*\}")  # to another option; a resolver has a colon
_FILE_NAME = re.compile(r"[A-Za-z0-9][\w-]*(/[A-Za-z0-9][\w-]*)*")
_GROUP = re.compile(r"[A-Za-z]\w*(@[A-Za-z][\w.]*)?")


class ConfigurationError(UserError):
    """A run's config.yaml cannot be used."""


def flatten(config: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries: ("recipe.lr", 0.001), …"""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from flatten(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, config


def command(arguments: Iterable[str]) -> str:
    """What tells a command by the options typed, in whatever order: a sha256, since they may hold what is private."""
    return hashlib.sha256("\n".join(sorted(arguments)).encode(errors="surrogateescape")).hexdigest()


def refers(text: str) -> bool:
    """Whether what a text refers to, if anything, are other options alone, which calls nothing: ${data.root}."""
    return "${" not in _REFERENCE.sub("", text)


def foreign(node: Any) -> str:
    """The name of the first thing in nested options that is neither a value nor a reference to one, "" if all are."""
    return next(
        (
            name
            for name, key, value in _walk(node)
            if str(key).startswith("_") or (isinstance(value, str) and not refers(value))
        ),
        "",
    )


@dataclass(frozen=True)
class Configuration:
    """values: nested options without builders. choices: by group, the file chosen in configs/, None for none.
    builders: by option, as "data.source", what is called there; a config.yaml of the second edition has none.
    """

    values: dict[str, Any]
    choices: dict[str, str | None]
    builders: dict[str, str]

    @classmethod
    def of(cls, config: Mapping[str, Any], choices: Mapping[str, str | None]) -> "Configuration":
        """That of a composed configuration, as plain data that still has its builders."""
        return cls(_values(config), dict(choices), _builders(config))

    @classmethod
    def read(cls, path: Path) -> "Configuration":
        """That in a run's config.yaml. ConfigurationError unless it holds nothing but names and values.

        FileNotFoundError if there is no such file.
        """
        config = _load(path)
        builders = {} if "choices" in config else _builders(config)
        for name, builder in builders.items():
            if not isinstance(builder, str) or builder not in BUILDERS:
                raise ConfigurationError(
                    f"{path}: {name}._target_={builder}: is none of the builders of ssvit; nothing of it was run"
                )
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
        """As `read` takes it from a config.yaml."""
        return yaml.safe_dump({"choices": self.choices, **self.values}, sort_keys=False, allow_unicode=True).encode()

    def data(self) -> tuple[dict[str, str | None], dict[str, Any]]:
        """The choices that make the group data, as {"data": "cifar10", "augment@data.augment": …}, and its values.

        KeyError if they are not told.
        """
        values = self.values["data"]
        if self.choices:
            parts = {group: file for group, file in self.choices.items() if group.partition("@")[2].startswith("data.")}
            return {"data": self.choices["data"], **parts}, values
        name = _DATA[self.builders["data.source"]] or values["source"]["name"]
        if not _FILE_NAME.fullmatch(str(name)):
            raise KeyError(name)
        return {"data": name, "augment@data.augment": _AUGMENTATIONS[self.builders["data.augment"]]}, values

    def difference(self, old: "Configuration") -> tuple[str, Any, Any] | None:
        """The first option in which a run would differ from an old one, with its value now and then, of those that
        matter; None if it would go on as it was begun.
        """
        sides = [dict(map(_renamed, flatten(side.values))) for side in (old, self)]
        # The first edition's dropout was of attention weights too.
        added = {"encoder.attention_dropout": sides[0].get("encoder.dropout", 0.0), **ADDED}
        if old.choices:
            kinds, free = [old.choices, self.choices], FREE_CHOICES
        else:
            sets = (old.builders, self.builders)
            kinds, free = [{name: BUILDERS.get(one, one) for name, one in own.items()} for own in sets], FREE
        for (before, now), passed in ((kinds, free), (sides, FREE)):
            for key in [*now, *before]:
                if any(key == name or key.startswith(f"{name}.") for name in passed):
                    continue
                then, value = (side.get(key, added.get(key, "(absent)")) for side in (before, now))
                if then != value:
                    return key, value, then
        return None


def _renamed(leaf: tuple[str, Any]) -> tuple[str, Any]:
    """An option and its value, as they are called today."""
    name, values = RENAMED.get(leaf[0], (leaf[0], {}))
    return name, values.get(typed(leaf[1]), leaf[1]) if values else leaf[1]


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
    """Plain data alone, and without aliases, by which a few lines can stand for more than any memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


def _walk(node: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Everything at any depth, lists included: its dotted name, its key (None in a list), and itself."""
    inside = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inside:
        full = f"{name}[{key}]" if isinstance(node, list) else f"{name}.{key}" if name else str(key)
        yield full, None if isinstance(node, list) else key, value
        yield from _walk(value, full)


def _builders(node: Any) -> dict[str, Any]:
    return {name.removesuffix("._target_"): value for name, key, value in _walk(node) if key == "_target_"}


def _values(node: Any) -> Any:
    """A copy without what tells what to call."""
    if isinstance(node, Mapping):
        return {key: _values(value) for key, value in node.items() if key != "_target_"}
    return [_values(value) for value in node] if isinstance(node, list) else node
