"""Small models of ssvit without zero weights, and their exports."""

import torch

from ssvit.exchange.export import export
from ssvit.exchange.options import Export
from ssvit.models.vit_options import ViT
from ssvit.objectives import classify_options
from ssvit.objectives.classify import Classify

LIMIT = 1e-5
SHAPE = {
    "image_size": [32, 48], "patch_size": 8, "width": 48, "depth": 2, "heads": 4, "mlp_width": 80,
    "mean": [0.4, 0.5, 0.6], "std": 0.25,
}  # fmt: skip
CLASSES = ("cat", "dog", "caf\udce9")  # the last one is not UTF-8


def encoder(**changes):
    torch.manual_seed(0)
    model = ViT(**{**SHAPE, **changes}).build()
    with torch.no_grad():
        for weight in model.parameters():  # none is zero, so that a weight that is lost changes the outputs
            weight += 0.05 * torch.randn_like(weight)
    return model.eval()


def classifier(**changes):
    model = Classify(classify_options.Classify(classes=CLASSES), encoder=encoder(**changes))
    for weight in (*model.head.parameters(), *(model.distilled_head.parameters() if model.distilled_head else ())):
        torch.nn.init.normal_(weight, std=0.1)
    return model.eval()


def written(model, folder, format, *, any_size=None, manifest=None, **changes):
    """The folder of an export, in `folder`; any_size: how positions are resized in a program, None for one size."""
    options = Export(format=format, any_size=any_size is not None, resize=any_size or "paper", **changes)
    remarks = export(model, folder / format, options, manifest=manifest or {"step": 3, "encoder": {}}, run=folder)
    return folder / format, remarks


def images(size=(32, 48), count=2):
    return torch.rand(count, 3, *size, generator=torch.Generator().manual_seed(1))
