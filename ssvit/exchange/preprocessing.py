"""Describe the evaluation transform (`ssvit.data.augment.crop.CenterCrop`) in words and in options of timm."""

import math
from collections.abc import Sequence
from typing import Any

from ssvit.data.augment.options import CenterCrop
from ssvit.objectives.segment_options import Segment


def sentence(
    view: CenterCrop,
    limits: Sequence[Sequence[float]] | None,
    background: str | None = None,
    segmentation: Segment | None = None,
) -> str:
    """Return the description for a model card.

    Args:
        view: The evaluation transform.
        limits: Values that become 0 and 1, each one per channel; None: bytes.
        background: Colour onto which transparent pixels are composited; None: black.
        segmentation: Options of a model of the classes of pixels, of which windows cover each image.
    """
    size = "x".join(map(str, view.size))
    if view.fit == "squash":
        resized, end = f"Whole images are resized to {size} pixels, height x width (bilinear, antialiased)", "."
    elif view.fit == "pad":
        resized = f"Images are resized to fit into {size} pixels (bilinear, antialiased)"
        end = " and padded with black."
    else:
        # A shorter side that is at least the crop's longer side covers it for every aspect ratio.
        if view.resize is not None and view.resize >= max(view.size):
            target = f"{view.resize} pixels on the shorter side"
        elif view.size[0] == view.size[1]:
            target = f"{view.size[0]} pixels on the shorter side"
        else:
            target = f"at least {view.resize or 1} pixels on the shorter side and at least {size} pixels"
        resized, end = (
            f"Images are resized to {target} (bilinear, antialiased)",
            f", and the central {size} are cropped.",
        )
    unchanged = f"{resized}{end} Images of {size} pixels are not changed."
    if segmentation is not None:
        share = f"{100 * segmentation.overlap:g} %"
        windows = (
            f"Windows of {size} pixels that overlap by at least {share} cover an image; their scores are averaged."
        )
        unchanged = f"{resized}. {windows}" if segmentation.resize else windows
    if limits is None:
        return unchanged + (f" Transparent pixels are composited onto {background}." if background else "")
    low, high = (", ".join(f"{value:g}" for value in end) for end in limits)
    return f"Values from [{low}] to [{high}] (by channel) are scaled to [0, 1] and clipped. {unchanged}"


def timm(view: CenterCrop) -> tuple[dict[str, Any], list[str]]:
    """Return the options of timm's evaluation transform, and remarks where they are not exact."""
    if view.fit == "squash":
        return {"crop_pct": 1.0, "crop_mode": "squash"}, []
    if view.fit == "pad":
        return {"crop_pct": 1.0, "crop_mode": "border"}, ["timm pads images with the mean colour, ssvit with black"]
    (height, width), shorter = view.size, min(view.size)
    resize = max(shorter, view.resize or shorter)
    remarks = []
    if resize > shorter and height != width:
        remarks = [f"timm enlarges images whose aspect ratio is closer to 1 than {width}:{height} more than ssvit"]
    # timm resizes images until they cover floor(size / crop_pct).
    share = next(pct for pct in (shorter / resize, shorter / (resize + 0.5)) if math.floor(shorter / pct) == resize)
    return {"crop_pct": share, "crop_mode": "center"}, remarks
