"""A training command is checked as a whole before torch is loaded, so that a mistake is reported within a second.

The options of a `_target_` are checked by their class (see `ssvit.config.declaration.find`), and against each other by
their methods `check`. A part without a class of options checks itself when it is built, a few seconds later.
"""

from collections.abc import Mapping
from typing import Any

from ssvit.config.declaration import Run, group_of, select
from ssvit.options import OptionError, within
from ssvit.training.options import Training
from ssvit.training.recipe import Recipe

# What may build an encoder: a checkpoint holds its options and not its class.
ENCODERS = ("ssvit.models.vit.ViT", "ssvit.models.timm.Timm", "ssvit.checkpoints.loading.load_encoder")


def check(config: Mapping[str, Any]) -> Recipe:
    """The recipe of a whole configuration, as plain data; OptionError or UserError if anything in it is wrong."""
    options = select(Training, config)
    if (builder := config["encoder"]["_target_"]) not in ENCODERS:
        right = "must be ssvit's ViT or a model of timm: the commands that load a checkpoint cannot build another class"
        raise OptionError("encoder", builder, right)
    run = Run.of(config, options)
    run.check()
    if images := group_of(config["data"]):
        with within("data"):
            select(images, config["data"]).check(run)
    return options.recipe
