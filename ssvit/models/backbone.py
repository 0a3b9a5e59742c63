"""Use an encoder as the backbone of other models: feature maps of its layers.

Letters: b images, c channels, h, w pixels, y, x rows and columns of patches, d width.
"""

from collections.abc import Sequence
from itertools import islice

from torch import Tensor, nn

from ssvit.errors import OptionError
from ssvit.models.vit import ViT


def feature_maps(
    encoder: ViT, images: Tensor, layers: Sequence[int], *, depth_noise: Tensor | None = None
) -> list[Tensor]:
    """Return the patch tokens of selected layers as feature maps, after the encoder's last norm.

    Args:
        encoder: The encoder.
        images: Images, (b, c, h, w), uint8 or in [0, 1].
        layers: Layers, counted from 1, in the order of the maps.
        depth_noise: Random numbers of stochastic depth, (b, 2 * depth); None: torch's generator samples them.

    Returns:
        A map (b, d, y, x) for each layer.
    """
    if set(layers) == {encoder.depth}:  # all layers in one call, which the kernels compute faster
        outputs = {encoder.depth: encoder(images, depth_noise=depth_noise)}
    else:
        tokens = islice(encoder.layers(images, depth_noise=depth_noise), max(layers))
        outputs = {layer: encoder.norm(x) for layer, x in enumerate(tokens, start=1) if layer in layers}
    count = encoder.num_prefix_tokens
    return [outputs[layer][:, count:].unflatten(1, encoder.grid_of(images)).movedim(-1, 1) for layer in layers]


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
        return feature_maps(self.encoder, images, self.layers)
