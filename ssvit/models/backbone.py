"""An encoder as the backbone of other models: feature maps of its layers, and the simple feature pyramid of ViTDet.

Letters: b images, c channels, h, w pixels, y, x rows and columns of patches, d width, o channels of the pyramid.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ssvit.models.vit import ViT
from ssvit.options import OptionError


class FeatureMaps(nn.Module):
    """The patch tokens of chosen layers as maps: (b, c, h, w), uint8 or in [0, 1] -> for each layer (b, d, y, x).

    layers: their numbers, 1 for the first, in the order of the maps; OptionError for a layer that does not exist.
    The encoder's last norm is applied to each map.
    """

    def __init__(self, encoder: ViT, layers: Sequence[int]) -> None:
        super().__init__()
        depth = len(encoder.blocks)
        if not layers or any(layer not in range(1, depth + 1) for layer in layers):
            raise OptionError("layers", list(layers), f"must be numbers from 1 to {depth}")
        self.encoder, self.layers = encoder, tuple(layers)

    def forward(self, images: Tensor) -> list[Tensor]:
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
    """Layer norm over the channels of a map: (b, c, h, w) -> (b, c, h, w)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class FeaturePyramid(nn.Module):
    """The simple feature pyramid of ViTDet (Li et al. 2022, section 3), a backbone for torchvision's detectors.

    (b, c, h, w), uint8 or in [0, 1] -> {"0": (b, o, 4 y, 4 x), "1": (b, o, 2 y, 2 x), "2": (b, o, y, x),
    "3": (b, o, y / 2, x / 2), "pool": (b, o, y / 4, x / 4)}, all of the last layer's map.

    The encoder normalises its images: give a detector image_mean=[0, 0, 0] and image_std=[1, 1, 1].
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
        (features,) = self.maps(images)
        maps = {name: level(features) for name, level in self.levels.items()}
        return maps | {"pool": F.max_pool2d(maps["3"], 1, stride=2)}
