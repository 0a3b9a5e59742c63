"""What the training loop asks of a method: a module that owns an encoder, draws its randomness and gives a loss.

Letters: b images.
"""

from typing import Any

from torch import Tensor, nn

from ssvit.models.vit import ViT


class Objective(nn.Module):
    """A way of training an encoder. Fine-tuning is one too. A method is one module here and one file in configs."""

    encoder: ViT

    @property
    def facts(self) -> dict[str, Any]:
        """Plain numbers and names that a checkpoint carries, from which what was trained can be built again."""
        # What is kept for the backward changes no bit of the weights, so a run may go on with it or without.
        own = {name: value for name, value in self.encoder.arguments.items() if name != "activation_checkpointing"}
        return {"encoder": own}

    def draw(self, slots: Tensor, *, seed: int) -> Any:
        """Every random choice about the images of slots (b,), as a tuple of tensors whose first dimension is b."""
        return ()

    def forward(self, images: Tensor, labels: Tensor | None, draw: Any) -> dict[str, Tensor]:
        """images (b, c, h, w) uint8 or in [0, 1], labels (b,) or None: "loss" is minimised, the rest is shown."""
        raise NotImplementedError
