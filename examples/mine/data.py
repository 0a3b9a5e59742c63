"""A data set: stripes, computed from the number of the image."""

import torch

from ssvit.data.sources.base import Data, Source
from ssvit.engine.randomness import uniform


class Stripes(Source):
    """Noise with vertical or horizontal stripes of several widths."""

    classes = ("vertical", "horizontal")

    def __init__(self, numbers, size):
        self.labels, self.numbers, self.size = numbers % 2, numbers, size

    def __len__(self):
        return len(self.numbers)

    def read(self, index):
        number, size = self.numbers[index, None], self.size
        stripes = torch.arange(size) // (2 + number // 2 % 5) % 2
        image = (stripes + uniform(0, "noise", number, size * size).view(1, size, size)) * 127
        image = image.to(torch.uint8).expand(3, size, size)
        return image.mT.contiguous() if self.labels[index] else image.contiguous()


def stripes(options):
    sizes = options.images, options.held_out_images
    train, test = torch.arange(sum(sizes)).split(sizes)
    return Data(Stripes(train, options.image_size), None, Stripes(test, options.image_size), Stripes.classes)
