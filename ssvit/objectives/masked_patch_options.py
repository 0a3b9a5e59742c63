"""Define the options of masked patch prediction."""

import math
from typing import ClassVar, Literal

from ssvit.config.declaration import Count, Fraction, Options, Share, Tree
from ssvit.errors import OptionError
from ssvit.models.vit_options import Decoder, ViT
from ssvit.objectives.base_options import Objective, check_omits


class Masking(Options):
    """Select and corrupt patches (section 4.6, Appendix B.1.2)."""

    corrupted: Share = 0.5
    """Fraction of an image's patches that are corrupted and predicted."""
    mask: Fraction = 0.8
    """Fraction of the corrupted patches that are replaced by the [mask] embedding."""
    replace: Fraction = 0.1
    """Fraction of the corrupted patches that are replaced by another patch of the same image."""
    unchanged: Fraction = 0.1
    """Fraction of the corrupted patches that stay unchanged. The three fractions sum to 1."""
    shape: Literal["random", "block"] = "random"
    """random: patches are sampled independently; block: rectangles are sampled until the count is reached (Bao et al.
    2022)."""
    unit: Count = 1
    """Side in patches of the squares that are corrupted together (Xie et al. 2022, section 3.2)."""

    def check_consistency(self) -> None:
        """Check that the fractions sum to 1."""
        total = self.mask + self.replace + self.unchanged
        if abs(total - 1) > 1e-6:
            raise OptionError("mask + replace + unchanged", round(total, 6), "the three fractions must sum to 1")

    def count(self, patches: int) -> int:
        """Return the number of corrupted patches per image: the fraction of its units, rounded, at least one unit."""
        return max(1, round(self.corrupted * patches / self.unit**2)) * self.unit**2

    def check(self, tree: Tree) -> None:
        """Check that the encoder's patch grid can be corrupted."""
        if isinstance(tree.encoder, ViT):
            self.grid_of_units(tree.encoder.grid)

    def grid_of_units(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of units on a grid of patches.

        Raises:
            OptionError: The units do not tile the grid, or an image has too few patches.
        """
        if self.replace > 0 and grid == (1, 1):
            raise OptionError("replace", self.replace, "requires images of at least two patches")
        if any(side % self.unit for side in grid):
            expected = f"must divide the grid of {grid[0]}x{grid[1]} patches"
            raise OptionError("unit", self.unit, expected)
        return grid[0] // self.unit, grid[1] // self.unit


class MaskedPatch(Objective):
    """Predict masked patches."""

    also: ClassVar = {"/target": "mean_color"}
    sets: ClassVar = {
        "encoder": {"pooling": "patch_mean"},  # the class token's output is not trained
        "evaluators": {"held_out": {"_part_": "evaluator/prediction"}},
    }

    needs_target: ClassVar[bool] = True
    samples_patches: ClassVar[bool] = True
    needs_standardizing: ClassVar[bool] = True

    masking: Masking = Masking()
    """Selection and corruption of the patches."""
    decoder: Decoder | None = None
    """Decoder of the corrupted patches; the encoder then encodes only the uncorrupted patches. None: all patches are
    encoded, and a linear head predicts."""

    def check_consistency(self) -> None:
        """Check that with a decoder all corrupted patches are masked."""
        if self.decoder is None:
            return
        for name, share in (("mask", 1), ("replace", 0), ("unchanged", 0)):
            if getattr(self.masking, name) != share:
                expected = f"must be {share} with a decoder: the encoder does not encode corrupted patches"
                raise OptionError(f"masking.{name}", getattr(self.masking, name), expected)

    def check_encoder(self, encoder: ViT) -> None:
        """Check that with a decoder the encoder can omit corrupted patches and has uncorrupted patches.

        Raises:
            OptionError: The encoder has a stem or local attention, or all patches are corrupted.
        """
        if self.decoder is None:
            return
        check_omits("decoder", "{…}", encoder)
        patches = math.prod(encoder.grid)
        if self.masking.count(patches) == patches:
            expected = "must be smaller, so that the encoder has patches to encode"
            raise OptionError("masking.corrupted", self.masking.corrupted, expected)
