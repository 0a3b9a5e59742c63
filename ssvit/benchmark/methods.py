"""ssvit's objectives for the measured step, with the values of configs/objective, and their batches.

Letters: b images, v views, c channels, h, w pixels.
"""

from collections.abc import Callable
from typing import Any, cast

import torch

from ssvit.benchmark.data import scenes
from ssvit.benchmark.step_options import Size
from ssvit.data.batch import Batch
from ssvit.models import vit_options
from ssvit.models.decoder_options import Decoder
from ssvit.models.vit import ViT
from ssvit.models.vit_options import Stem
from ssvit.objectives import (
    dino_options,
    ibot_options,
    latent_options,
    mae_options,
    masked_patch_options,
    simclr_options,
)
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
DINO: dict[str, Any] = {"prototypes": 1024, "hidden": 512, "bottleneck": 128}
LATENT: dict[str, Any] = {"masks": 4, "decoder": {"depth": 3, "width": 128, "kernel": 3, "groups": 16}}
SIMCLR = {"hidden": 512, "projection": 128}
TEMPERATURE = 0.2  # SimCLR's


def ours(size: Size, objective: str) -> Objective:
    """The objective that is measured."""
    encoder = ViT(
        vit_options.ViT(
            image_size=size.image_size,
            patch_size=(size.patch_size, size.patch_size),
            width=size.width,
            depth=size.depth,
            heads=size.heads,
            stem=None if size.stem is None else Stem(layers=size.stem, width=64),
            pooling="patch_mean" if objective in ("simclr", "latent") else "class_token",
        )
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
        masked_patch_options.MaskedPatch(masking=Masking()),
        encoder=encoder,
        target=MeanColor(patch_size=(size.patch_size, size.patch_size)),
    )


def decoder(size: Size) -> Decoder:
    """The options of a masked autoencoder's decoder."""
    depth, width, heads = size.decoder
    return Decoder(depth=depth, width=width, heads=heads)


_OURS: dict[str, Callable[[ViT, Size], Objective]] = {
    "masked_patch": masked_patch,
    "masked_patch_decoder": lambda encoder, size: MaskedPatch(
        masked_patch_options.MaskedPatch(
            masking=Masking(corrupted=MASKED, mask=1.0, replace=0.0, keep=0.0), decoder=decoder(size)
        ),
        encoder=encoder,
        target=MeanColor(patch_size=(size.patch_size, size.patch_size)),
    ),
    "simmim": lambda encoder, size: MaskedPatch(
        masked_patch_options.MaskedPatch(masking=Masking(**SIMMIM)),
        encoder=encoder,
        target=cast(Target, Pixels(patch_size=(size.patch_size, size.patch_size), loss="l1")),
    ),
    "mae": lambda encoder, size: MAE(mae_options.MAE(masked=MASKED, decoder=decoder(size)), encoder=encoder),
    "latent": lambda encoder, size: Latent(latent_options.Latent(layers=min(4, size.depth), **LATENT), encoder=encoder),
    "dino": lambda encoder, _: Dino(dino_options.Dino(**DINO), encoder=encoder),
    "ibot": lambda encoder, _: IBot(ibot_options.IBot(**DINO), encoder=encoder),
    "simclr": lambda encoder, _: SimCLR(simclr_options.SimCLR(temperature=TEMPERATURE, **SIMCLR), encoder=encoder),
}
