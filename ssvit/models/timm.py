"""A model of timm as an encoder, to compare with: its classifier is taken off, and it normalises its images itself.

It has one layer, all of the model, and one feature vector: what timm's classifier takes (`forward_head`, pre_logits).

Letters: b images, c channels, h, w pixels, y, x rows and columns of a feature map, n patches, d width.
"""

import math
import traceback
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ssvit.models import encoder_options, timm_options
from ssvit.models.encoder import Encoder
from ssvit.options import OptionError, UserError, pair, typed

_HEAD = "ssvit's classifier"  # a parameter's name that no layer of a model has


class Timm(Encoder):
    """The options are those of `timm_options.Timm`. OptionError if timm refuses them."""

    def __init__(self, options: timm_options.Timm) -> None:
        super().__init__()
        self.options = options
        self.image_size = pair("image_size", options.image_size)
        self.channels, self.pooling = options.channels, options.pooling
        self.norm = nn.Identity()  # the model's own stands in it
        try:
            self.model = self._created()
            self.register_normalisation(options.mean, options.std)
            self.width = self._of_one_image(self.pooling).shape[1]
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200] or _failed_statement(error)
            given = "x".join(map(str, (options.channels, *self.image_size)))
            right = f"timm refuses it for images of {given} and arguments={dict(options.arguments)}: {reason}"
            raise OptionError("model", options.model, right) from None
        patterns = self.model.no_weight_decay() if hasattr(self.model, "no_weight_decay") else ()
        names = [name for name, _ in self.model.named_parameters()]
        self.undecayed = [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]

    def _created(self) -> Any:
        from timm import create_model

        given = {"num_classes": 0, "in_chans": self.channels, **self.options.arguments}
        try:
            return create_model(self.options.model, pretrained=False, img_size=self.image_size, **given)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            return create_model(self.options.model, pretrained=False, **given)  # takes images of any size

    @torch.no_grad()
    def _of_one_image(self, pooling: str) -> Tensor:
        """Its features, to know their shape; no random number is drawn."""
        image = torch.zeros(1, self.channels, *self.image_size, device=self.mean.device)
        training = self.training
        try:
            return self.eval().pooled(next(self.layers(image)), pooling, image)
        finally:
            self.train(training)

    @property
    def patch_size(self) -> tuple[int, int]:  # type: ignore[override]  # a ViT's is among its arguments
        """Pixels of an image, (height, width), for each feature of its map. UserError if the model has none."""
        _, rows, columns, _ = self._of_one_image(encoder_options.PATCHES).shape
        return self.image_size[0] // rows, self.image_size[1] // columns

    @property
    def depth(self) -> int:
        """One."""
        return timm_options.Timm.depth

    def layers(self, images: Tensor) -> Iterator[Tensor]:
        """timm's `forward_features`, (b, c, h, w), uint8 or in [0, 1] -> (b, d, y, x), (b, y, x, d) or (b, n, d)."""
        if images.shape[1] != self.channels:
            raise OptionError("images", "x".join(map(str, images.shape[1:])), f"must have {self.channels} channels")
        self.check_values(images)
        yield self.model.forward_features(self.normalise(images))

    def represent(self, images: Tensor, *, depth_noise: Tensor | None = None) -> Tensor:
        """What timm's classifier takes, (b, c, h, w), uint8 or in [0, 1] -> (b, d); timm samples its random numbers."""
        (outputs,) = self.layers(images)
        return self.pooled(outputs, self.pooling, images)

    def pooled(self, outputs: Tensor, pooling: str, images: Tensor) -> Tensor:
        """What timm's classifier takes, (b, d), or for pooling=patches the map, (b, y, x, d)."""
        if pooling != encoder_options.PATCHES:
            return self.model.forward_head(outputs, pre_logits=True)
        if outputs.ndim == 4:
            return outputs if getattr(self.model, "output_fmt", "NCHW") == "NHWC" else outputs.movedim(1, -1)
        patches = outputs[:, getattr(self.model, "num_prefix_tokens", 0) :]
        rows = round(math.sqrt(patches.shape[1] * images.shape[2] / images.shape[3])) if patches.ndim == 3 else 0
        if not rows or patches.shape[1] % rows:
            raise UserError(f"timm's {self.options.model} has no features of patches")
        return patches.unflatten(1, (rows, -1))

    def layers_above(self, name: str) -> int:
        """As timm counts layers (`group_matcher`); a head is one, alone or with the last norm."""
        return self._layers[_HEAD] - self._layers[name.removeprefix("model.")]

    @cached_property
    def _layers(self) -> dict[str, int]:
        """The number of each parameter's layer, from 0, and the head's."""
        from timm.models._manipulate import group_with_matcher  # private; as in timm 1.0.31

        if not hasattr(self.model, "group_matcher"):
            model = self.options.model
            right = f"must be 1: timm does not tell the layers of {model}"
            raise OptionError("recipe.layer_decay", "below 1", right)
        named = iter([*self.model.named_parameters(), (_HEAD, None)])
        return group_with_matcher(named, self.model.group_matcher(coarse=False), reverse=True)

    def take(self, other: Self, *, how: str = "paper") -> None:
        """Take the weights, mean and std. OptionError unless it is the same model, and for images of this size."""
        own, their = self.arguments, other.arguments
        for name in ("model", "arguments", "channels"):
            if own[name] != their[name]:
                raise OptionError(name, own[name], f"must be {typed(their[name])}, as in the other encoder")
        super().take(other, how=how)


def _failed_statement(error: Exception) -> str:
    """Return the last statement of timm on the way to an error without a text, with its file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((one for one in reversed(frames) if "timm" in Path(one.filename).parts), frames[-1])
    return f"{Path(frame.filename).name}, line {frame.lineno}: {frame.line}"
