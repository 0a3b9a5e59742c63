"""Define the options of corrupting and masking patches."""

from typing import ClassVar, Literal

from ssvit.config.declaration import Count, Fraction, Options, Run, Share
from ssvit.models.vit_options import ViT
from ssvit.objectives.base_options import Objective
from ssvit.options import OptionError


class Masking(Options):
    """Select and corrupt patches (section 4.6, Appendix B.1.2)."""

    corrupted: Share = 0.5
    """Fraction of an image's patches that are corrupted and predicted."""
    mask: Fraction = 0.8
    """Fraction of the corrupted patches that are replaced by the [mask] embedding."""
    replace: Fraction = 0.1
    """Fraction of the corrupted patches that are replaced by another patch of the same image."""
    keep: Fraction = 0.1
    """Fraction of the corrupted patches that stay unchanged. The three fractions sum to 1."""
    shape: Literal["random", "block"] = "random"
    """random: patches are sampled independently; block: rectangles are sampled until the count is reached (Bao et al.
    2022)."""
    unit: Count = 1
    """Side in patches of the squares that are corrupted together (Xie et al. 2022, section 3.2)."""

    def check_consistency(self) -> None:
        """Check that the fractions sum to 1."""
        total = self.mask + self.replace + self.keep
        if abs(total - 1) > 1e-6:
            raise OptionError("mask + replace + keep", f"{total:g}", "the three fractions must sum to 1")

    def count(self, patches: int) -> int:
        """Return the number of corrupted patches per image: the fraction of its units, rounded, at least one unit."""
        return max(1, round(self.corrupted * patches / self.unit**2)) * self.unit**2

    def check(self, run: Run) -> None:
        """Check that the encoder's patch grid can be corrupted."""
        if isinstance(run.encoder, ViT):
            self.divide(run.encoder.grid)

    def divide(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of units on a grid of patches.

        Raises:
            OptionError: The units do not tile the grid, or an image has too few patches.
        """
        if self.replace > 0 and grid == (1, 1):
            raise OptionError("replace", self.replace, "needs images of at least two patches")
        if any(side % self.unit for side in grid):
            right = f"must divide the grid of {grid[0]}x{grid[1]} patches"
            raise OptionError("unit", self.unit, right)
        return grid[0] // self.unit, grid[1] // self.unit


class Masked(Objective):
    """Define an objective whose encoder encodes the visible patches and whose decoder predicts the masked patches."""

    samples_patches: ClassVar[bool] = True
    needs_standardizing: ClassVar[bool] = True  # before cosines, which a few features would dominate

    masked: Share
    """Fraction of an image's patches that are masked and predicted."""

    def fits(self, encoder: ViT) -> None:
        """Check that an image has patches to mask and visible patches.

        Raises:
            OptionError: An image has one patch, or the encoder has a stem.
        """
        if encoder.grid == (1, 1):
            raise OptionError("masked", self.masked, "needs images of at least two patches")
        if encoder.stem is not None:
            raise OptionError("masked", self.masked, "needs an encoder without a stem, which would see masked patches")

    def count(self, patches: int) -> int:
        """Return the number of masked patches per image: the fraction, rounded, at least one, and fewer than all."""
        return min(max(1, round(self.masked * patches)), patches - 1)
