"""Implement the stem of a hybrid: a ResNet whose feature map, instead of the image, is cut into patches (section 3.1).

This is the ResNet of the authors' code, after BiT (Kolesnikov et al. 2020): bottlenecks as in ResNet v1.5, weight
standardisation, and group norm instead of batch norm. The receptive field of a token exceeds its patch, so adjacent
tokens depend on a corrupted patch. With timm's epsilons, timm's weights give timm's outputs.

Letters: b images, c channels, h x w their height and width, f channels of a feature map, y x x its height and width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssvit.models import vit_options


class Convolution(nn.Conv2d):
    """Apply a convolution without bias, with standardised weights (Qiao et al. 2019) and "SAME" padding as in JAX.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        size: Side of the kernel.
        stride: Stride, which must divide the sides of the input.
        epsilons: authors or timm.
    """

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, *, epsilons: str) -> None:
        # If the number of zeros is odd, the additional one is added below and to the right, as "SAME" does.
        padding, self.more = divmod(max(size - stride, 0), 2)
        super().__init__(inputs, outputs, size, stride, padding, bias=False)
        self.epsilons = epsilons

    def forward(self, x: Tensor) -> Tensor:
        # The mean needs float32: half precision rounds too coarsely.
        """Convolve a map: (b, inputs, y, x) -> (b, outputs, y / stride, x / stride)."""
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        if self.epsilons == "authors":
            std, mean = torch.std_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
            weight = (weight - mean) / (std + 1e-5)
        else:
            # The same operation as in timm: the rounding differences of another one grow to 1e-4 in a deep stem.
            weight = F.batch_norm(weight.flatten(1)[None], None, None, training=True, eps=1e-8).view_as(weight)
        if self.more:
            x = F.pad(x, (0, self.more, 0, self.more))
        return F.conv2d(x, weight.to(x.dtype), stride=self.stride, padding=self.padding)


def normed(inputs: int, outputs: int, size: int, stride: int = 1, *, epsilons: str) -> tuple[Convolution, nn.GroupNorm]:
    """Return a convolution and the group norm that follows it (Wu and He 2018).

    Args:
        inputs: Input channels.
        outputs: Output channels.
        size: Side of the kernel.
        stride: Stride.
        epsilons: authors or timm.

    Returns:
        The convolution and the norm.
    """
    norm = nn.GroupNorm(vit_options.GROUPS, outputs, eps=1e-6 if epsilons == "authors" else 1e-5)
    return Convolution(inputs, outputs, size, stride, epsilons=epsilons), norm


class Bottleneck(nn.Module):
    """Apply a residual unit of three convolutions, initialised as its shortcut because its last scale is 0.

    Args:
        inputs: Input channels.
        width: Channels of the first two convolutions; the output has 4 * width.
        stride: Stride of the second convolution.
        epsilons: authors or timm.
    """

    def __init__(self, *, inputs: int, width: int, stride: int, epsilons: str) -> None:
        super().__init__()
        self.conv1, self.norm1 = normed(inputs, width, 1, epsilons=epsilons)
        self.conv2, self.norm2 = normed(width, width, 3, stride, epsilons=epsilons)
        self.conv3, self.norm3 = normed(width, 4 * width, 1, epsilons=epsilons)
        nn.init.zeros_(self.norm3.weight)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != 4 * width or stride != 1:
            self.shortcut = nn.Sequential(*normed(inputs, 4 * width, 1, stride, epsilons=epsilons))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the unit: (b, inputs, y, x) -> (b, 4 * width, y / stride, x / stride)."""
        branch = F.relu(self.norm1(self.conv1(x)))
        branch = F.relu(self.norm2(self.conv2(branch)))
        return F.relu(self.shortcut(x) + self.norm3(self.conv3(branch)))


class ResNet(nn.Module):
    """Compute the feature map of normalised images, with the options of `vit_options.Stem`."""

    def __init__(self, options: vit_options.Stem, *, channels: int) -> None:
        super().__init__()
        width, epsilons = options.width, options.epsilons
        self.layers = options.layers
        self.stride, self.epsilons = vit_options.stride(options.layers), epsilons
        self.root, self.norm = normed(channels, width, 7, 2, epsilons=epsilons)
        self.stages, self.outputs = nn.Sequential(), width
        for stage, units in enumerate(options.layers):
            units_of_stage = nn.Sequential()
            self.stages.append(units_of_stage)
            for index in range(units):
                stride = 2 if stage > 0 and index == 0 else 1
                unit = Bottleneck(inputs=self.outputs, width=width * 2**stage, stride=stride, epsilons=epsilons)
                units_of_stage.append(unit)
                self.outputs = 4 * width * 2**stage

    def forward(self, images: Tensor) -> Tensor:
        """Return the feature map, (b, f, h / stride, w / stride), of normalised images (b, c, h, w)."""
        x = F.relu(self.norm(self.root(images)))
        # ceil_mode pads below and to the right, as "SAME" does.
        return self.stages(F.max_pool2d(x, 3, 2, ceil_mode=True))
