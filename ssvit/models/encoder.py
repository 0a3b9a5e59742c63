"""Define the interface of all encoders: they normalise images themselves and return one feature vector per image.

Letters: b images, c channels, h, w pixels, d width.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssvit.errors import OptionError, typed
from ssvit.models.encoder_options import PATCHES
from ssvit.models.timm_options import stored
from ssvit.models.vit_options import Lora

UNDECAYED = ("positions", "token", "relative")  # parts of parameter names that get no weight decay
_BEYOND = 0.25  # tolerance around [0, 1]: bicubic resizing overshoots the range


def scaled(images: Tensor) -> Tensor:
    """Return images, uint8 or in [0, 1], as float32 in [0, 1]."""
    return images.float() / (255 if images.dtype == torch.uint8 else 1)


def resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return images (b, c, h, w), uint8 or in [0, 1], in another size; the same images if they have it."""
    if tuple(images.shape[-2:]) == size:
        return images
    return F.interpolate(scaled(images), size, mode="bicubic", antialias=True).clamp(0, 1)


def frozen(encoder: "Encoder") -> "Encoder":
    """Return an encoder that is only applied to the images of training steps: in eval mode, without gradients."""
    encoder.requires_grad_(False).eval()
    encoder.checks_values = False
    return encoder


class Encoder(nn.Module):
    """Define the base class of all encoders.

    Attributes:
        options: Validated options, from which the encoder can be built again.
        image_size: Height and width of the images in pixels.
        patch_size: Height and width of a patch in pixels.
        channels: Number of image channels.
        width: Width of the feature vector.
        pooling: How the outputs become one vector per image, such as class_token or patch_mean.
        undecayed: Substrings of the names of parameters that get no weight decay.
        checks_values: Whether the range of float images is checked, which synchronises an accelerator with the host.
        origin: Checksum of the checkpoint that initialised the weights, or "scratch" for a random initialisation.
        class_token: Learned class token, None without one.
        distillation_token: Learned distillation token, None without one.
        lora: Low-rank updates of the attention matrices, None without them.
        norm: Last norm of the encoder.
        mean: Mean of each image channel, (c,).
        std: Standard deviation of each image channel, (c,).
    """

    options: Any
    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    channels: int
    width: int
    pooling: str
    undecayed: Sequence[str] = UNDECAYED
    checks_values: bool = True
    origin: str = "scratch"
    class_token: nn.Parameter | None
    distillation_token: nn.Parameter | None
    lora: Lora | None = None
    norm: nn.Module
    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.class_token = self.distillation_token = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the options as plain data, the form in which a checkpoint stores them."""
        return stored(self.options)

    @property
    def depth(self) -> int:
        """Return the number of layers."""
        raise NotImplementedError

    def represent(self, images: Tensor, *, depth_noise: Tensor | None = None) -> Tensor:
        """Return one feature vector for each image.

        Args:
            images: Images, (b, c, h, w), uint8 or float in [0, 1].
            depth_noise: Result of `depth_noise` for these images; None: torch's generator samples the numbers.

        Returns:
            Feature vectors, (b, d).
        """
        raise NotImplementedError

    def depth_noise(self, slots: Tensor, *, seed: int, views: int = 1) -> Tensor | None:
        """Return the uniform random numbers of stochastic depth in training, or None where it is not used.

        Args:
            slots: Slots of the images, (b,).
            seed: Seed of the run.
            views: Number of times that each image is encoded in a step.

        Returns:
            Numbers in [0, 1) for each layer and residual branch, (views * b, 2 * depth): the first view of all images,
            then the second, and so on.
        """
        return None

    def layers(self, images: Tensor) -> Iterator[Tensor]:
        """Yield the output of each layer, before the last norm, for images (b, c, h, w)."""
        raise NotImplementedError

    def last_layer(self, images: Tensor) -> Tensor:
        """Return the output of the last layer, before the last norm, for images (b, c, h, w)."""
        *_, outputs = self.layers(images)
        return outputs

    def pooled(self, outputs: Tensor, pooling: str, images: Tensor) -> Tensor:
        """Pool the output of one layer.

        Args:
            outputs: Output of a layer, as `layers` yields it.
            pooling: One of the ways in the `poolings` of the options, or "patches" for no pooling.
            images: The images that were encoded, (b, c, h, w).

        Returns:
            A vector for each image, (b, d), or for pooling=patches the features of each patch, (b, y, x, d).
        """
        raise NotImplementedError

    def maps(self, images: Tensor) -> list[Tensor]:
        """Return the feature map of each layer, each (b, y, x, d), before the last norm, for images (b, c, h, w).

        Raises:
            UserError: The encoder has no feature maps.
        """
        return [self.pooled(outputs, PATCHES, images) for outputs in self.layers(images)]

    def layers_above(self, name: str) -> int:
        """Return the number of layers above a parameter, counting the head, for layer-wise learning rate decay."""
        return 0

    @torch.no_grad()
    def load_weights_from(self, other: Self, *, how: str = "paper") -> None:
        """Load the weights, mean and std of another encoder, whose images may have another size.

        Args:
            other: Encoder of the same class.
            how: How learned positions are resampled, one of `vit_options.RESIZE`; only a ViT uses it.

        Raises:
            OptionError: The image size changes the shape of a weight, and the class does not resize weights.
        """
        weights = other.state_dict()
        if any(tensor.shape != weights[name].shape for name, tensor in self.state_dict().items()):
            expected = typed(other.arguments["image_size"])
            reason = f"must be {expected}, because weights of {self.options.label} are not resized"
            raise OptionError("image_size", self.arguments["image_size"], reason)
        self.load_state_dict(weights)
        self.options = self.options.changed(mean=other.options.mean, std=other.options.std)

    def register_normalisation(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        """Register the buffers `mean` and `std`, (c,), from one number or one number per channel."""
        for name, value in (("mean", mean), ("std", std)):
            by_channel = torch.tensor(value, dtype=torch.float32).flatten().expand(self.channels)
            self.register_buffer(name, by_channel.clone())

    def check_values(self, images: Tensor) -> None:
        """Check that images are uint8, or float in [0, 1].

        The range is not checked in training on an accelerator, where reading it would synchronise host and device, nor
        in a compiled graph.

        Raises:
            OptionError: The images have another type or range.
        """
        expected = "must be uint8, or float in [0, 1]; the encoder normalises images itself"
        if images.dtype == torch.uint8:
            return
        if not images.is_floating_point():
            raise OptionError("images", images.dtype, expected)
        checks = images.device.type == "cpu" or (self.checks_values and not self.training)
        if torch.compiler.is_compiling() or not images.numel() or not checks:
            return
        low, high = (value.item() for value in images.detach().aminmax())
        if not (low >= -_BEYOND and high <= 1 + _BEYOND):
            values = "not a number" if math.isnan(low) else f"{low:.4g} to {high:.4g}"
            raise OptionError("images", values, expected)

    def normalise(self, images: Tensor) -> Tensor:
        """Subtract each channel's mean and divide by its std: (..., c, h, w), uint8 or [0, 1], -> (..., c, h, w)."""
        unit = 255.0 if images.dtype == torch.uint8 else 1.0
        mean, std = ((value * unit)[:, None, None] for value in (self.mean, self.std))
        return (images.to(mean.dtype) - mean) / std
