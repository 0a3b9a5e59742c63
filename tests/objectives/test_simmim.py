"""SimMIM is masked patch prediction with other options: its loss as the authors' code has it, its masks, its run."""

import tiny
import torch

from ssvit.data.batch import Batch
from ssvit.models import vit_options
from ssvit.models.vit import ViT
from ssvit.objectives import masked_patch_options
from ssvit.objectives.masked_patch import MASKED, MaskedPatch, Masking
from ssvit.objectives.targets import Pixels


def build() -> MaskedPatch:
    torch.manual_seed(0)
    model = MaskedPatch(
        masked_patch_options.MaskedPatch(masking=Masking(corrupted=0.6, mask=1, replace=0, keep=0, unit=2)),
        encoder=ViT(vit_options.ViT(image_size=16, patch_size=4, width=24, depth=2, heads=3)),
        target=Pixels(patch_size=4, loss="l1"),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.double()


def test_loss_and_gradients_are_those_of_the_authors_formula():
    """All patches predicted, the absolute error times the mask of pixels, over masked pixels and channels."""
    model, images = build(), tiny.pictures(5)
    noise = model.sample(torch.arange(5), seed=0)
    assert (noise.kind == MASKED).all()
    mask = torch.zeros(5, 16, dtype=torch.float64).scatter(1, noise.ids, 1.0)
    tokens = model.encoder.embed(images)
    tokens = tokens * (1 - mask[:, :, None]) + model.mask_token * mask[:, :, None]
    outputs = model.head(model.encoder.encode(tokens)[:, 1:])
    reconstructed = outputs.view(5, 4, 4, 3, 4, 4).permute(0, 3, 1, 4, 2, 5).reshape(5, 3, 16, 16)
    pixels = (images.double() / 255 - 0.5) / 0.5
    mask = mask.view(5, 4, 4).repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None]
    expected = ((pixels - reconstructed).abs() * mask).sum() / mask.sum() / 3
    loss = model(Batch.of(images), noise)["loss"]
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # labels are float32
    parameters = list(model.parameters())
    one, two = (torch.autograd.grad(value, parameters) for value in (loss, expected))
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-8)
