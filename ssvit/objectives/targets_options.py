"""The options of the targets that are computed from a patch's pixels."""

from typing import Annotated, Literal, Self

from pydantic import model_validator

from ssvit.config.choices import choice
from ssvit.config.declaration import Count, From, Options, Pair, Run
from ssvit.models.vit_options import ViT
from ssvit.options import OptionError, pair, typed


class Patches(Options):
    """A target that is computed for each patch."""

    patch_size: Annotated[Pair, From("encoder.patch_size")]
    """Pixels of a patch's side, or [height, width]; stored as a pair."""
    channels: Annotated[Count, From("encoder.channels")] = 3
    """Channels of the images."""

    def check(self, run: Run) -> None:
        """Check that the encoder has patches of this size."""
        if not isinstance(run.encoder, ViT):
            return
        expected = {"patch_size": pair("patch_size", run.encoder.patch_size), "channels": run.encoder.channels}
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise OptionError(name, getattr(self, name), f"must be {typed(value)}, as of the encoder")


@choice("target", "pixels")
class Pixels(Patches):
    """The pixels of the patch (Appendix B.1.2)."""

    loss: Literal["l2", "l1"] = "l2"
    """l2: the squared error, as in the paper; l1: the absolute error, as in SimMIM (Xie et al. 2022, section 3.4)."""


@choice("target", "mean_color")
class MeanColor(Patches):
    """The mean colour of the patch as one class: the paper's best target."""

    bits: Count = 3
    """Each channel has 2^bits levels; 3 bits give 512 classes."""

    @property
    def side(self) -> int:
        """Cells in a row and in a column of the patch."""
        return 1

    @model_validator(mode="after")
    def _check_bits(self) -> Self:
        if self.bits > 8 or self.bits * self.channels > 16:
            most = min(8, 16 // self.channels)
            others = "; target=pixels, hog and codebook take any number of them" if self.channels > 3 else ""
            raise OptionError("bits", self.bits, f"must be at most {most} for {self.channels} channels{others}")
        return self


@choice("target", "color_grid")
class ColorGrid(MeanColor):
    """The mean colours of a grid of cells, one class for each cell: the paper's 4x4 downsized patch."""

    grid: Count = 4
    """Cells in a row and in a column of the patch."""

    @property
    def side(self) -> int:
        return self.grid

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        height, width = self.patch_size
        if height % self.grid or width % self.grid:
            raise OptionError("grid", self.grid, f"must divide the patch of {height}x{width} pixels")
        return self
