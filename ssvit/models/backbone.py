"""Use an encoder as the backbone of other models: feature maps of its layers and the feature pyramid of ViTDet.

Letters: b images, c channels, h, w pixels, y, x rows and columns of patches, d width, o channels of the pyramid.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ssvit.models.vit import ViT
from ssvit.options import OptionError


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
        for layer, tokens in enumerate(self.encoder.layers(images), start=1):
            if layer in self.layers:
                patches = self.encoder.norm(tokens)[:, self.encoder.num_prefix_tokens :]
                maps[layer] = rearrange(patches, "b (y x) d -> b d y x", y=rows)
            if layer == max(self.layers):
                break
        return [maps[layer] for layer in self.layers]


class ChannelNorm(nn.LayerNorm):
    """Apply layer norm over the channels of a map."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a map over its channels: (b, c, h, w) -> (b, c, h, w)."""
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class FeaturePyramid(nn.Module):
    """Compute the simple feature pyramid of ViTDet (Li et al. 2022, section 3), a backbone for torchvision's detectors.

    All levels are computed from the map of the last layer. The encoder normalises its images, so a detector needs
    image_mean=[0, 0, 0] and image_std=[1, 1, 1].

    Args:
        encoder: The encoder.
        out_channels: Channels of each level, o.
    """

    def __init__(self, encoder: ViT, out_channels: int = 256) -> None:
        super().__init__()
        self.maps = FeatureMaps(encoder, [len(encoder.blocks)])
        self.out_channels = out_channels
        d = encoder.width
        twice, once = nn.ConvTranspose2d(d, d // 2, 2, stride=2), nn.ConvTranspose2d(d, d // 2, 2, stride=2)
        quarter = nn.ConvTranspose2d(d // 2, d // 4, 2, stride=2)
        resized = (
            (nn.Sequential(twice, ChannelNorm(d // 2, eps=1e-6), nn.GELU(), quarter), d // 4),
            (once, d // 2),
            (nn.Identity(), d),
            (nn.MaxPool2d(2), d),
        )
        self.levels = nn.ModuleDict(
            {
                str(level): nn.Sequential(
                    resize,
                    nn.Conv2d(channels, out_channels, 1, bias=False),
                    ChannelNorm(out_channels, eps=1e-6),
                    nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
                    ChannelNorm(out_channels, eps=1e-6),
                )
                for level, (resize, channels) in enumerate(resized)
            }
        )

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the levels of the pyramid.

        Args:
            images: Images, (b, c, h, w), uint8 or in [0, 1].

        Returns:
            Maps by name: "0" (b, o, 4 y, 4 x), "1" (b, o, 2 y, 2 x), "2" (b, o, y, x), "3" (b, o, y / 2, x / 2) and
            "pool" (b, o, y / 4, x / 4).
        """
        (features,) = self.maps(images)
        maps = {name: level(features) for name, level in self.levels.items()}
        return maps | {"pool": F.max_pool2d(maps["3"], 1, stride=2)}
