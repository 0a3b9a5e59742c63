"""Describe the evaluation transform (`ssvit.data.augment.crop.CenterCrop`) in words and in options of peers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssvit.data.augment.crop_options import CenterCrop
from ssvit.options import within


@dataclass(frozen=True)
class Preprocessing:
    """Describe an evaluation transform: resize the shorter side to `resize`, then crop the centre of `size`.

    Without `resize`, or if that would leave less than `size`, an image is resized until it just covers `size`.

    Attributes:
        size: Height and width of the crop in pixels.
        resize: Pixels of the shorter side; None: see above.
        fit: cover, or squash: the complete image is resized to `size`.
        range: Values that become 0 and 1, each one per channel; None: bytes.
    """

    size: tuple[int, int]
    resize: int | None = None
    fit: str = "cover"
    range: Sequence[Sequence[float]] | None = None

    @classmethod
    def of_checkpoint(cls, manifest: Mapping[str, Any], size: tuple[int, int]) -> "Preprocessing":
        """Return the evaluation transform in a checkpoint's manifest.

        Args:
            manifest: The manifest.
            size: Height and width of the encoder's images in pixels.

        Raises:
            OptionError: An option of the transform is invalid.
        """
        with within("view"):
            view = CenterCrop(**{**(manifest.get("view") or {}), "size": size})
        return cls(size, view.resize, view.fit, manifest.get("range"))

    @property
    def shorter_side(self) -> int | None:
        """Return the length of every image's shorter side, or None if it depends on the aspect ratio."""
        if self.fit == "squash":
            return None
        # A shorter side that is at least the crop's longer side covers it for every aspect ratio.
        if self.resize is not None and self.resize >= max(self.size):
            return self.resize
        return self.size[0] if self.size[0] == self.size[1] else None

    def sentence(self) -> str:
        """Return the description for a model card."""
        size = "x".join(map(str, self.size))
        if self.fit == "squash":
            geometry = f"Whole images are resized to {size} pixels, height x width (bilinear, antialiased)."
        else:
            target = f"{self.shorter_side} pixels on the shorter side"
            if self.shorter_side is None:
                target = f"at least {self.resize or 1} pixels on the shorter side and at least {size} pixels"
            geometry = f"Images are resized to {target} (bilinear, antialiased), and the central {size} are cropped."
        unchanged = f"{geometry} Images of {size} pixels are not changed."
        if self.range is None:
            return unchanged
        low, high = (", ".join(f"{value:g}" for value in end) for end in self.range)
        return f"Values from [{low}] to [{high}] (by channel) are scaled to [0, 1] and clipped. {unchanged}"

    def remarks(self) -> list[str]:
        """Return a remark about values that the peers' preprocessing does not scale."""
        return [] if self.range is None else ["images must be scaled to [0, 1] first, as the model card describes"]

    def timm(self) -> tuple[dict[str, Any], list[str]]:
        """Return the options of timm's evaluation transform, and remarks where they are not exact."""
        if self.fit == "squash":
            return {"crop_pct": 1.0, "crop_mode": "squash"}, []
        (height, width), shorter = self.size, min(self.size)
        resize = max(shorter, self.resize or shorter)
        remarks = []
        if resize > shorter and height != width:
            remarks = [f"timm enlarges images whose aspect ratio is closer to 1 than {width}:{height} more than ssvit"]
        # timm resizes images until they cover floor(size / crop_pct).
        share = next(pct for pct in (shorter / resize, shorter / (resize + 0.5)) if math.floor(shorter / pct) == resize)
        return {"crop_pct": share, "crop_mode": "center"}, remarks
