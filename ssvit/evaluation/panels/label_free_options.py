"""The options of the measures of features without labels."""

from typing import Annotated, Literal

from ssvit.config.choices import choice
from ssvit.config.declaration import AtLeastTwo, Count, Expect, ShareLimits, Whole
from ssvit.evaluation.features_options import AUTO
from ssvit.evaluation.panels.held_out_options import HeldOut
from ssvit.evaluation.panels.online_options import Every


@choice("evaluator", "label_free")
class LabelFree(HeldOut):
    """The measures of features without labels."""

    images: Count = 512
    """The most held-out images; ranks are at most their number, so there should be more than the encoder's width."""
    every: Every = AUTO
    """Steps from one evaluation to the next; auto: as often as takes less than 5 % of the training time, at steps of
    the probes (see `evaluation.base.interval`)."""
    views: Annotated[Literal[0] | AtLeastTwo, Expect("0, or a whole number, 2 or more")] = 3
    """Crops of each image for LiDAR, 2 or more; 0: without LiDAR."""
    scale: ShareLimits = (0.4, 1.0)
    """Least and greatest part of the image's area that a crop has."""
    seed: Whole = 0
    """Seed of the crops."""
