"""ssvit's objectives for the measured step, with the values of configs/objective, and their batches.

Letters: b images, v views, c channels, h, w pixels.
"""

from collections.abc import Callable
from typing import Any, cast

import torch

from ssvit.benchmark.data import scenes
from ssvit.benchmark.step_options import Size
from ssvit.data.batch import Batch
from ssvit.models.vit import ViT
from ssvit.objectives.base import Objective
from ssvit.objectives.dino import Dino
from ssvit.objectives.ibot import IBot
from ssvit.objectives.latent import Latent
from ssvit.objectives.mae import MAE
from ssvit.objectives.masked_patch import MaskedPatch
from ssvit.objectives.masking import Masking
from ssvit.objectives.simclr import SimCLR
from ssvit.objectives.targets import MeanColor, Pixels, Target

MASKED = 0.75  # of a masked autoencoder's patches
SIMMIM: dict[str, Any] = {"corrupted": 0.6, "mask": 1.0, "replace": 0.0, "keep": 0.0, "unit": 2}
DINO = {"prototypes": 1024, "hidden": 512, "bottleneck": 128}
LATENT: dict[str, Any] = {"masks": 4, "decoder": {"depth": 3, "width": 128, "kernel": 3, "groups": 16}}
SIMCLR = {"hidden": 512, "projection": 128}
TEMPERATURE = 0.2  # SimCLR's


def ours(size: Size, objective: str) -> Objective:
    """The objective that is measured."""
    encoder = ViT(
        image_size=size.image_size,
        patch_size=(size.patch_size, size.patch_size),
        width=size.width,
        depth=size.depth,
        heads=size.heads,
        stem=None if size.stem is None else {"layers": size.stem, "width": 64},
        pooling="patch_mean" if objective in ("simclr", "latent") else "class_token",
    )
    return _OURS[objective](encoder, size)


def batch_of(size: Size, objective: str, images: int) -> Batch:
    """So many images, uint8, with the views of the objective: SimCLR's are global, DINO's and iBOT's local too."""
    if objective not in ("dino", "ibot", "simclr"):
        return Batch.of(scenes(images, (size.image_size, size.image_size), seed=0))
    groups = {"global": (size.image_size, 2)} | ({} if objective == "simclr" else {"local": size.local})
    views = {
        name: scenes(images * count, (side, side), seed=seed).unflatten(0, (images, count))
        for seed, (name, (side, count)) in enumerate(groups.items())
    }
    return Batch(views, None, torch.arange(images))


def masked_patch(encoder: ViT, size: Size) -> MaskedPatch:
    """As configs/objective/masked_patch.yaml has it."""
    return MaskedPatch(
        encoder=encoder, masking=Masking(), target=MeanColor(patch_size=(size.patch_size, size.patch_size))
    )


def decoder(size: Size) -> dict[str, int]:
    """The options of a masked autoencoder's decoder."""
    return dict(zip(("depth", "width", "heads"), size.decoder, strict=True))


_OURS: dict[str, Callable[[ViT, Size], Objective]] = {
    "masked_patch": masked_patch,
    "masked_patch_decoder": lambda encoder, size: MaskedPatch(
        encoder=encoder,
        masking=Masking(corrupted=MASKED, mask=1.0, replace=0.0, keep=0.0),
        target=MeanColor(patch_size=(size.patch_size, size.patch_size)),
        decoder=decoder(size),
    ),
    "simmim": lambda encoder, size: MaskedPatch(
        encoder=encoder,
        masking=Masking(**SIMMIM),
        target=cast(Target, Pixels(patch_size=(size.patch_size, size.patch_size), loss="l1")),
    ),
    "mae": lambda encoder, size: MAE(encoder=encoder, masked=MASKED, decoder=decoder(size)),
    "latent": lambda encoder, size: Latent(encoder=encoder, layers=min(4, size.depth), **LATENT),
    "dino": lambda encoder, _: Dino(encoder=encoder, **DINO),
    "ibot": lambda encoder, _: IBot(encoder=encoder, **DINO),
    "simclr": lambda encoder, _: SimCLR(encoder=encoder, temperature=TEMPERATURE, **SIMCLR),
}
