"""Choose the schedule of fine-tuning from the number of labelled images and the origin of the weights (preset=auto).

The rules follow trials on held-out training images (docs/finetuning.md). No torch.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from ssvit.checkpoints.checkpoint import SCRATCH
from ssvit.data.augment.options import InceptionCrop
from ssvit.data.sources.base_options import DataSet, ImageFiles
from ssvit.objectives.classify_options import Classify
from ssvit.objectives.segment_options import Segment
from ssvit.training import budget
from ssvit.training.options import Finetune
from ssvit.training.preset import AUTO
from ssvit.values import text_of

_MOST = 100_000  # labelled images, beyond which nothing changes
_LARGE = 10_000  # labelled images, from which batches are larger
_MANY = 1_000  # labelled images, from which weights of a run are trained as random weights are
LIMITS = {"evaluations": 3, "warmup": 10}  # of `budget.schedule`
_COMPLETE = {"experiment", "recipe"}  # files of options with a schedule of their own
_SCALE = [0.8, 1.0]  # of the area of an image


@dataclass(frozen=True)
class Rule:
    """How weights of one origin are fine-tuned.

    Attributes:
        optimizer: As in `Recipe`.
        lr: Peak learning rate.
        layer_decay: Factor of the learning rate from each layer to the layer below it.
        seen: Images seen in training with n labelled images, divided by the square root of n.
        least: Minimum number of images seen.
    """

    optimizer: str
    lr: float
    layer_decay: float
    seen: float
    least: int

    @property
    def rates(self) -> dict[str, object]:
        """Return the options of the recipe that do not depend on the number of labelled images."""
        return {"optimizer": self.optimizer, "lr": self.lr, "layer_decay": self.layer_decay}

    @staticmethod
    def batch_size(images: int) -> int:
        """Return the batch size for a number of labelled images."""
        return 32 if images < _LARGE else 128

    def options(self, images: int, *, batch_size: int, steps: int | None = None) -> dict[str, object]:
        """Return the options of the recipe for a number of labelled images.

        Args:
            images: Number of labelled images.
            batch_size: Batch size.
            steps: Number of steps; None for that of the rule.
        """
        seen = max(self.least, self.seen * math.sqrt(min(images, _MOST)))
        return {
            **schedule(steps or 10 * math.ceil(seen / batch_size / 10)),
            "batch_size": batch_size,
            **self.rates,
        }


# The origins of weights: a run of ssvit, another project, random numbers.
OWN = Rule(optimizer="adamw", lr=2e-3, layer_decay=0.7, seen=900, least=6400)
FOREIGN = Rule(optimizer="adamw", lr=2e-4, layer_decay=0.85, seen=450, least=3200)
RANDOM = Rule(optimizer="muon", lr=2e-3, layer_decay=1.0, seen=900, least=6400)
_HEAD = 5e-3  # learning rate of a head on frozen features


def schedule(steps: int) -> dict[str, int]:
    """Return the options of a recipe that depend on its number of steps."""
    return {name: value for name, value in budget.schedule(steps, **LIMITS).items() if name != "log_every"}


def chosen_schedule(options: Finetune, typed: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the options that the schedule for the images and the weights changes, and a description of them.

    Typed options are kept, and so is the schedule of a file of options; a default batch size is at most the number of
    training images.

    Args:
        options: Options of the fine-tuning.
        typed: Names of the typed options.

    Returns:
        Values of options by their dotted names, and lines to print.
    """
    is_automatic = options.preset == AUTO and not _COMPLETE.intersection(typed)
    if not is_automatic and "recipe.batch_size" in typed:
        return {}, []
    images = _training_images(options)
    share = (options.launch.processes or 1) * options.recipe.accumulate
    if not is_automatic:
        fitting = images // share * share
        if not 0 < fitting < options.recipe.batch_size:
            return {}, []
        return {"recipe.batch_size": fitting}, [f"recipe.batch_size={fitting}: there are {images:,} training images"]
    checkpoint = options.encoder.checkpoint()
    rule = RANDOM if checkpoint is None or options.checkpoint == SCRATCH else FOREIGN if checkpoint.foreign else OWN
    weights = {OWN: "weights of a run", FOREIGN: "weights of another project", RANDOM: "random weights"}[rule]
    objective = options.objective
    if rule is OWN and images >= _MANY and isinstance(objective, Classify) and objective.trained == "all":
        rule = RANDOM
    if isinstance(objective, Classify | Segment) and objective.trained == "head" and objective.lora is None:
        rule, weights = replace(rule, optimizer="adamw", lr=_HEAD), f"{weights}, a head alone"
    own = {name: value for name, value in options.recipe if f"recipe.{name}" in typed}
    batch_size = own.get("batch_size", max(share, min(rule.batch_size(images), images) // share * share))
    recipe = rule.options(images, batch_size=batch_size, steps=own.get("steps"))
    chosen = {f"recipe.{name}": value for name, value in recipe.items() if name not in own}
    if options.budget is not None:  # which determines them
        chosen = {name: value for name, value in chosen.items() if name.removeprefix("recipe.") not in schedule(1)}
    if isinstance(options.data.augment, InceptionCrop) and "data.augment.scale" not in typed:
        chosen["data.augment.scale"] = _SCALE
    if options.sweep:
        chosen.pop("recipe.lr", None)
    described = " ".join(f"{name}={text_of(value)}" for name, value in chosen.items())
    if options.compare:
        rates = {name: value for name, value in RANDOM.rates.items() if name not in own}
        chosen["scratch_recipe"] = {**rates, **options.scratch_recipe}
    return chosen, [f"preset=auto: {images:,} labelled images, {weights}:", f"  {described}"]


def _training_images(options: Finetune) -> int:
    """Return the number of training images of a run, which is read from the images if it is small or unknown."""
    source, images = options.data, options.subset.images
    development = options.table4.development if options.sweep else options.development
    count = source.count(at_most=_MOST) if isinstance(source, DataSet) else None
    if count is None and isinstance(source, DataSet) and (sample := source.sample(1)) is not None:
        count = sample.images
    if count is not None and tuple(options.subset.part) == (0, 1):
        count = min(count, images or count)
        # Test images may be held out of the training images of files.
        if count >= _LARGE or (development is None and not isinstance(source, ImageFiles)):
            return count

    from ssvit.data.sources.base import Data, subset

    data: Data = options.build_part("data")
    data = replace(data, train=subset(data.train, **dict(options.subset)))
    return len(data.for_development(development).train)
