"""Define the options of the measurement of shape bias."""

from ssvit.config.choices import choice
from ssvit.config.declaration import Run
from ssvit.data.sources.synthetic_options import Synthetic
from ssvit.evaluation.panels.held_out_options import HeldOut
from ssvit.objectives.classify_options import Classify
from ssvit.options import RootOptionError


@choice("evaluator", "shape_bias")
class ShapeBias(HeldOut):
    """Measure whether a classifier decides by shape or by texture (Geirhos et al. 2019)."""

    def check(self, run: Run) -> None:
        """Check that the run trains a classifier of the embedded images with both cues."""
        if run.objective is not None and not isinstance(run.objective, Classify):
            expected = "must be a classifier for evaluator=[shape_bias]: supervised, or classify in fine-tuning"
            raise RootOptionError("objective", type(run.objective).__name__, expected)
        if run.source is not None and not (isinstance(run.source, Synthetic) and run.source.textures):
            expected = "must be true, with data=shapes, for evaluator=[shape_bias]: classes need textures"
            raise RootOptionError("data.textures", getattr(run.source, "textures", None), expected)
