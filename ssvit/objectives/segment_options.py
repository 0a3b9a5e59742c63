"""Define the options of semantic segmentation. No torch."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from ssvit.config.declaration import ONE_OR_SEVERAL, Count, Distinct, Expect, NotNegative, Tree
from ssvit.data.sources.base_options import NO_MASKS
from ssvit.data.sources.decode_options import MaskFormat
from ssvit.errors import OptionError, RootOptionError
from ssvit.models.encoder_options import Normalized
from ssvit.models.vit_options import ViT
from ssvit.objectives.base_options import FineTuned

_MAPS = 4  # layers of the head `maps` by default


class Segment(FineTuned):
    """Train a model that predicts the class of each pixel."""

    sets: ClassVar = {"evaluators": {"test": {"_part_": "evaluator/segmentation"}}}
    needs_masks: ClassVar[bool] = True

    head: Literal["linear", "maps"] = "linear"
    """linear: a linear layer on the features of each patch; maps: convolutions on the feature maps of several layers,
    at twice the resolution of the patches."""
    layers: (
        Annotated[tuple[Count, ...], *ONE_OR_SEVERAL, Distinct, Expect("a layer's number from 1, or a list of them")]
        | None
    ) = None
    """Layers of the encoder whose patch features the head receives. None: the last one for linear, four evenly spaced
    ones for maps."""
    class_weights: Literal["balanced"] | Sequence[NotNegative] | None = None
    """Factor of the loss of a pixel by its class: a number for each class; balanced: labelled pixels / (classes *
    pixels of the class), counted over the training masks. None: no factors."""
    resize: bool = True
    """Whether images are resized as data.view does, without its crop, before windows of the encoder's image size cover
    them; otherwise, windows cover images in their own resolution."""
    overlap: Annotated[float, Ge(0), Le(0.9)] = 0.25
    """Minimum share of a window's side that adjacent windows have in common. Scores are averaged there."""

    def maps(self, depth: int) -> tuple[int, ...]:
        """Return the layers that the head receives, for an encoder of `depth` layers."""
        if self.layers is not None:
            return self.layers
        count = 1 if self.head == "linear" else min(_MAPS, depth)
        return tuple(depth * part // count for part in range(1, count + 1))

    def check_consistency(self) -> None:
        """Check also the number of class weights."""
        super().check_consistency()
        weights = self.class_weights
        if self.classes and isinstance(weights, list | tuple) and len(weights) != len(self.classes):
            raise OptionError("class_weights", weights, f"must have a number for each of {len(self.classes)} classes")

    def check_encoder(self, encoder: Normalized) -> None:
        """Check also that the encoder has the layers that the head receives."""
        super().check_encoder(encoder)
        if isinstance(encoder, ViT) and self.layers is not None and max(self.layers) > encoder.depth:
            raise OptionError("layers", self.layers, f"must be at most {encoder.depth}, the layers of the encoder")
        if isinstance(encoder, ViT) and isinstance(self.trained, int):
            first = encoder.depth - self.trained + 1
            if max(self.maps(encoder.depth)) < first:
                raise OptionError("layers", self.layers, f"must include a trained layer, from {first} on")

    def check(self, tree: Tree) -> None:
        """Check also that the images have masks of known classes."""
        super().check(tree)
        if not isinstance(tree.data, MaskFormat):
            return
        if tree.data.mask_classes is None:
            expected = "must list the classes of the masks: names, {name: value or [r, g, b]}, or their number"
            raise RootOptionError("data.mask_classes", None, expected)
        if not tree.data.masked:
            raise RootOptionError("data.masks", None, f"the data {NO_MASKS}")
