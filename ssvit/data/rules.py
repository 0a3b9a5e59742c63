"""What must hold between the options of a data set or a transform, as far as names and numbers tell: no torch.

Asked by their constructors and builders, and by the tools before the slow imports.
"""

import os
from collections.abc import Mapping
from typing import Any

from ssvit.data import folder
from ssvit.options import OptionError, flag, number, one_of, pair, whole

FITS = ("cover", "squash")
PUBLIC_SETS = ("cifar10", "cifar100", "stl10", "flowers102", "oxford_pets")


def crop(
    *,
    size: Any,
    scale: Any = (0.08, 1.0),
    ratio: Any = (0.75, 4 / 3),
    flip: Any = 0.5,
    padding: Any = 0,
    resize: Any = None,
    fit: Any = "cover",
) -> None:
    """OptionError unless these can be the arguments of a transform in `ssvit.data.augment.crop`."""
    pair("size", size)
    for name, value, high in (("scale", scale, 1), ("ratio", ratio, float("inf"))):
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise OptionError(name, value, "must be two numbers, [least, most]")
        for part in value:
            number(name, part, 0, high, above=True)
        if value[0] > value[1]:
            raise OptionError(name, value, "must be [least, most], and the first is larger")
    number("flip", flip, 0, 1)
    whole("padding", padding, at_least=0)
    if resize is not None:
        whole("resize", resize)
    one_of("fit", fit, FITS)
    if fit == "squash" and resize is not None:
        raise OptionError("resize", resize, "must be null with fit=squash, which resizes the whole image to its size")


def resize_crop(*, size: Any, resize: Any, flip: Any = 0.5) -> None:
    """OptionError unless these can be the arguments of `ssvit.data.augment.crop.ResizeCrop`."""
    crop(size=size, flip=flip)
    whole("resize", resize, max(pair("size", size)))


def verified(verify: Any) -> None:
    """OptionError unless a fingerprint can cover this."""
    one_of("verify", verify, ("size", "content"))


def images_in_folder(
    *,
    root: Any,
    train: Any = folder.AUTO,
    validation: Any = folder.AUTO,
    test: Any = folder.AUTO,
    held_out: Any = 0.1,
    seed: Any = 0,
    verify: Any = "size",
    masks: Any = None,
) -> None:
    """OptionError unless a folder holds images, also in the subfolders named, and the fraction to hold out is one."""
    folder.check(root)
    folder.splits(root, train=train, validation=validation, test=test)
    number("held_out", held_out, 0, 0.9, above=True)
    whole("seed", seed, at_least=0)
    verified(verify)
    if masks is not None and not os.path.isdir(str(masks)):
        raise OptionError("masks", masks, "no such folder; null for none")


def imagenet(*, root: Any, verify: Any = "size") -> None:
    """OptionError unless a folder holds images, and ImageNet's train/ and val/."""
    folder.check(root)
    verified(verify)
    for name in ("train", "val"):
        if not os.path.isdir(os.path.join(root, name)):
            raise OptionError("root", root, f"holds no folder {name}: ImageNet's usual layout is train/ and val/")


def public_set(*, name: Any, root: Any, download: Any, split: Any) -> None:
    """OptionError unless a public set is known, and is there or may be fetched."""
    one_of("name", name, PUBLIC_SETS)
    flag("download", download)
    if split is not None and (name, split) != ("stl10", "unlabeled"):
        raise OptionError("split", split, "must be left out, or unlabeled for stl10")
    if not download and not os.path.isdir(str(root)):
        raise OptionError("root", root, f"no such folder; give the one that holds {name}, or data.download=true")


def drawn_set(*, size: Any, images: Any, held_out_images: Any, seed: Any) -> None:
    """OptionError unless these can be the arguments of `ssvit.data.datasets.synthetic`."""
    pair("size", size)
    for name, value in (("images", images), ("held_out_images", held_out_images)):
        whole(name, value)
    whole("seed", seed, at_least=0)


def subset(*, part: Any, images: Any, seed: Any = 0) -> None:
    """OptionError unless these can be the arguments of `ssvit.data.source.subset`."""
    if not isinstance(part, list | tuple) or len(part) != 2:
        raise OptionError("part", part, "must be two numbers, [from, to]")
    for bound in part:
        number("part", bound, 0, 1)
    if part[0] >= part[1]:
        raise OptionError("part", part, "must be [from, to], and the first is not less than the second")
    if images is not None:
        whole("images", images)
    whole("seed", seed, at_least=0)


VALIDATION = "validation"


def development(value: Any) -> None:
    """OptionError unless this can be what is measured on in place of the test images: None for the test images."""
    if value not in (None, VALIDATION):
        try:
            number("development", value, 0, 0.9, above=True)
        except OptionError as error:
            raise OptionError("development", value, f"{error.right}, or {VALIDATION}") from None


def batch_fits(batch_size: int, source: Mapping[str, Any], images: int | None) -> None:
    """OptionError if one batch is known to hold more images than there are, as far as names and numbers tell, or than
    the `images` that are taken of them.
    """
    known = source.get("images")
    if source.get("_target_") == "ssvit.data.datasets.folder":
        asked = {part: source[part] for part in folder.KNOWN if part in source}
        known = folder.count(folder.splits(source["root"], **asked).train, at_most=batch_size)
    most = min((count for count in (known, images) if count is not None), default=batch_size)
    if batch_size > most:
        raise OptionError("batch_size", batch_size, f"must be no more than the {most} images to train on")
