"""Define the options of a codebook of patches."""

import math
import os
from typing import Annotated

from annotated_types import Ge

from ssvit.choices import options_of
from ssvit.config.declaration import Count, Name, Options, Size, Tree
from ssvit.errors import OptionError, pair
from ssvit.models.vit_options import ViT
from ssvit.objectives.targets_options import Target

MIN_PATCHES = 39  # minimum number of vectors per cluster below which faiss warns of poor clusters


class Codebook(Target):
    """Predict the cluster of the patch, by its pixels or by the features of an earlier run."""

    clusters: Annotated[int, Ge(2)] = 512
    """Number of clusters; 512 to 8,192 are usual."""
    images: Count = 2048
    """Number of images, from the first of the run and with training augmentation, whose patches are clustered."""
    window: Size | None = None
    """Side in pixels of the window around a patch, or [height, width]; None: three times the patch's side."""
    components: Count = 32
    """Number of principal components of the window's pixels, scaled to variance 1; 32 explain 94 % of the variance on
    CIFAR-10."""
    checkpoint: Name | None = None
    """The run or checkpoint whose encoder's features are clustered, as a second stage; None: pixels are clustered.
    HuBERT (Hsu et al. 2021) has 100 clusters of spectra, then 500 of the features of layer 6 of 12."""
    layer: Count | None = None
    """Layer of that encoder whose features are clustered, from 1."""

    @property
    def layers(self) -> Options | None:
        """Return the options that load the layers of that encoder; None if pixels are clustered."""
        if self.checkpoint is None:
            return None
        loaded: Options = options_of("teacher/layers")(checkpoint=self.checkpoint, layer=self.layer)
        return loaded

    def window_size(self, patch_size: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width in pixels of the window around a patch."""
        height, width = patch_size
        return (3 * height, 3 * width) if self.window is None else pair("window", self.window)

    def check_consistency(self) -> None:
        """Check that the options can be combined and that the checkpoint exists."""
        if self.checkpoint is None:
            if self.layer is not None:
                raise OptionError("layer", self.layer, "must be null without target.checkpoint")
            return
        if not os.path.exists(self.checkpoint):
            raise OptionError("checkpoint", self.checkpoint, "no such folder or file")
        if self.layer is None:
            raise OptionError("layer", None, "must be set with target.checkpoint; a middle layer is common")

    def origins(self, option: str) -> list[dict[str, str]]:
        """Return rows about the checkpoint, and about the weights of which its training made use."""
        return [] if self.layers is None else self.layers.origins(option)

    def check(self, tree: Tree) -> None:
        """Check also that the layers of the checkpoint fit the encoder."""
        super().check(tree)
        if self.layers is not None:
            self.layers.check(tree)

    def check_encoder(self, encoder: ViT) -> None:
        """Check that a window has a patch, that images are larger, and that they have enough patches."""
        size, patch = pair("image_size", encoder.image_size), pair("patch_size", encoder.patch_size)
        window = self.window_size(patch)
        if any(side < part for side, part in zip(window, patch, strict=True)):
            raise OptionError("window", self.window, f"must be at least the patch size, {patch[0]}x{patch[1]}")
        if self.checkpoint is None and any(
            (side - part + 1) // 2 >= whole for side, part, whole in zip(window, patch, size, strict=True)
        ):
            raise OptionError("window", self.window, f"must be smaller for images of {size[0]}x{size[1]} pixels")
        minimum = math.ceil(MIN_PATCHES * self.clusters / math.prod(encoder.grid))
        if self.images < minimum:
            expected = f"must be at least {minimum}: {MIN_PATCHES} patches for each of {self.clusters} clusters"
            raise OptionError("images", self.images, expected)
