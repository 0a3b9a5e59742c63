"""List the parts of ssvit by group and name: the choices of objective=…, probes=[…] and all other groups. No torch.

A part is one row: its group, its name and its code. The class of its options has the name of the part and is in the
module of its group's options, or else in the module of the code with the suffix _options, so that options are checked
without loading torch; a row states where it deviates. Another package adds a row by `add`.
"""

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """A row of the table.

    Attributes:
        code: Dotted name of the class or function that is called with the options.
        options: Dotted name of the class of the options; "": the class of the same name in the module of the group's
            options, or in the module of the code with the suffix _options.
        listed: Whether the name is a choice. Other parts are chosen by files of options or by objectives.
    """

    code: str
    options: str = ""
    listed: bool = True

    @property
    def is_built_in(self) -> bool:
        """Return whether the part belongs to ssvit and not to another package."""
        return self.code.startswith("ssvit.")


@dataclass(frozen=True)
class Group:
    """A group of options.

    Attributes:
        meaning: Description for `--help`; "" if the command describes an option of the same name.
        several: Whether several parts may be chosen, each with its options under its name.
        options: Module of the options of all built-in parts; "": each part has its own.
    """

    meaning: str = ""
    several: bool = False
    options: str = ""


GROUPS = {
    "augment": Group("Augmentation of the training images.", options="ssvit.data.augment.options"),
    "continuation": Group("How training continues from existing weights."),
    "data": Group(),
    "distillation": Group("Distillation from a teacher, in addition to the labels."),
    "encoder": Group(),
    "evaluator": Group(several=True, options="ssvit.evaluation.evaluators.options"),
    "experiment": Group("A complete run in one file."),
    "index": Group(),
    "logger": Group(several=True, options="ssvit.training.loggers.options"),
    "objective": Group(),
    "probe": Group(several=True, options="ssvit.evaluation.probes.options"),
    "target": Group("What is predicted of a patch."),
}

PARTS: dict[str, dict[str, Part]] = {
    "objective": {
        "classify": Part("ssvit.objectives.classify.Classify"),
        "contrastive_tuning": Part("ssvit.objectives.contrastive.ContrastiveTuning"),
        "diet": Part("ssvit.objectives.diet.Diet"),
        "dino": Part("ssvit.objectives.dino.Dino"),
        "distill": Part("ssvit.objectives.distill.Distill"),
        "ibot": Part("ssvit.objectives.dino.IBot"),
        "latent": Part("ssvit.objectives.latent.Latent"),
        "mae": Part("ssvit.objectives.mae.MAE"),
        "masked_patch": Part("ssvit.objectives.masked_patch.MaskedPatch"),
        "simclr": Part("ssvit.objectives.contrastive.SimCLR"),
    },
    "target": {
        "codebook": Part("ssvit.objectives.codebook.Codebook", listed=False),
        "hog": Part("ssvit.objectives.targets.Hog"),
        "mean_color": Part("ssvit.objectives.targets.MeanColor"),
        "pixels": Part("ssvit.objectives.targets.Pixels"),
    },
    "continuation": {"full": Part("ssvit.objectives.continuation.Continuation")},
    "distillation": {"teacher": Part("ssvit.objectives.classify.Distillation", listed=False)},
    "encoder": {
        "vit": Part("ssvit.models.vit.ViT", listed=False),
        "timm": Part("ssvit.models.timm.Timm", listed=False),
        "pretrained": Part(
            "ssvit.loading.encoder.load_encoder", "ssvit.loading.encoder_options.LoadEncoder", listed=False
        ),
    },
    "teacher": {
        "classifier": Part("ssvit.loading.encoder.load_classifier", "ssvit.loading.encoder_options.LoadClassifier"),
        "encoder": Part("ssvit.loading.encoder.load_teacher", "ssvit.loading.encoder_options.LoadTeacher"),
        "layers": Part("ssvit.loading.encoder.load_layers", "ssvit.loading.encoder_options.LoadLayers"),
    },
    "data": {
        "csv": Part("ssvit.data.sources.datasets.csv", "ssvit.data.sources.datasets_options.Csv"),
        "folder": Part("ssvit.data.sources.datasets.folder", "ssvit.data.sources.datasets_options.Folder"),
        "huggingface": Part(
            "ssvit.data.sources.huggingface.hugging_face", "ssvit.data.sources.huggingface_options.HuggingFace"
        ),
        "shards": Part("ssvit.data.sources.datasets.shards", "ssvit.data.sources.datasets_options.Shards"),
        "synthetic": Part("ssvit.data.sources.synthetic.synthetic", "ssvit.data.sources.synthetic_options.Synthetic"),
        "torchvision": Part(
            "ssvit.data.sources.datasets.torchvision_set", "ssvit.data.sources.datasets_options.TorchvisionSet",
            listed=False,
        ),
        "vtab": Part("ssvit.data.sources.datasets.vtab", "ssvit.data.sources.datasets_options.Vtab"),
    },
    "augment": {
        "inception_crop": Part("ssvit.data.augment.crop.InceptionCrop"),
        "multi_crop": Part("ssvit.data.augment.views.MultiCrop"),
        "resize_crop": Part("ssvit.data.augment.crop.ResizeCrop"),
        "shift_crop": Part("ssvit.data.augment.crop.ShiftCrop"),
    },
    "view": {"center_crop": Part("ssvit.data.augment.crop.CenterCrop", "ssvit.data.augment.options.CenterCrop")},
    "evaluator": {
        "autoencoding": Part("ssvit.evaluation.evaluators.autoencoding.Autoencoding", listed=False),
        "classification": Part("ssvit.evaluation.evaluators.classification.Classification", listed=False),
        "collapse": Part("ssvit.evaluation.evaluators.collapse.Collapse", listed=False),
        "contrast": Part("ssvit.evaluation.evaluators.contrast.Contrast", listed=False),
        "label_free": Part("ssvit.evaluation.evaluators.label_free.LabelFree"),
        "latent_prediction": Part("ssvit.evaluation.evaluators.latent.LatentPrediction", listed=False),
        "patch_collapse": Part("ssvit.evaluation.evaluators.collapse.PatchCollapse", listed=False),
        "prediction": Part("ssvit.evaluation.evaluators.prediction.Prediction", listed=False),
        "shape_bias": Part("ssvit.evaluation.evaluators.shape_bias.ShapeBias"),
    },
    "probe": {
        "attentive": Part("ssvit.evaluation.probes.attentive.Attentive"),
        "knn": Part("ssvit.evaluation.probes.knn.Knn"),
        "logistic": Part("ssvit.evaluation.probes.logistic.Logistic"),
        "retrieval": Part("ssvit.evaluation.probes.retrieval.Retrieval"),
        "ridge": Part("ssvit.evaluation.probes.ridge.Ridge"),
        "segmentation": Part("ssvit.evaluation.probes.segmentation.Segmentation"),
        "sgd": Part("ssvit.evaluation.probes.sgd.Sgd"),
    },
    "index": {
        "flat": Part("ssvit.evaluation.neighbours.Flat"),
        "hnsw": Part("ssvit.evaluation.neighbours.HNSW"),
        "ivf": Part("ssvit.evaluation.neighbours.IVF"),
    },
    "logger": {
        "tensorboard": Part("ssvit.training.loggers.tensorboard.TensorBoard"),
        "wandb": Part("ssvit.training.loggers.wandb.Wandb"),
    },
}  # fmt: skip


def add(group: str, name: str, code: str, options: str = "") -> None:
    """Add a part of another package to the table.

    Args:
        group: The group, such as objective.
        name: Name of the choice.
        code: Dotted name of the class or function that is called with the options, such as mine.objective.Mine.
        options: Dotted name of the class of the options, which must not import torch; "": the class of the same name in
            the module of the code with the suffix _options.
    """
    PARTS.setdefault(group, {})[name] = Part(code, options)


def added() -> list[str]:
    """Return the parts that other packages have added, as group/name."""
    return [f"{group}/{name}" for group, parts in PARTS.items() for name, part in parts.items() if not part.is_built_in]


def choice_names(group: str) -> list[str]:
    """Return the choices of a group."""
    return [name for name, part in PARTS.get(group, {}).items() if part.listed]


def _options_class(group: str, part: Part) -> str:
    """Return the dotted name of the class of the options of a part."""
    module, _, name = part.code.rpartition(".")
    shared = GROUPS[group].options if group in GROUPS and part.is_built_in else ""
    return part.options or f"{shared or f'{module}_options'}.{name}"


def options_of(part: object) -> Any:
    """Return the class of the options of a part group/name, such as probe/ridge; None if there is no such part."""
    group, _, name = str(part).partition("/")
    row = PARTS.get(group, {}).get(name)
    return None if row is None else pkgutil.resolve_name(_options_class(group, row))


def part_of(options: type) -> str | None:
    """Return the part, group/name, that has a class of options; None if there is no such part."""
    target = f"{options.__module__}.{options.__qualname__}"
    rows = ((group, name, part) for group, parts in PARTS.items() for name, part in parts.items())
    return next((f"{group}/{name}" for group, name, part in rows if _options_class(group, part) == target), None)


def code_of(options: type) -> Any:
    """Import and return the class or function that is called with options of a class."""
    group, _, name = str(part_of(options)).partition("/")
    return pkgutil.resolve_name(PARTS[group][name].code)


def load(package: str) -> None:
    """Import a package, which adds its parts; raise ImportError if it does not exist."""
    importlib.import_module(package)
