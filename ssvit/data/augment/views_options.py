"""The options of several views of an image."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

from annotated_types import Len
from pydantic import Field

from ssvit.config.choices import choice
from ssvit.config.declaration import Expect, Fraction, Pair, Run, ShareLimits, Whole
from ssvit.data.augment.crop_options import InceptionCrop

ByView = Annotated[Sequence[Fraction], Len(3, 3), Expect("three probabilities: first global view, second, local views")]


@choice("augment", "multi_crop")
class MultiCrop(InceptionCrop):
    """DINO's views of an image (Caron et al. 2021): two large crops, "global", and several small ones, "local".

    The options of `InceptionCrop` hold for all views, but for size and scale, which are the global ones'; blur and
    solarize have a probability for the first global view, the second, and each local one.
    """

    views: ClassVar[tuple[str, ...]] = ("global", "local")

    scale: ShareLimits = (0.4, 1.0)
    """Least and greatest part of the image's area that a global view shows."""
    local_size: Pair = Field(96, validate_default=True)
    """Pixels of a local view's side, or [height, width]."""
    local_scale: ShareLimits = (0.05, 0.4)
    """Least and greatest part of the image's area that a local view shows."""
    local_views: Whole = 8
    """Local views of an image; 0 for none."""
    jitter: Fraction = 0.8
    """Probability of changed colours."""
    grayscale: Fraction = 0.2
    """Probability of a view without colours."""
    blur: ByView = (1.0, 0.1, 0.5)  # type: ignore[assignment]
    """Probabilities of a blur: of the first global view, the second, each local one."""
    solarize: ByView = (0.0, 0.2, 0.0)  # type: ignore[assignment]
    """Probabilities of inverted bright values: of the first global view, the second, each local one."""

    @property
    def number_of_local_views(self) -> int:
        return self.local_views

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        return self.size, self.local_size

    def check(self, run: Run) -> None:
        """Check also that the encoder's patches divide local views."""
        super().check(run)
        if self.local_views:
            self.check_patches(run, "local_size")
