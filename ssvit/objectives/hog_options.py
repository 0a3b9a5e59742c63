"""The options of histograms of oriented gradients."""

from typing import Self

from pydantic import Field, model_validator

from ssvit.config.choices import choice
from ssvit.config.declaration import Pair
from ssvit.objectives.targets_options import Patches
from ssvit.options import OptionError


@choice("target", "hog")
class Hog(Patches):
    """Histograms of oriented gradients (Wei et al. 2022)."""

    cell: Pair = Field(4, validate_default=True)
    """Side in pixels of a cell, which has one histogram, or [height, width]; stored as a pair. The paper has 8, for
    patches of 16."""
    window: Pair | None = Field(12, validate_default=True)
    """Side in pixels of the square around the patch whose cells are predicted, or [height, width]; stored as a pair.
    None: only the patch itself, as in the paper. The default has 9 cells for patches of 4."""

    @property
    def window_size(self) -> tuple[int, int]:
        """Height and width of the square whose cells are predicted."""
        return self.window or self.patch_size

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        patch, cell, window = self.patch_size, self.cell, self.window_size
        if any(side < least or (side - least) % 2 for side, least in zip(window, patch, strict=True)):
            right = f"must be the patch's {patch[0]}x{patch[1]} pixels, or larger by an even number"
            raise OptionError("window", self.window, right)
        if any(side % part for side, part in zip(window, cell, strict=True)):
            raise OptionError("cell", self.cell, f"must divide the window of {window[0]}x{window[1]} pixels")
        return self
