"""Define the base class of evaluators that use the same held-out images at each evaluation.

Shapes use b images of a batch, c channels, h, w pixels.
"""

from functools import cached_property

from torch import Tensor

from ssvit.data.batch import EvalTransform
from ssvit.data.loader import evaluation_batches
from ssvit.data.sources.base import Source
from ssvit.evaluation.panels import held_out_options
from ssvit.evaluation.panels.base import Evaluator
from ssvit.options import UserError


class HeldOut(Evaluator):
    """Evaluate on some held-out images of a source."""

    fewest = 1  # minimum number of images

    def __init__(self, options: held_out_options.HeldOut, *, source: Source, transform: EvalTransform) -> None:
        self.source, self.transform, self.options = source, transform, options
        self.images = min(options.images, len(source))

    @cached_property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return batches of images (b, c, h, w) uint8 and slots (b,), which are read once.

        Raises:
            UserError: If fewer than `fewest` images are readable.
        """
        read = evaluation_batches(
            self.source, self.transform, batch_size=self.options.batch_size, limit=self.options.images
        )
        batches = [(batch.images, batch.slots) for batch in read]
        if sum(len(slots) for _, slots in batches) < self.fewest:
            few = "none" if self.fewest == 1 else "fewer than two"
            raise UserError(f"{few} of the held-out images can be read, so there is nothing to evaluate on")
        return batches
