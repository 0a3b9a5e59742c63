"""Define the options of a codebook of patches."""

import math
import os
from typing import Annotated

from annotated_types import Ge

from ssvit.config.declaration import Count, Name, Options, Part, Size, Tree
from ssvit.errors import OptionError, pair
from ssvit.models.vit_options import ViT
from ssvit.objectives.targets_options import Patches

MIN_PATCHES = 39  # minimum number of vectors per cluster below which faiss warns of poor clusters


class Codebook(Patches):
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
    """The run or checkpoint whose encoder's features are clustered, as a second stage; None: pixels are clustered."""
    layer: Count | None = None
    """Layer of that encoder whose features are clustered, from 1."""

    encoder: Part[Options | None] = None
    """Layers of that encoder, determined by checkpoint and layer."""

    @property
    def window_size(self) -> tuple[int, int]:
        """Return the height and width of the window in pixels."""
        if self.window is not None:
            return pair("window", self.window)
        height, width = self.patch_size
        return 3 * height, 3 * width

    def check_consistency(self) -> None:
        """Check that the options can be combined and that the checkpoint exists."""
        patch = self.patch_size
        if any(window < side for window, side in zip(self.window_size, patch, strict=True)):
            raise OptionError("window", self.window, f"must be at least the patch size, {patch[0]}x{patch[1]}")
        if self.checkpoint is None:
            if self.layer is not None:
                raise OptionError("layer", self.layer, "must be null without target.checkpoint")
            return
        if not os.path.exists(self.checkpoint):
            raise OptionError("checkpoint", self.checkpoint, "no such folder or file")
        if self.layer is None:
            raise OptionError("layer", None, "must be set with target.checkpoint; a middle layer is common")

    def check(self, tree: Tree) -> None:
        """Check also that images are larger than a window and have enough patches for the clusters."""
        super().check(tree)
        if not isinstance(tree.encoder, ViT):
            return
        size, patch = pair("image_size", tree.encoder.image_size), pair("patch_size", tree.encoder.patch_size)
        if self.checkpoint is None and any(
            (window - part + 1) // 2 >= side for window, part, side in zip(self.window_size, patch, size, strict=True)
        ):
            raise OptionError("window", self.window, f"must be smaller for images of {size[0]}x{size[1]} pixels")
        minimum = math.ceil(MIN_PATCHES * self.clusters / math.prod(tree.encoder.grid))
        if self.images < minimum:
            expected = f"must be at least {minimum}: {MIN_PATCHES} patches for each of {self.clusters} clusters"
            raise OptionError("images", self.images, expected)
