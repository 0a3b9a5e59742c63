"""Define the options of the targets that are computed from a patch's pixels."""

from typing import Literal

from pydantic import Field

from ssvit.config.declaration import Count, Options, Pair, Tree
from ssvit.errors import OptionError, pair
from ssvit.models.vit_options import ViT


class Target(Options):
    """Define the options of what is predicted of each patch."""

    def check(self, tree: Tree) -> None:
        """Check that the encoder's patches have this target."""
        if isinstance(tree.encoder, ViT):
            self.check_encoder(tree.encoder)

    def check_encoder(self, encoder: ViT) -> None:
        """Check that the patches of an encoder, of a size and of a number of channels, have this target.

        Raises:
            OptionError: An option of this class does not fit the encoder.
        """


class Pixels(Target):
    """Predict the pixels of the patch (Appendix B.1.2)."""

    loss: Literal["l2", "l1"] = "l2"
    """l2: the squared error, as in the paper; l1: the absolute error, as in SimMIM (Xie et al. 2022, section 3.4)."""


class MeanColor(Target):
    """Predict the mean colour of the patch as one class, the paper's best target, or of the cells of a grid."""

    bits: Count = 3
    """Bits per channel: each channel has 2^bits levels; 3 bits give 512 classes."""
    grid: Count = 1
    """Number of cells in a row and in a column of the patch, with one class each; 4 in the paper's second target
    (target=color_grid)."""

    def check_encoder(self, encoder: ViT) -> None:
        """Check that the number of classes is supported and that the grid divides the patch."""
        channels = encoder.channels
        if self.bits > 8 or self.bits * channels > 16:
            maximum = min(8, 16 // channels)
            others = "; target=pixels, hog and codebook accept any number of channels" if channels > 3 else ""
            raise OptionError("bits", self.bits, f"must be at most {maximum} for {channels} channels{others}")
        height, width = pair("patch_size", encoder.patch_size)
        if height % self.grid or width % self.grid:
            raise OptionError("grid", self.grid, f"must divide the patch of {height}x{width} pixels")


class Hog(Target):
    """Predict histograms of oriented gradients (Wei et al. 2022)."""

    cell: Pair = Field(4, validate_default=True)
    """Side in pixels of a cell, which has one histogram, or [height, width]; stored as a pair. The paper uses 8, for
    patches of 16."""
    window: Pair | None = Field(12, validate_default=True)
    """Side in pixels of the square around the patch whose cells are predicted, or [height, width]; stored as a pair.
    None: only the patch itself, as in the paper. The default has 9 cells for patches of 4."""

    def window_size(self, patch_size: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width of the square around a patch whose cells are predicted."""
        return self.window or patch_size

    def check_encoder(self, encoder: ViT) -> None:
        """Check that the window surrounds the patch symmetrically and that the cells divide it."""
        patch, cell = pair("patch_size", encoder.patch_size), self.cell
        window = self.window_size(patch)
        if any(side < inner or (side - inner) % 2 for side, inner in zip(window, patch, strict=True)):
            expected = f"must be {patch[0]}x{patch[1]}, the size of the patch, or larger by an even number of pixels"
            raise OptionError("window", self.window, expected)
        if any(side % part for side, part in zip(window, cell, strict=True)):
            raise OptionError("cell", self.cell, f"must divide the window of {window[0]}x{window[1]} pixels")
