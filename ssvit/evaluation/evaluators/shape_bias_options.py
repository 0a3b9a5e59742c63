"""Define the options of the measurement of shape bias."""

from ssvit.config.declaration import Run
from ssvit.errors import RootOptionError
from ssvit.evaluation.evaluators.held_out_options import HeldOut
from ssvit.objectives.classify_options import Classify


class ShapeBias(HeldOut):
    """Measure whether a classifier decides by shape or by texture (Geirhos et al. 2019)."""

    def check(self, run: Run) -> None:
        """Check that the run trains a classifier of the rendered shapes with both cues."""
        if not isinstance(run.objective, Classify | None):
            expected = "must be supervised, or classify in fine-tuning, for evaluator=[shape_bias]"
            raise RootOptionError("objective", type(run.objective).__name__, expected)
        if not getattr(run.data, "textures", False):
            raise RootOptionError("data.textures", False, "must be true, with data=shapes, for evaluator=[shape_bias]")
