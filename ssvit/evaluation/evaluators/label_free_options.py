"""Define the options of the label-free measures of features."""

from ssvit.config.declaration import Count
from ssvit.evaluation.evaluators.held_out_options import HeldOut
from ssvit.evaluation.evaluators.online_options import Every
from ssvit.evaluation.features_options import AUTO


class LabelFree(HeldOut):
    """Measure features without labels."""

    images: Count = 512
    """Maximum number of held-out images. It bounds the ranks and should therefore exceed the width of the encoder."""
    every: Every = AUTO
    """Steps between two evaluations; auto: the smallest interval for which all evaluations take less than 5 % of the
    training time, at steps of the probes (`evaluation.evaluators.base.interval`)."""
