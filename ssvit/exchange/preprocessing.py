"""Describe the evaluation transform (`ssvit.data.augment.crop.CenterCrop`) in words and in options of peers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ssvit.data.augment.crop_options import FITS
from ssvit.options import one_of, whole


@dataclass(frozen=True)
class Preprocessing:
    """Describe an evaluation transform: resize the shorter side to `resize`, then crop the centre of `size`.

    Without `resize`, or if that would leave less than `size`, an image is resized until it just covers `size`.

    Attributes:
        size: Height and width of the crop in pixels.
        resize: Pixels of the shorter side; None: see above.
        fit: cover, or squash: the complete image is resized to `size`.
        unknown: Options that this description does not cover.
        range: Values that become 0 and 1, each one per channel; None: bytes.
    """

    size: tuple[int, int]
    resize: int | None = None
    fit: str = "cover"
    unknown: Mapping[str, object] = field(default_factory=dict)
    range: Sequence[Sequence[float]] | None = None

    @classmethod
    def of(cls, facts: Mapping[str, Any], size: tuple[int, int]) -> "Preprocessing":
        """Return the evaluation transform in a checkpoint's manifest.

        Args:
            facts: The manifest.
            size: Height and width of the encoder's images in pixels.
        """
        options = facts.get("view") or {}
        unknown = {name: value for name, value in options.items() if name not in ("size", "resize", "fit") and value}
        one_of("view.fit", options.get("fit", "cover"), FITS)
        if (resize := options.get("resize")) is not None:
            whole("view.resize", resize)
        return cls((size[0], size[1]), resize, options.get("fit", "cover"), unknown, facts.get("range"))

    @property
    def shorter_side(self) -> int | None:
        """Return the length of every image's shorter side, or None if it depends on the aspect ratio."""
        if self.fit == "squash":
            return None
        if self.resize is not None and self.resize >= max(self.size):
            return self.resize
        return self.size[0] if self.size[0] == self.size[1] else None

    def sentence(self) -> str:
        """Return the description for a model card."""
        if self.range is None:
            return self._geometry()
        least, most = (", ".join(f"{value:g}" for value in end) for end in self.range)
        values = f"Values of [{least}], of one channel after the other, become 0, and those of [{most}] become 1"
        return f"{values}; others are cut off. {self._geometry()}"

    def _geometry(self) -> str:
        size = "x".join(map(str, self.size))
        if self.fit == "squash":
            return f"Whole images are resized to {size} pixels, height x width (bilinear, antialiased)."
        if self.shorter_side is None:
            how = f"resized until they just cover {size} pixels"
            if self.resize is not None:
                how = f"resized to {self.resize} pixels on the shorter side, or {how} if that is less"
        else:
            how = f"resized to {self.shorter_side} pixels on the shorter side"
        return f"Images are {how} (bilinear, antialiased), and the middle {size} is cut out (height x width)."

    def remarks(self) -> list[str]:
        """Return remarks that neither the description nor the peers' options contain."""
        if not self.unknown:
            return [] if self.range is None else ["give images whose values are in [0, 1] already, as the card says"]
        options = ", ".join(f"{name}={value}" for name, value in self.unknown.items())
        left_out = f"the evaluation transform has options that this export's preprocessing does not follow: {options}"
        return [left_out, *replace(self, unknown={}).remarks()]

    def _whole_images(self) -> list[str]:
        """Return a remark if a peer would resize images of the correct size, which the evaluation does not change."""
        if self.shorter_side in (None, min(self.size)):
            return []
        return [f"give images of {'x'.join(map(str, self.size))} without preprocessing: it would enlarge and crop them"]

    def huggingface(self) -> tuple[dict[str, Any], list[str]]:
        """Return the options of a Hugging Face image processor, and remarks where they are not exact."""
        height, width = self.size
        crop = size = {"height": height, "width": width}
        remarks = []
        if self.shorter_side is not None:
            size = {"shortest_edge": self.shorter_side}
            rounded = "the image processor rounds the crop's place down, which can shift it by one pixel"
            remarks = [*self._whole_images(), rounded]
        elif self.fit != "squash":  # the processor can crop only after resizing all shorter sides to one length
            ratio = f"whose aspect ratio is not {width}:{height}"
            remarks = [f"the image processor squashes images {ratio}, which ssvit crops"]
        found = {"do_resize": True, "size": size, "do_center_crop": True, "crop_size": crop}
        return found | ({} if self.range is None else {"do_rescale": False}), remarks

    def timm(self) -> tuple[dict[str, Any], list[str]]:
        """Return the options of timm's evaluation transform, and remarks where they are not exact."""
        if self.fit == "squash":
            return {"crop_pct": 1.0, "crop_mode": "squash"}, []
        least, remarks = min(self.size), self._whole_images()
        resize = max(least, self.resize or least)
        if resize > least and self.size[0] != self.size[1]:
            height, width = self.size
            remarks = [f"timm enlarges images whose aspect ratio is nearer to 1 than {width}:{height} more than ssvit"]
        # timm resizes images until they cover floor(size / crop_pct).
        share = next(pct for pct in (least / resize, least / (resize + 0.5)) if math.floor(least / pct) == resize)
        return {"crop_pct": share, "crop_mode": "center"}, remarks
