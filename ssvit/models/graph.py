"""Compute the outputs of an exported graph behind the interface of encoders.

Letters: b images, c channels, h, w pixels, d width.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ssvit.errors import pair
from ssvit.models.encoder import Encoder, scaled
from ssvit.models.vit_options import ViT


class Graph(Encoder):
    """Return the outputs of a graph as an encoder: the pooled features of the last layer, or logits.

    Args:
        options: Options of the exported encoder.
        session: Session of onnxruntime, whose graph normalises images itself.
    """

    def __init__(self, options: ViT, session: Any) -> None:
        super().__init__()
        self.options, self.session, self.norm = options, session, nn.Identity()
        self.image_size = pair("image_size", options.image_size)
        self.channels, self.width, self.pooling = options.channels, options.width, options.pooling

    @property
    def depth(self) -> int:
        """Return the number of layers of the exported encoder."""
        return self.options.depth

    def represent(self, images: Tensor, *, depth_noise: Tensor | None = None) -> Tensor:
        """Return the features (b, d) or logits (b, k) of images (b, c, h, w), uint8 or float in [0, 1]."""
        *_, outputs = self.session.run(None, {self.session.get_inputs()[0].name: scaled(images).numpy()})
        return torch.from_numpy(outputs)

    def layers(self, images: Tensor) -> Iterator[Tensor]:
        """Yield an empty tensor for each layer before the last, and then the pooled features, (b, d)."""
        yield from [torch.empty(0)] * (self.depth - 1)
        yield self.represent(images)

    def pooled(self, outputs: Tensor, pooling: str, images: Tensor) -> Tensor:
        """Return the outputs unchanged, since the graph has pooled them."""
        return outputs
