"""Define the options of the label-free measures of features."""

from typing import Annotated, Literal

from ssvit.config.choices import choice
from ssvit.config.declaration import AtLeastTwo, Count, Expect, ShareLimits, Whole
from ssvit.evaluation.features_options import AUTO
from ssvit.evaluation.panels.held_out_options import HeldOut
from ssvit.evaluation.panels.online_options import Every


@choice("evaluator", "label_free")
class LabelFree(HeldOut):
    """Measure features without labels."""

    images: Count = 512
    """Maximum number of held-out images. It bounds the ranks and should therefore exceed the width of the encoder."""
    every: Every = AUTO
    """Steps between two evaluations; auto: as often as takes less than 5 % of the training time, at steps of the probes
    (see `evaluation.panels.base.interval`)."""
    views: Annotated[Literal[0] | AtLeastTwo, Expect("0, or a whole number, 2 or more")] = 3
    """Crops of each image for LiDAR, 2 or more; 0: without LiDAR."""
    scale: ShareLimits = (0.4, 1.0)
    """Minimum and maximum fraction of the image area covered by a crop."""
    seed: Whole = 0
    """Seed of the crops."""
