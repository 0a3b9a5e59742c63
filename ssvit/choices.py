"""List the parts of ssvit by group and name: the choices of objective=…, probes=[…] and all other groups. No torch.

A part is one row: its group, its name and its code. The class of its options has the name of the part and is in the
module of its group's options, or else in the module of the code with the suffix _options, so that options are checked
without loading torch; a row states where it deviates. Another package adds a row by `add`. The other choices are
variants: parts with other values of some options, which `ssvit.variants` lists.
"""

import pkgutil
from dataclasses import dataclass
from typing import Any

from ssvit.errors import UserError
from ssvit.variants import VARIANTS, Variant


@dataclass(frozen=True)
class Row:
    """A part in the table.

    Attributes:
        code: Dotted name of the class or function that is called with the options.
        options: Name of the class of the options; "": that of the code. Without dots, the class is in the module of the
            group's options, or in the module of the code with the suffix _options.
        listed: Whether the name is a choice. Other parts are chosen by variants, by files or by objectives.
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
    "data": Group(options="ssvit.data.sources.datasets_options"),
    "distillation": Group("Distillation from a teacher, in addition to the labels."),
    "encoder": Group(),
    "evaluator": Group(several=True, options="ssvit.evaluation.evaluators.options"),
    "experiment": Group("A complete run in one file."),
    "index": Group(options="ssvit.evaluation.options"),
    "logger": Group(several=True, options="ssvit.training.loggers.options"),
    "objective": Group(),
    "probe": Group(several=True, options="ssvit.evaluation.probes.options"),
    "target": Group("What is predicted of a patch."),
}

PARTS: dict[str, dict[str, Row]] = {
    "objective": {
        "classify": Row("ssvit.objectives.classify.Classify"),
        "contrastive_tuning": Row("ssvit.objectives.contrastive.ContrastiveTuning"),
        "diet": Row("ssvit.objectives.diet.Diet"),
        "dino": Row("ssvit.objectives.dino.Dino"),
        "distill": Row("ssvit.objectives.distill.Distill"),
        "ibot": Row("ssvit.objectives.dino.IBot"),
        "latent": Row("ssvit.objectives.latent.Latent"),
        "mae": Row("ssvit.objectives.mae.MAE"),
        "masked_patch": Row("ssvit.objectives.masked_patch.MaskedPatch"),
        "segmentation": Row("ssvit.objectives.segment.Segment"),
        "simclr": Row("ssvit.objectives.contrastive.SimCLR"),
    },
    "target": {
        "codebook": Row("ssvit.objectives.codebook.Codebook"),
        "hog": Row("ssvit.objectives.targets.Hog"),
        "mean_color": Row("ssvit.objectives.targets.MeanColor"),
        "pixels": Row("ssvit.objectives.targets.Pixels"),
    },
    "continuation": {"full": Row("ssvit.objectives.continuation.Continuation")},
    "distillation": {"teacher": Row("ssvit.objectives.classify.Distillation", listed=False)},
    "encoder": {
        "vit": Row("ssvit.models.vit.ViT", listed=False),
        "timm": Row("ssvit.models.timm.Timm", listed=False),
        "checkpoint": Row("ssvit.loading.encoder.load_encoder", "ssvit.loading.options.LoadEncoder", listed=False),
    },
    "teacher": {
        "classifier": Row("ssvit.loading.encoder.load_classifier", "ssvit.loading.options.LoadClassifier"),
        "encoder": Row("ssvit.loading.encoder.load_teacher", "ssvit.loading.options.LoadTeacher"),
        "layers": Row("ssvit.loading.encoder.load_layers", "ssvit.loading.options.LoadLayers"),
    },
    "data": {
        "csv": Row("ssvit.data.sources.datasets.csv", "Csv", listed=False),
        "folder": Row("ssvit.data.sources.datasets.folder", "Folder", listed=False),
        "huggingface": Row("ssvit.data.sources.huggingface.hugging_face", "HuggingFace", listed=False),
        "shards": Row("ssvit.data.sources.datasets.shards", "Shards", listed=False),
        "shapes": Row("ssvit.data.sources.shapes.shapes", "ssvit.data.sources.shapes_options.Shapes", listed=False),
        "torchvision": Row("ssvit.data.sources.datasets.torchvision_set", "TorchvisionSet", listed=False),
        "voc": Row("ssvit.data.sources.datasets.voc", "Voc", listed=False),
        "vtab": Row("ssvit.data.sources.datasets.vtab", "Vtab", listed=False),
    },
    "augment": {
        "inception_crop": Row("ssvit.data.augment.crop.InceptionCrop"),
        "multi_crop": Row("ssvit.data.augment.views.MultiCrop"),
        "resize_crop": Row("ssvit.data.augment.crop.ResizeCrop"),
        "shift_crop": Row("ssvit.data.augment.crop.ShiftCrop"),
    },
    "view": {"center_crop": Row("ssvit.data.augment.crop.CenterCrop", "ssvit.data.augment.options.CenterCrop")},
    "evaluator": {
        "autoencoding": Row("ssvit.evaluation.evaluators.autoencoding.Autoencoding", listed=False),
        "classification": Row("ssvit.evaluation.evaluators.classification.Classification", listed=False),
        "collapse": Row("ssvit.evaluation.evaluators.collapse.Collapse", listed=False),
        "contrast": Row("ssvit.evaluation.evaluators.contrast.Contrast", listed=False),
        "label_free": Row("ssvit.evaluation.evaluators.label_free.LabelFree"),
        "latent_prediction": Row("ssvit.evaluation.evaluators.latent.LatentPrediction", listed=False),
        "patch_collapse": Row("ssvit.evaluation.evaluators.collapse.PatchCollapse", listed=False),
        "prediction": Row("ssvit.evaluation.evaluators.prediction.Prediction", listed=False),
        "segmentation": Row("ssvit.evaluation.evaluators.segmentation.Segmentation", listed=False),
        "shape_bias": Row("ssvit.evaluation.evaluators.shape_bias.ShapeBias"),
    },
    "probe": {
        "attentive": Row("ssvit.evaluation.probes.attentive.Attentive"),
        "knn": Row("ssvit.evaluation.probes.knn.Knn"),
        "logistic": Row("ssvit.evaluation.probes.logistic.Logistic"),
        "retrieval": Row("ssvit.evaluation.probes.retrieval.Retrieval"),
        "ridge": Row("ssvit.evaluation.probes.ridge.Ridge"),
        "segmentation": Row("ssvit.evaluation.probes.segmentation.Segmentation"),
        "sgd": Row("ssvit.evaluation.probes.sgd.Sgd"),
    },
    "index": {
        "flat": Row("ssvit.evaluation.neighbours.flat", "Flat"),
        "hnsw": Row("ssvit.evaluation.neighbours.hnsw", "HNSW"),
        "ivf": Row("ssvit.evaluation.neighbours.ivf", "IVF"),
    },
    "logger": {
        "tensorboard": Row("ssvit.training.loggers.tensorboard.TensorBoard"),
        "wandb": Row("ssvit.training.loggers.wandb.Wandb"),
    },
}  # fmt: skip


PRETRAINED = "pretrained"
"""Choice of the groups encoder, data and augment in the files of commands: that of the checkpoint's run."""


def add(group: str, name: str, code: str, options: str = "") -> None:
    """Add a part of another package to the table.

    Args:
        group: The group, such as objective.
        name: Name of the choice.
        code: Dotted name of the class or function that is called with the options, such as mine.objective.Mine.
        options: Dotted name of the class of the options, which must not import torch; "": the class of the same name in
            the module of the code with the suffix _options.

    Raises:
        UserError: ssvit has a choice of this name.
    """
    if name in VARIANTS.get(group, {}):
        raise UserError(f"{group}={name}: is a choice of ssvit; the part of --plugin needs another name")
    PARTS.setdefault(group, {})[name] = Row(code, options)


def added() -> list[str]:
    """Return the parts that other packages have added, as group/name."""
    return [f"{group}/{name}" for group, parts in PARTS.items() for name, part in parts.items() if not part.is_built_in]


def choice_names(group: str) -> list[str]:
    """Return the choices of a group: its listed parts and its variants."""
    return [*(name for name, part in PARTS.get(group, {}).items() if part.listed), *VARIANTS.get(group, {})]


def variant(group: str, name: str) -> Variant | None:
    """Return a choice of a group; a part is a variant without options. None if there is no such choice."""
    return VARIANTS.get(group, {}).get(name) or (Variant(name) if name in choice_names(group) else None)


def _options_class(group: str, part: Row) -> str:
    """Return the dotted name of the class of the options of a part."""
    module, _, name = part.code.rpartition(".")
    shared = GROUPS[group].options if group in GROUPS and part.is_built_in else ""
    return part.options if "." in part.options else f"{shared or f'{module}_options'}.{part.options or name}"


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
