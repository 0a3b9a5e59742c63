"""List the variants of parts: choices that are a part with other values of some options. No torch.

The sizes of encoders are here (`encoder=b`), the data sets (`data=cifar10`), and the usual settings of augmentations,
probes and targets. `ssvit.choices` lists the parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ssvit.errors import MISSING


@dataclass(frozen=True)
class Variant:
    """A part with other values of some options.

    Attributes:
        part: Name of the part in the group of the variant.
        meaning: Description for `--help`; "": that of the part.
        options: Values that differ from the defaults of the part; ??? for the value of another option.
        also: Choices that the variant makes in other groups, as in the list of defaults of a YAML file.
    """

    part: str
    meaning: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    also: Mapping[str, str] = field(default_factory=dict)


_NORMALIZED = {"mean": MISSING, "std": MISSING}  # encoders for images that are normalised as in the data set


def _vit(meaning: str, patch_size: int, width: int, depth: int, heads: int, **options: Any) -> Variant:
    """Return a Vision Transformer."""
    size = {"patch_size": patch_size, "width": width, "depth": depth, "heads": heads}
    return Variant("vit", meaning, {**size, **_NORMALIZED, **options})


def _stem(*layers: int) -> dict[str, Any]:
    """Return the ResNet stem of a hybrid; without layers, it is the root alone, whose feature map has a stride of 4."""
    return {"layers": [*layers], "width": 64}


# Sizes of encoders: patch size, width, depth, heads. ViT-B, -L and -H are those of the paper (Table 1), and so are the
# hybrids R50+ViT (section 3.1); in those of patch size 16, stage 4 is moved into stage 3. ViT-Ti and -S are those of
# DeiT, ViT-g that of Zhai et al. 2022 (Table 2), and the other hybrids those of the authors' code. Parameters are in
# millions, without a head, for images of 224 px, or of 32 px from `mini` on. `small` and `mini` are for small images,
# on which sines and cosines train faster than the paper's learned positions; the settings of `mini`, the encoder of the
# first run, were chosen for a few minutes of training on the rendered shapes (docs/optimizers.md).
_ENCODERS = {
    "ti": _vit("ViT-Ti: 5.52 million parameters", 16, 192, 12, 3),
    "s": _vit("ViT-S: 21.67 million parameters", 16, 384, 12, 6),
    "b": _vit("ViT-B: 85.80 million parameters", 16, 768, 12, 12),
    "l": _vit("ViT-L: 303.30 million parameters", 16, 1024, 24, 16),
    "h": _vit("ViT-H: 630.76 million parameters", 14, 1280, 32, 16),
    "g": _vit("ViT-g: 1,011.20 million parameters", 14, 1408, 40, 16, mlp_width=6144),
    "r_vit_ti16": _vit("R+ViT-Ti/16: 6.14 million parameters", 32, 192, 12, 3, stem=_stem()),
    "r26_vit_s32": _vit("R26+ViT-S/32: 36.05 million parameters", 32, 384, 12, 6, stem=_stem(2, 2, 2, 2)),
    "r26_vit_b32": _vit("R26+ViT-B/32: 100.61 million parameters", 32, 768, 12, 12, stem=_stem(2, 2, 2, 2)),
    "r50_vit_b16": _vit("R50+ViT-B/16: 97.89 million parameters", 16, 768, 12, 12, stem=_stem(3, 4, 9)),
    "r50_vit_b32": _vit("R50+ViT-B/32: 110.18 million parameters", 32, 768, 12, 12, stem=_stem(3, 4, 6, 3)),
    "r50_vit_l16": _vit("R50+ViT-L/16: 315.46 million parameters", 16, 1024, 24, 16, stem=_stem(3, 4, 9)),
    "r50_vit_l32": _vit("R50+ViT-L/32: 327.97 million parameters", 32, 1024, 24, 16, stem=_stem(3, 4, 6, 3)),
    "mini": _vit("For a first run: 0.60 million parameters", 4, 128, 3, 2, positions="rotary"),
    "small": _vit("For small images: 2.68 million parameters", 4, 192, 6, 3, positions="sine_cosine_2d"),
    "small_hybrid": _vit(
        "Hybrid of small: 2.73 million parameters", 8, 192, 6, 3, positions="sine_cosine_2d", stem=_stem()
    ),
    "vit": Variant("vit", "A ViT whose width, depth and heads must be set", _NORMALIZED),
    "timm": Variant("timm", options=_NORMALIZED),
}  # fmt: skip


def _images(part: str, meaning: str = "", augment: str = "inception_crop", **options: Any) -> Variant:
    """Return a data set with the augmentation of its training images."""
    return Variant(part, meaning, options, {"/augment@augment": augment})


_DATA = {
    "cifar10": _images(
        "torchvision", "CIFAR-10: 60,000 images of 32x32 in 10 classes", "shift_crop",
        name="cifar10", image_size=32, mean=[0.4914, 0.4822, 0.4465], std=[0.2470, 0.2435, 0.2616],
    ),
    "cifar100": _images(
        "torchvision", "CIFAR-100: 60,000 images of 32x32 in 100 classes", "shift_crop",
        name="cifar100", image_size=32, mean=[0.5071, 0.4865, 0.4409], std=[0.2673, 0.2564, 0.2762],
    ),
    "csv": _images("csv", "Image files that a table lists, with their labels and splits"),
    "flowers102": _images("torchvision", "Oxford Flowers-102", name="flowers102", view={"resize": 256}),
    "folder": _images(
        "folder", "A folder of images: flat, or with a subfolder for each class, or with train/, val/ and test/"
    ),
    "huggingface": _images("huggingface", "A data set of the library datasets (Hugging Face)"),
    "imagenet": _images(
        "folder", "ImageNet: train/ and val/ with a folder for each class", "inception_crop_imagenet",
        train="train", validation="val", test=None, view={"resize": 256},
    ),
    "oxford_pets": _images("torchvision", "Oxford-IIIT Pets: 37 breeds", name="oxford_pets", view={"resize": 256}),
    # By default, folders have a permutation, which is a table of all images.
    "shards": _images("shards", order="bijection"),
    "shapes": _images("shapes", augment="inception_crop_small"),
    "stl10": _images(
        "torchvision", "STL-10: 100,000 unlabelled images of 96x96 and 13,000 labelled ones in 10 classes",
        name="stl10", split="unlabeled", image_size=96, mean=[0.4467, 0.4398, 0.4066], std=[0.2603, 0.2566, 0.2713],
    ),
    "voc": _images("voc", "Pascal VOC's images with segmentation masks"),
    # 384 px as in the paper.
    "vtab": _images(
        "vtab", "A task of VTAB-1k as lists of image files, with the 800/200 split", "resize_crop",
        image_size=384, view={"fit": "squash"},
    ),
}  # fmt: skip

# SimCLR's two views for ImageNet (google-research/simclr: data_util.py). For CIFAR-10, the authors halve the changes of
# colour and leave out the blur.
_TWO_CROPS = {"scale": [0.08, 1.0], "local_views": 0, "blur": [0.5, 0.5, 0.0], "solarize": [0.0, 0.0, 0.0]}
_SMALL_BLUR = [0.1, 0.5]  # in pixels; relative to images of about 32 pixels, about as the default for large images
_AUGMENT = {
    # Turns helped SimCLR on cells and tissue (Nwabufo et al. 2024, arXiv 2402.14566); rotation=180 takes any angle.
    "aerial": Variant(
        "inception_crop", "A crop, flips and turns, for images without an upper side, as of satellites and microscopes",
        {"vertical_flip": 0.5, "quarter_turns": True},
    ),
    "diet": Variant(
        "inception_crop", "DIET's augmentation (Balestriero 2023) without random erasing, for images of any size",
        {"scale": [0.08, 1.0], "jitter": 0.3, "saturation": 0.4, "hue": 0.2, "grayscale": 0.2, "blur": 0.2},
    ),
    # The experiments have the authors' 0.05 of the area.
    "inception_crop_imagenet": Variant("inception_crop", "As is usual for ImageNet", {"scale": [0.08, 1.0]}),
    "inception_crop_small": Variant("inception_crop", "For images of about 32 pixels", {"scale": [0.4, 1.0]}),
    "multi_crop_small": Variant(
        "multi_crop", "multi_crop for images of about 32 pixels",
        {"local_size": 16, "local_scale": [0.1, 0.4], "local_views": 4, "sigma": _SMALL_BLUR},
    ),
    # The paper has two operations of magnitude 9 for ResNet-50 on ImageNet, and so have DeiT and MAE in fine-tuning.
    "randaugment": Variant(
        "inception_crop", "A crop and RandAugment (Cubuk et al. 2020), usual for supervised training",
        {"scale": [0.08, 1.0], "randaugment": 2},
    ),
    "two_crops": Variant(
        "multi_crop", "SimCLR's two views of an image, as for ImageNet",
        {**_TWO_CROPS, "brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2},
    ),
    "two_crops_small": Variant(
        "multi_crop", "SimCLR's two views for images of about 32 pixels",
        {**_TWO_CROPS, "local_size": MISSING, "saturation": 0.4, "blur": [0.0, 0.0, 0.0], "sigma": _SMALL_BLUR},
    ),
}  # fmt: skip

_PROBES = {
    "few_shot": Variant(
        "ridge", "The paper's few-shot protocol: ridge regression on 5 images of each class, the mean of three samples",
        {"shots": 5},
    ),
    "few_shot_big_vision": Variant(
        "ridge", "The few-shot protocol of google-research/big_vision (evaluators/fewshot_lsr.py): one fixed penalty",
        {"shots": [1, 5, 10, 25], "l2": 1024.0},
    ),
    # A few features of masked models otherwise dominate the cosine similarity.
    "knn_standardized": Variant("knn", "k-NN on standardised features", {"standardize": True}),
}  # fmt: skip

_TARGETS = {
    "color_grid": Variant(
        "mean_color", "The mean colours of a grid of 4x4 cells: the paper's 4x4 downsized patch (Appendix B.1.2)",
        {"grid": 4},
    ),
}  # fmt: skip

VARIANTS = {"augment": _AUGMENT, "data": _DATA, "encoder": _ENCODERS, "probe": _PROBES, "target": _TARGETS}
