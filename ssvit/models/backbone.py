"""Use an encoder as the backbone of other models: feature maps of its layers.

Letters: b images, c channels, h, w pixels, y, x rows and columns of patches, d width.
"""

from collections.abc import Sequence
from itertools import islice

from einops import rearrange
from torch import Tensor, nn

from ssvit.errors import OptionError
from ssvit.models.vit import ViT


class FeatureMaps(nn.Module):
    """Return the patch tokens of selected layers as feature maps.

    The encoder's last norm is applied to each map.

    Args:
        encoder: The encoder.
        layers: Layers, counted from 1, in the order of the maps.

    Raises:
        OptionError: A layer does not exist.
    """

    def __init__(self, encoder: ViT, layers: Sequence[int]) -> None:
        super().__init__()
        depth = len(encoder.blocks)
        if not layers or any(layer not in range(1, depth + 1) for layer in layers):
            raise OptionError("layers", list(layers), f"must be numbers from 1 to {depth}")
        self.encoder, self.layers = encoder, tuple(layers)

    def forward(self, images: Tensor) -> list[Tensor]:
        """Return a map (b, d, y, x) for each layer from images (b, c, h, w), uint8 or in [0, 1]."""
        rows, _ = self.encoder.grid_of(images)
        maps = {}
        for layer, tokens in enumerate(islice(self.encoder.layers(images), max(self.layers)), start=1):
            if layer in self.layers:
                patches = self.encoder.norm(tokens)[:, self.encoder.num_prefix_tokens :]
                maps[layer] = rearrange(patches, "b (y x) d -> b d y x", y=rows)
        return [maps[layer] for layer in self.layers]
