"""Small models of ours whose every weight counts, and their exports."""

import torch

from ssvit.exchange.export import export
from ssvit.exchange.export_options import Export
from ssvit.models import vit_options
from ssvit.models.vit import ViT
from ssvit.objectives import classify_options
from ssvit.objectives.classify import Classify

LIMIT = 1e-5
SHAPE = {
    "image_size": [32, 48],
    "patch_size": 8,
    "width": 48,
    "depth": 2,
    "heads": 4,
    "mlp_width": 80,
    "mean": [0.4, 0.5, 0.6],
    "std": 0.25,
}
CLASSES = ("cat", "dog", "emu")


def encoder(**changes):
    torch.manual_seed(0)
    made = ViT(vit_options.ViT(**{**SHAPE, **changes}))
    with torch.no_grad():
        for weight in made.parameters():  # none of them zero, so that what is left out shows
            weight += 0.05 * torch.randn_like(weight)
    return made.eval()


def classifier(**changes):
    made = Classify(classify_options.Classify(classes=CLASSES), encoder=encoder(**changes))
    for weight in (*made.head.parameters(), *(made.distilled_head.parameters() if made.distilled_head else ())):
        torch.nn.init.normal_(weight, std=0.1)
    return made.eval()


def written(model, folder, format, *, any_size=None, facts=None, **changes):
    """The folder of an export, in `folder`; any_size: how positions are resized in a program, None for one size."""
    options = Export(format=format, any_size=any_size is not None, resize=any_size or "paper", **changes)
    said = export(model, folder / format, options, facts=facts or {"step": 3, "encoder": {}}, run=folder)
    return folder / format, said


def images(size=(32, 48), count=2):
    return torch.rand(count, 3, *size, generator=torch.Generator().manual_seed(1))
