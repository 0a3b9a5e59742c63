"""An augmentation: a centre crop with reduced brightness."""

import torch

from ssvit.data.augment.options import CenterCrop
from ssvit.engine.randomness import uniform


class Dim:
    """A centre crop with reduced brightness."""

    def __init__(self, options):
        self.crop, self.least = CenterCrop(size=options.size).build(), options.least
        self.bytes_per_image = self.crop.bytes_per_image

    def __call__(self, images, slots, seed, view=0):
        light = self.least + (1 - self.least) * uniform(seed, "light", slots, 1, view)
        return (self.crop(images) * light[:, :, None, None]).to(torch.uint8)
