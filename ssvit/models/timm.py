"""Use a timm model as an encoder for comparison: without its classifier, and with normalisation of images.

The complete model counts as one layer. Its feature vector is the input of timm's classifier (`forward_head`,
pre_logits).

Letters: b images, c channels, h, w pixels, y, x rows and columns of a feature map, n patches, d width.
"""

import math
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from ssvit.errors import OptionError, UserError, pair, typed
from ssvit.models import encoder_options, timm_options
from ssvit.models.encoder import Encoder

_HEAD = "ssvit's classifier"  # a parameter name that does not occur in a timm model


class Timm(Encoder):
    """Wrap a timm model as an encoder, with the options of `timm_options.Timm`.

    Attributes:
        model: The timm model.
        model_arguments: Arguments of `timm.create_model` without those of the head.

    Raises:
        OptionError: timm cannot create the model with these options.
    """

    model: Any
    model_arguments: dict[str, Any]

    def __init__(self, options: timm_options.Timm) -> None:
        super().__init__()
        self.options = options
        self.image_size = pair("image_size", options.image_size)
        self.channels, self.pooling = options.channels, options.pooling
        self.norm = nn.Identity()  # the timm model contains its last norm
        try:
            self.model = self._created()
            self.register_normalisation(options.mean, options.std)
            self.width = self._of_one_image(self.pooling).shape[1]
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            shape = "x".join(map(str, (options.channels, *self.image_size)))
            cause = f"timm cannot create it for images of {shape} and arguments={dict(options.arguments)}: {reason}"
            raise OptionError("model", options.model, cause) from None
        patterns = self.model.no_weight_decay() if hasattr(self.model, "no_weight_decay") else ()
        names = [name for name, _ in self.model.named_parameters()]
        self.undecayed = [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]

    def _created(self) -> Any:
        """Create the timm model, and set its arguments."""
        from timm import create_model

        self.model_arguments = {"in_chans": self.channels, **self.options.arguments, "img_size": list(self.image_size)}
        try:
            return create_model(self.options.model, num_classes=0, **self.model_arguments)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            del self.model_arguments["img_size"]  # such a model takes images of any size
            return create_model(self.options.model, num_classes=0, **self.model_arguments)

    def with_head(self, head: nn.Linear) -> nn.Module:
        """Return the timm model with a head for the classes of a linear layer, and the weights of both.

        Raises:
            UserError: The model has another kind of head.
        """
        from timm import create_model

        model: Any = create_model(self.options.model, num_classes=head.out_features, **self.model_arguments)
        absent = model.load_state_dict(self.model.state_dict(), strict=False).missing_keys
        classifier = model.get_classifier()
        if not isinstance(classifier, nn.Linear) or len(absent) != len(classifier.state_dict()):
            raise UserError(f"timm's {self.options.model} has no linear head")
        classifier.load_state_dict(head.state_dict())
        return model

    @torch.no_grad()
    def _of_one_image(self, pooling: str) -> Tensor:
        """Return the features of one zero image, to determine their shape, without sampling random numbers."""
        image = torch.zeros(1, self.channels, *self.image_size, device=self.mean.device)
        training = self.training
        try:
            return self.eval().pooled(next(self.layers(image)), pooling, image)
        finally:
            self.train(training)

    @property
    def patch_size(self) -> tuple[int, int]:  # type: ignore[override]  # a ViT's is among its arguments
        """Return the pixels per feature of the map, (height, width), computed from the map of one image.

        Raises:
            UserError: The model has no feature map.
        """
        _, rows, columns, _ = self._of_one_image(encoder_options.PATCHES).shape
        return self.image_size[0] // rows, self.image_size[1] // columns

    @property
    def depth(self) -> int:
        """Return 1, as the complete model counts as one layer."""
        return timm_options.Timm.depth

    def layers(self, images: Tensor) -> Iterator[Tensor]:
        """Yield timm's `forward_features`: (b, c, h, w), uint8 or [0, 1] -> (b, d, y, x), (b, y, x, d) or (b, n, d).

        Raises:
            OptionError: The images have other channels, or another type or range.
        """
        if images.shape[1] != self.channels:
            raise OptionError("images", "x".join(map(str, images.shape[1:])), f"must have {self.channels} channels")
        self.check_values(images)
        yield self.model.forward_features(self.normalise(images))

    def maps(self, images: Tensor) -> list[Tensor]:
        """Return the maps of timm's `forward_intermediates`, such as one for each stage of a ResNet: (b, y, x, d).

        Raises:
            UserError: timm does not provide them for the model.
        """
        if not hasattr(self.model, "forward_intermediates"):
            raise UserError(f"timm's {self.options.model} has no intermediate feature maps")
        maps = self.model.forward_intermediates(self.normalise(images), intermediates_only=True)
        return [of_layer.movedim(1, -1) for of_layer in maps]

    def represent(self, images: Tensor, *, depth_noise: Tensor | None = None) -> Tensor:
        """Return the input of timm's classifier, (b, d), for images (b, c, h, w), uint8 or in [0, 1].

        timm samples the random numbers of its stochastic depth itself.
        """
        (outputs,) = self.layers(images)
        return self.pooled(outputs, self.pooling, images)

    def pooled(self, outputs: Tensor, pooling: str, images: Tensor) -> Tensor:
        """Return the input of timm's classifier or the feature map.

        Args:
            outputs: Output of `layers`.
            pooling: "pooled", or "patches" for the feature map.
            images: The images that were encoded, (b, c, h, w).

        Returns:
            The input of the classifier, (b, d), or the map, (b, y, x, d).

        Raises:
            UserError: The model has no feature map.
        """
        if pooling != encoder_options.PATCHES:
            return self.model.forward_head(outputs, pre_logits=True)
        if isinstance(outputs, Tensor) and outputs.ndim == 4:
            return outputs if getattr(self.model, "output_fmt", "NCHW") == "NHWC" else outputs.movedim(1, -1)
        if isinstance(outputs, Tensor) and outputs.ndim == 3:  # some models have a list of outputs
            patches = outputs[:, getattr(self.model, "num_prefix_tokens", 0) :]
            rows = round(math.sqrt(patches.shape[1] * images.shape[2] / images.shape[3]))
            if rows and patches.shape[1] % rows == 0:
                return patches.unflatten(1, (rows, -1))
        raise UserError(f"timm's {self.options.model} has no features of patches")

    def layers_above(self, name: str) -> int:
        """Return the number of layers above a parameter, counted by timm's `group_matcher`; the head is the last."""
        return self._layers[_HEAD] - self._layers[name.removeprefix("model.")]

    @cached_property
    def _layers(self) -> dict[str, int]:
        """Return the layer of each parameter, from 0, and of the head."""
        from timm.models._manipulate import group_with_matcher  # a private function, tested with timm 1.0.31

        if not hasattr(self.model, "group_matcher"):
            expected = f"must be 1: timm does not define the layers of {self.options.model}"
            raise OptionError("recipe.layer_decay", "below 1", expected)
        named = iter([*self.model.named_parameters(), (_HEAD, None)])
        return group_with_matcher(named, self.model.group_matcher(coarse=False), reverse=True)

    def load_weights_from(self, other: Self, *, how: str = "paper") -> None:
        """Load the weights, mean and std of the same timm model with images of the same size.

        Args:
            other: Encoder with the same model.
            how: Not used, as weights are not resized.

        Raises:
            OptionError: The models or image sizes differ.
        """
        for name in ("model", "arguments", "channels"):
            value, expected = self.arguments[name], other.arguments[name]
            if value != expected:
                raise OptionError(name, value, f"must be {typed(expected)}, as in the encoder of the weights")
        super().load_weights_from(other, how=how)
