"""Define the options of the targets that are computed from a patch's pixels."""

from typing import Literal

from pydantic import Field

from ssvit.config.declaration import FILLED, Count, Options, Pair, Tree
from ssvit.errors import OptionError, pair, typed
from ssvit.models.vit_options import ViT


class Patches(Options):
    """Define the options of a target that is computed for each patch."""

    patch_size: Pair = FILLED
    """Pixels of a patch's side, or [height, width]; stored as a pair."""
    channels: Count = 3
    """Number of image channels."""

    def check(self, tree: Tree) -> None:
        """Check that the encoder has the same patch size and channels."""
        if not isinstance(tree.encoder, ViT):
            return
        expected = {"patch_size": pair("patch_size", tree.encoder.patch_size), "channels": tree.encoder.channels}
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise OptionError(name, getattr(self, name), f"must be encoder.{name}={typed(value)}")


class Pixels(Patches):
    """Predict the pixels of the patch (Appendix B.1.2)."""

    loss: Literal["l2", "l1"] = "l2"
    """l2: the squared error, as in the paper; l1: the absolute error, as in SimMIM (Xie et al. 2022, section 3.4)."""


class MeanColor(Patches):
    """Predict the mean colour of the patch as one class, the paper's best target, or of the cells of a grid."""

    bits: Count = 3
    """Bits per channel: each channel has 2^bits levels; 3 bits give 512 classes."""
    grid: Count = 1
    """Number of cells in a row and in a column of the patch, with one class each; 4 in the paper's second target
    (target=color_grid)."""

    def check_consistency(self) -> None:
        """Check that the number of classes is supported and that the grid divides the patch."""
        if self.bits > 8 or self.bits * self.channels > 16:
            maximum = min(8, 16 // self.channels)
            others = "; target=pixels, hog and codebook accept any number of channels" if self.channels > 3 else ""
            raise OptionError("bits", self.bits, f"must be at most {maximum} for {self.channels} channels{others}")
        height, width = self.patch_size
        if height % self.grid or width % self.grid:
            raise OptionError("grid", self.grid, f"must divide the patch of {height}x{width} pixels")


class Hog(Patches):
    """Predict histograms of oriented gradients (Wei et al. 2022)."""

    cell: Pair = Field(4, validate_default=True)
    """Side in pixels of a cell, which has one histogram, or [height, width]; stored as a pair. The paper uses 8, for
    patches of 16."""
    window: Pair | None = Field(12, validate_default=True)
    """Side in pixels of the square around the patch whose cells are predicted, or [height, width]; stored as a pair.
    None: only the patch itself, as in the paper. The default has 9 cells for patches of 4."""

    @property
    def window_size(self) -> tuple[int, int]:
        """Return the height and width of the square whose cells are predicted."""
        return self.window or self.patch_size

    def check_consistency(self) -> None:
        """Check that the window surrounds the patch symmetrically and that the cells divide it."""
        patch, cell, window = self.patch_size, self.cell, self.window_size
        if any(side < inner or (side - inner) % 2 for side, inner in zip(window, patch, strict=True)):
            expected = f"must be {patch[0]}x{patch[1]}, the size of the patch, or larger by an even number of pixels"
            raise OptionError("window", self.window, expected)
        if any(side % part for side, part in zip(window, cell, strict=True)):
            raise OptionError("cell", self.cell, f"must divide the window of {window[0]}x{window[1]} pixels")
