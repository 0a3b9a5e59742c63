"""An encoder that is not a ViT."""

import torch
from torch import nn

from ssvit.errors import pair
from ssvit.models.encoder import Encoder
from with_conv import encoder_options


class Conv(Encoder):
    """Two convolutions, each with a tanh."""

    depth = 2

    def __init__(self, options: encoder_options.Conv) -> None:
        super().__init__()
        self.options, self.channels, self.width = options, options.channels, options.width
        self.image_size, self.pooling = pair("image_size", options.image_size), options.pooling
        self.norm = nn.Identity()
        self.register_normalisation(options.mean, options.std)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(inputs, options.width, 3, padding=1, stride=2) for inputs in (options.channels, options.width)
        )

    def layers(self, images):
        """Yield the feature map of each convolution."""
        self.check_values(images)
        x = self.normalise(images)
        for convolution in self.convolutions:
            x = torch.tanh(convolution(x))
            yield x

    def pooled(self, outputs, pooling, images):
        """Return the mean of a feature map, or its positions."""
        return outputs.movedim(1, -1) if pooling == "patches" else outputs.mean((2, 3))

    def represent(self, images, *, depth_noise=None):
        """Return the features of images."""
        *_, outputs = self.layers(images)
        return self.pooled(outputs, self.pooling, images)
