"""A configuration checked as a whole before torch is loaded, so that a mistake is told within a second.

Wherever a `_target_` has a dataclass of options (see `ssvit.options.find`), it is made of them. A part without one
checks itself when it is built, a few seconds later.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ssvit.checkpoints.options import LoadEncoder
from ssvit.data import options as data_options
from ssvit.evaluation import probing_rules
from ssvit.models.options import ViT
from ssvit.options import OptionError, UserError, find, make, number, whole, within
from ssvit.training.recipe import Recipe

RULES: Mapping[str, Callable[..., None]] = {
    "ssvit.evaluation.knn_probe.KnnProbe": probing_rules.knn,
    "ssvit.evaluation.few_shot_probe.FewShotProbe": probing_rules.few_shot,
}


def parts(config: Any, name: str = "") -> dict[str, Any]:
    """Check the options of every part of nested dictionaries and lists; errors name the full option.

    A part within a part is checked by itself, and is an option only where the dataclass has it. Returns the
    dataclasses by the names of the parts, as "data.source".
    """
    made: dict[str, Any] = {}
    if isinstance(config, Mapping):
        for key, value in config.items():
            made |= parts(value, f"{name}.{key}" if name else str(key))
        if known := find(config.get("_target_", "")):
            named = {field.name for field in fields(known)}
            options = {
                key: value
                for key, value in config.items()
                if key in named or not (key.startswith("_") or (isinstance(value, Mapping) and "_target_" in value))
            }
            with within(name):
                made[name] = make(known, options)
        elif rule := RULES.get(config.get("_target_", "")):
            options = {key: value for key, value in config.items() if not key.startswith("_")}
            try:
                inspect.signature(rule).bind(**options)
            except TypeError as error:
                raise UserError(f"{name}: {error}") from None
            with within(name):
                rule(**options)
    elif isinstance(config, list):
        for place, value in enumerate(config):
            made |= parts(value, f"{name}[{place}]")
    return made


def encoder(made: Mapping[str, Any]) -> ViT | None:
    """The options of the encoder among the parts that were made, a checkpoint's too; None if it is a user's own."""
    own = made.get("encoder")
    with within("encoder"):
        own = own.encoder() if isinstance(own, LoadEncoder) else own
    return own if isinstance(own, ViT) else None


def check(config: Mapping[str, Any]) -> Recipe:
    """OptionError (or UserError) unless `config`, a whole configuration as plain data, can be; its recipe if it can."""
    whole("workers", config["workers"], at_least=0)
    number("loader_timeout", config["loader_timeout"], 0)
    number("fabric.timeout", config["fabric"]["timeout"], 1)
    made = parts(config)
    encoder(made)
    with within("subset"):
        subset = make(data_options.Subset, config["subset"])
    data_options.development(config["development"])
    if "probing" in config:  # pre-training has them
        with within("probing"):
            probing_rules.probing(**config["probing"])
    with within("recipe"):
        recipe = make(Recipe, config["recipe"])
    source, most = made.get("data.source"), recipe.batch_size
    if hasattr(source, "count"):
        most = source.count(at_most=most)
    if subset.images is not None:
        most = min(most, subset.images)
    if recipe.batch_size > most:
        right = f"must be no more than the {most} images to train on"
        raise OptionError("recipe.batch_size", recipe.batch_size, right)
    return recipe
