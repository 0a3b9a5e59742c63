"""Define the options of several views of an image."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

from annotated_types import Len
from pydantic import Field

from ssvit.config.declaration import Expect, Fraction, Pair, Run, ShareLimits, Whole
from ssvit.data.augment.crop_options import InceptionCrop

ByView = Annotated[Sequence[Fraction], Len(3, 3), Expect("three probabilities: first global view, second, local views")]


class MultiCrop(InceptionCrop):
    """DINO's multi-crop (Caron et al. 2021): two large crops, "global", and several small ones, "local".

    The options of `InceptionCrop` apply to all views, except size and scale, which apply to the global views; blur and
    solarize have one probability each for the first global view, the second, and every local view.
    """

    views: ClassVar[tuple[str, ...]] = ("global", "local")

    scale: ShareLimits = (0.4, 1.0)
    """Minimum and maximum fraction of the image's area in a global view."""
    local_size: Pair = Field(96, validate_default=True)
    """Pixels of a local view's side, or [height, width]."""
    local_scale: ShareLimits = (0.05, 0.4)
    """Minimum and maximum fraction of the image's area in a local view."""
    local_views: Whole = 8
    """Number of local views per image; 0 for none."""
    jitter: Fraction = 0.8
    """Probability of colour jitter."""
    grayscale: Fraction = 0.2
    """Probability of conversion to grey."""
    blur: ByView = (1.0, 0.1, 0.5)  # type: ignore[assignment]
    """Probability of a blur for the first global view, the second, and each local view."""
    solarize: ByView = (0.0, 0.2, 0.0)  # type: ignore[assignment]
    """Probability of solarisation for the first global view, the second, and each local view."""

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Return height and width of global and of local views."""
        return self.size, self.local_size

    def check(self, run: Run) -> None:
        """Check also that the encoder's patch size divides local views."""
        super().check(run)
        if self.local_views:
            self.check_patches(run, "local_size")
