"""A configuration is checked as a whole before torch is loaded, so that a mistake is reported within a second.

The options of a `_target_` are checked by their class (see `ssvit.config.declaration.find`). A part without one checks
itself when it is built, a few seconds later.
"""

import os
import re
from collections.abc import Mapping
from typing import Any

from ssvit.checkpoints.loading_options import LoadEncoder
from ssvit.config.declaration import find, make
from ssvit.data.augment.crop_options import Crop, RandomCrop
from ssvit.data.augment.views_options import MultiCrop
from ssvit.data.decode_options import PixelFormat, bands
from ssvit.data.loader_options import DECODINGS, FULL, ORDERS, PERMUTATION, check_shares
from ssvit.data.source_options import NO_LABELS, NO_VALIDATION, VALIDATION, DataSet, Subset, development
from ssvit.evaluation.online_options import Probing
from ssvit.models.timm_options import Timm
from ssvit.models.vit_options import ViT
from ssvit.objectives.classify_options import MULTI_LABEL, Classify
from ssvit.objectives.contrastive_tuning_options import ContrastiveTuning
from ssvit.options import OptionError, UserError, number, one_of, pair, whole, within
from ssvit.training.recipe import Recipe

# What may build an encoder: a checkpoint holds its options and not its class.
ENCODERS = ("ssvit.models.vit.ViT", "ssvit.models.timm.Timm", "ssvit.checkpoints.loading.load_encoder")

# What Lightning Fabric takes as devices, written as text.
_DEVICES = re.compile(r"auto|-1|[1-9]\d*|\[\d+(, \d+)*\]|\d+(, ?\d+)+")


def parts(config: object, name: str = "") -> dict[str, Any]:
    """Check the options of every part of nested dictionaries and lists; returns them by "data.source" etc.

    A part within a part is checked by itself, and is an option only where the class has it.
    """
    made: dict[str, object] = {}
    if isinstance(config, Mapping):
        # Evaluators last: they refer to options of other parts, under whose names these were typed.
        for key, value in sorted(config.items(), key=lambda item: item[0] == "evaluators"):
            made |= parts(value, f"{name}.{key}" if name else str(key))
        if known := find(config.get("_target_", "")):
            named = known.model_fields
            options = {
                key: value
                for key, value in config.items()
                if key in named or not (key.startswith("_") or (isinstance(value, Mapping) and "_target_" in value))
            }
            with within(name):
                made[name] = make(known, options)
    elif isinstance(config, list):
        for place, value in enumerate(config):
            made |= parts(value, f"{name}[{place}]")
    return made


def encoder(made: Mapping[str, object]) -> ViT | Timm | None:
    """The options of the encoder among the parts, a checkpoint's too; None if there is none.

    OptionError unless the other parts fit it.
    """
    own = made.get("encoder")
    if isinstance(own, LoadEncoder):
        with within("encoder"):
            own = own.encoder()
    if not isinstance(own, ViT | Timm):
        return None
    if isinstance(own, Timm) and not isinstance(made.get("objective"), Classify | None):
        raise OptionError("encoder.model", own.model, "can learn from labels alone: objective=supervised")
    for name, part in made.items():
        if hasattr(part, "fits"):
            with within(name):
                part.fits(own)
    return own


def images_of(made: Mapping[str, object]) -> DataSet:
    """What is known of the images; nothing of those of a user's own."""
    source = made.get("data.source")
    return source if isinstance(source, DataSet) else DataSet()


def start(made: Mapping[str, object]) -> None:
    """OptionError if an objective that goes on from trained weights would have random ones."""
    if getattr(made.get("objective"), "goes_on", False) and isinstance(made.get("encoder"), ViT | Timm):
        right = "the objective goes on from trained weights: give the path of a run, or of another project's weights"
        raise OptionError("checkpoint", None, right)


def views(made: Mapping[str, object]) -> None:
    """OptionError unless the augmentation gives the views that the objective takes, by default one, "image".

    And if it gives local ones to an objective that says it takes none: a user's own need not say so.
    """
    objective, augmentation = made.get("objective"), made.get("data.augment")
    if objective is None or augmentation is None:  # a user's own, checked when there are images
        return
    taken, given = (getattr(part, "views", ("image",)) for part in (objective, augmentation))
    if not set(taken) <= set(given):
        right = (
            f"gives {' and '.join(given)} views, and the objective takes {' and '.join(taken)} ones: add "
            "augment@data.augment=…, of which multi_crop and multi_crop_small give global and local ones"
        )
        raise OptionError("data.augment", type(augmentation).__name__, right)
    if isinstance(augmentation, MultiCrop) and augmentation.local_views and not getattr(objective, "takes_local", True):
        right = "must be 0: the objective takes global views alone, as of augment@data.augment=two_crops"
        raise OptionError("data.augment.local_views", augmentation.local_views, right)


def size(made: Mapping[str, object], vit: ViT | Timm | None) -> None:
    """OptionError if the objective samples patches and images have another size than the encoder's."""
    augmentation = made.get("data.augment")
    if not getattr(made.get("objective"), "samples_patches", False) or not isinstance(augmentation, Crop):
        return
    if isinstance(vit, ViT) and augmentation.size != (own := pair("image_size", vit.image_size)):
        right = f"must be encoder.image_size={own}: the objective samples patches of images of that size"
        raise OptionError("data.augment.size", augmentation.size, right)


def processes(fabric: Mapping[str, Any]) -> int | None:
    """How many will train, as torchrun, SLURM or the options of the group fabric tell; None if the machine decides."""
    for name, mark in (("WORLD_SIZE", "RANK"), ("SLURM_NTASKS", "SLURM_PROCID")):
        if mark in os.environ and name in os.environ:
            return int(os.environ[name])
    devices = fabric["devices"]
    return devices * fabric["num_nodes"] if isinstance(devices, int) and devices > 0 else None


def check_fabric(options: Mapping[str, Any]) -> None:
    """OptionError unless the timeout and the devices in the group fabric are permitted."""
    number("fabric.timeout", options["timeout"], 1)
    if not _DEVICES.fullmatch(str(options["devices"])):
        right = "must be auto, a whole number, 1 or more, a list of GPU indices, or -1 for all GPUs"
        raise OptionError("fabric.devices", options["devices"], right)


def check(config: Mapping[str, Any]) -> Recipe:
    """The recipe of a whole configuration, as plain data; OptionError or UserError if anything in it is wrong."""
    whole("workers", config["workers"], at_least=0)
    number("loader_timeout", config["loader_timeout"], 0)
    check_fabric(config["fabric"])
    if (builder := config["encoder"]["_target_"]) not in ENCODERS:
        right = "must be ssvit's ViT or a model of timm: the commands that load a checkpoint cannot build another class"
        raise OptionError("encoder", builder, right)
    made = parts(config)
    vit = encoder(made)
    start(made)
    views(made)
    size(made, vit)
    with within("subset"):
        subset = make(Subset, config["subset"])
    development(config["development"])
    one_of("data.decoding", config["data"].get("decoding", FULL), DECODINGS)
    one_of("data.order", config["data"].get("order", PERMUTATION), ORDERS)
    if "probing" in config:  # in pre-training
        with within("probing"):
            make(Probing, config["probing"])
    with within("recipe"):
        recipe = make(Recipe, config["recipe"])
        if (count := processes(config["fabric"])) is not None:
            check_shares(batch_size=recipe.batch_size, accumulate=recipe.accumulate, processes=count)
        if recipe.ema and getattr(made.get("objective"), "is_averaged", False):
            right = "must be 0: the teacher, which is probed, is an average already: objective.teacher_momentum"
            raise OptionError("ema", recipe.ema, right)
        if isinstance(vit, Timm) and recipe.backend == "kernels":
            raise OptionError("backend", recipe.backend, f"is for a ViT, and the encoder is timm's {vit.model}")
    objective = made.get("objective")
    if isinstance(objective, ContrastiveTuning) and objective.queue < recipe.batch_size:
        right = f"must hold the images of a step, recipe.batch_size={recipe.batch_size}"
        raise OptionError("objective.queue", objective.queue, right)
    if isinstance(vit, Timm) and config["fabric"]["strategy"] == "fsdp":
        raise OptionError("fabric.strategy", "fsdp", f"shares out a ViT, and the encoder is timm's {vit.model}")
    source = images_of(made)
    images = source.count(at_most=max(recipe.batch_size, subset.images or 0))
    if subset.images is not None:
        if images is not None and subset.images > images:
            raise OptionError("subset.images", subset.images, f"there are {images} images to choose from")
        images = subset.images
    if images is not None and recipe.batch_size > images:
        right = f"must be no more than the {images} images to train on"
        raise OptionError("recipe.batch_size", recipe.batch_size, right)
    if vit is not None and source.image_channels not in (None, vit.channels):
        if isinstance(source, PixelFormat):
            raise OptionError("data.channels", source.image_channels, f"must be {vit.channels}, as of the encoder")
        raise OptionError("encoder.channels", vit.channels, f"must be {source.image_channels}, as of the images")
    if isinstance(source, PixelFormat):
        bands("data.shown", config["data"]["shown"], source.channels)
    augmentation = made.get("data.augment")
    if isinstance(augmentation, RandomCrop) and isinstance(source, PixelFormat) and source.range is not None:
        with within("data.augment"):
            augmentation.check_floats()
    if isinstance(objective, Classify):
        if source.labelled is False:
            raise UserError(NO_LABELS)
        with within("objective"):
            if source.multi_label:
                objective.check_multi_label()
            elif source.multi_label is False and objective.loss == MULTI_LABEL:
                raise OptionError("loss", MULTI_LABEL, "must be softmax or sigmoid: each of these images has one class")
    if source.validated is False and config["development"] == VALIDATION:
        raise OptionError("development", VALIDATION, NO_VALIDATION)
    return recipe
