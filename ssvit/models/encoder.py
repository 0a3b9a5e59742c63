"""What every encoder has: it normalises its images itself, and gives one vector for each image.

Letters: b images, c channels, h, w pixels, d width.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ssvit.models.timm_options import stored
from ssvit.options import OptionError, typed

UNDECAYED = ("positions", "token", "relative")
_BEYOND = 0.25  # how far outside of [0, 1] cubic filters reach in resizing


class Encoder(nn.Module):
    """The base of the encoders. options: those that build it again. pooling: what an image's vector is.

    undecayed: parts of the names of its matrices without weight decay. origin: the checksum of the checkpoint whose
    weights it began with, "scratch" for random ones.
    """

    options: Any
    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    channels: int
    width: int
    pooling: str
    undecayed: Sequence[str] = UNDECAYED
    origin: str = "scratch"
    class_token: nn.Parameter | None
    distillation_token: nn.Parameter | None
    norm: nn.Module
    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.class_token = self.distillation_token = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The options as plain data, as a checkpoint stores them."""
        return stored(self.options)

    @property
    def depth(self) -> int:
        """The number of layers."""
        raise NotImplementedError

    def represent(self, images: Tensor, *, depth_noise: Tensor | None = None) -> Tensor:
        """Return one vector for each image, (b, c, h, w) -> (b, d). depth_noise: of these images."""
        raise NotImplementedError

    def depth_noise(self, slots: Tensor, *, seed: int, views: int = 1) -> Tensor | None:
        """Return the uniform numbers that stochastic depth needs in training, None where there is none.

        Args:
            slots: Slots of the images, (b,).
            seed: Seed of the run.
            views: Number of times that each image is encoded in a step.

        Returns:
            Numbers for each layer and residual branch, (views * b, 2 * depth): of the first view of all images first.
        """
        return None

    def layers(self, images: Tensor) -> Iterator[Tensor]:
        """What each layer puts out in turn, before the last norm, `depth` times."""
        raise NotImplementedError

    def pooled(self, outputs: Tensor, pooling: str, images: Tensor) -> Tensor:
        """What one layer puts out for images: a vector each, (b, d), or for pooling=patches (b, y, x, d)."""
        raise NotImplementedError

    def layers_above(self, name: str) -> int:
        """How many layers stand above a parameter, a head among them."""
        return 0

    @torch.no_grad()
    def take(self, other: Self, *, how: str = "paper") -> None:
        """Take the weights, mean and std of an encoder whose images may have another size.

        OptionError where that changes the shape of a weight, unless a class resizes it.
        """
        theirs = other.state_dict()
        if any(tensor.shape != theirs[name].shape for name, tensor in self.state_dict().items()):
            right = f"must be {typed(other.arguments['image_size'])}: weights of {self.options.label} are not resized"
            raise OptionError("image_size", self.arguments["image_size"], right)
        self.load_state_dict(theirs)
        self.options = self.options.changed(mean=other.options.mean, std=other.options.std)

    def register_normalisation(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        """Make the buffers `mean` and `std`, (c,), of one number or one for each channel."""
        for name, given in (("mean", mean), ("std", std)):
            value = torch.tensor(given, dtype=torch.float32)
            self.register_buffer(name, value.flatten().expand(self.channels).clone())

    def check_values(self, images: Tensor) -> None:
        """OptionError for images that are neither uint8 nor in [0, 1].

        The range is not checked where reading it would make a device wait in training, nor in a compiled graph.
        """
        expected = "this encoder takes uint8, or float in [0, 1], and normalises images itself"
        if images.dtype == torch.uint8:
            return
        if not images.is_floating_point():
            raise OptionError("images", images.dtype, expected)
        if torch.compiler.is_compiling() or not images.numel() or (self.training and images.device.type != "cpu"):
            return
        low, high = (value.item() for value in images.detach().aminmax())
        if not (low >= -_BEYOND and high <= 1 + _BEYOND):
            found = "not a number" if math.isnan(low) else f"{low:.4g} to {high:.4g}"
            raise OptionError("images", found, expected)

    def normalise(self, images: Tensor) -> Tensor:
        """Images less their channels' mean, over their std: (..., c, h, w), [0, 1] or uint8, -> (..., c, h, w)."""
        unit = 255.0 if images.dtype == torch.uint8 else 1.0
        mean, std = ((value * unit)[:, None, None] for value in (self.mean, self.std))
        return (images.to(mean.dtype) - mean) / std
