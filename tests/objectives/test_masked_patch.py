"""Masked patch prediction as the paper has it: what is predicted, from what, and what may not leak."""

import math

import pytest
import tiny
import torch
import torch.nn.functional as F

from ssvit.data.batch import Batch
from ssvit.evaluation.evaluators.reconstruction import nearest_uncorrupted
from ssvit.models.block import gather_tokens
from ssvit.models.vit_options import ViT
from ssvit.objectives import masked_patch_options
from ssvit.objectives.base import parameter_groups
from ssvit.objectives.masked_patch import MASKED, REPLACED, UNCHANGED, MaskedPatch, corrupt
from ssvit.objectives.masked_patch_options import Masking
from ssvit.objectives.targets_options import MeanColor, Pixels

PARTS = (MeanColor(), MeanColor(grid=2), Pixels())
TARGETS = [part.build(encoder=tiny.patches(4)) for part in PARTS]
IDS = ["mean_color", "color_grid", "pixels"]


def build(target=None, masking=None, *, trained: bool = True, **options) -> MaskedPatch:
    """A small objective; `trained` makes every weight random, so that the head is not zero."""
    torch.manual_seed(0)
    options = {"image_size": 16, "patch_size": 4, "width": 24, "depth": 3, "heads": 3} | options
    model = MaskedPatch(
        masked_patch_options.MaskedPatch(masking=masking or Masking()),
        encoder=ViT(**options).build(),
        target=target or MeanColor().build(encoder=tiny.patches(4)),
    )
    return tiny.shaken(model) if trained else model


def random_images(b: int = 6) -> torch.Tensor:
    return torch.randint(0, 256, (b, 3, 16, 16), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


@pytest.mark.parametrize("target", TARGETS, ids=IDS)
def test_the_loss_is_the_mean_over_corrupted_patches(target):
    model, images = build(target), random_images()
    noise = model.sample(torch.arange(6), seed=3)
    outputs = model.head(model.encoder.encode(corrupt(model.encoder.embed(images), model.mask_token, noise)))
    labels = target.labels(images)
    predictions = torch.stack([outputs[image, 1 + noise.ids[image]] for image in range(6)])
    truth = torch.stack([labels[image, noise.ids[image]] for image in range(6)])
    torch.testing.assert_close(model.predict(images, noise), predictions, atol=1e-5, rtol=1e-5)
    if target.score_name != "accuracy":
        losses, correct = (predictions - truth).square().mean(-1), None
    else:
        logits = predictions.unflatten(-1, (-1, 512))
        losses = F.cross_entropy(logits.flatten(0, -2), truth.flatten(), reduction="none")
        correct = (logits.argmax(-1) == truth).double().mean().item()
    result = model(Batch.of_view(images), noise)
    assert result["loss"].item() == pytest.approx(losses.mean().item(), rel=1e-5)
    assert result["loss"].ndim == 0
    assert correct is None or result["accuracy"].item() == pytest.approx(correct)
    assert not result[target.score_name].requires_grad


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", TARGETS[:2], ids=IDS[:2])
def test_the_first_loss_is_that_of_a_uniform_guess(target, precision):
    model = build(target, trained=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        result = model(Batch.of_view(random_images()), model.sample(torch.arange(6), seed=0))
    assert result["loss"].item() == pytest.approx(math.log(512), abs=1e-5)


@pytest.mark.parametrize("masking", [Masking(), Masking(mask=0.4, replace=0.3, unchanged=0.3)])
def test_what_is_hidden_does_not_leak_and_what_is_not_is_seen(masking):
    model, images = build(masking=masking, depth=2), random_images(4)
    model.eval()
    noise = model.sample(torch.arange(4), seed=0)
    before = model.predict(images, noise)
    for place in range(16):
        differs = (model.predict(tiny.inverted(images, place), noise) != before).flatten(1).any(1)
        for image in range(4):
            fate = dict(zip(noise.ids[image].tolist(), noise.types[image].tolist(), strict=True)).get(place, UNCHANGED)
            copied = noise.replacement[image][noise.types[image] == REPLACED].tolist()
            assert bool(differs[image]) == (fate == UNCHANGED or place in copied)


def test_a_tiny_model_learns_to_use_the_context():
    """Return patterned images of two colours: the remaining patches determine each patch, the nearest does not."""
    torch.manual_seed(0)
    colors = torch.randint(0, 8, (64, 3, 1, 2), generator=torch.Generator().manual_seed(2)) * 32 + 16
    cells = colors.repeat(1, 1, 4, 2)
    images = cells.repeat_interleave(4, 2).repeat_interleave(4, 3).to(torch.uint8)
    model = build(trained=False, width=48, depth=2, std=0.25)
    optimizer = torch.optim.AdamW(parameter_groups(model.named_parameters(), 0.01), lr=3e-3)
    for step in range(150):
        result = model(Batch.of_view(images), model.sample(torch.arange(64) + 64 * step, seed=0))
        optimizer.zero_grad()
        result["loss"].backward()
        optimizer.step()
    entropy, most_frequent = model.target.constant(model.target.labels(images))
    model.eval()
    with torch.no_grad():
        noise = model.sample(torch.arange(64) + 10**6, seed=0)
        result = model(Batch.of_view(images), noise)
        labels = model.target.labels(images)
        truth = gather_tokens(labels, noise.ids)
        right = model.target.score(model.target.guess(model.predict(images, noise)), truth)
        nearest = nearest_uncorrupted(noise.ids, model.encoder.grid)
        copied = labels.gather(1, nearest[:, :, None]) == truth
    masked = right[noise.types == MASKED].mean().item()
    assert masked > copied[noise.types == MASKED].double().mean().item() + 0.2
    assert entropy > 4
    assert result["loss"].item() < entropy / 4
    assert masked > 0.9
    assert (truth == most_frequent).double().mean() < 0.1


def test_simmims_loss_and_gradients_are_those_of_the_authors_formula():
    """SimMIM's loss: the absolute error of all patches times the mask, divided by masked pixels and channels."""
    masking = Masking(corrupted=0.6, mask=1, replace=0, unchanged=0, unit=2)
    model, images = build(Pixels(loss="l1").build(encoder=tiny.patches(4)), masking).double(), random_images(5)
    noise = model.sample(torch.arange(5), seed=0)
    assert (noise.types == MASKED).all()
    mask = torch.zeros(5, 16, dtype=torch.float64).scatter(1, noise.ids, 1.0)
    tokens = model.encoder.embed(images)
    tokens = tokens * (1 - mask[:, :, None]) + model.mask_token * mask[:, :, None]
    outputs = model.head(model.encoder.encode(tokens)[:, 1:])
    reconstructed = outputs.view(5, 4, 4, 3, 4, 4).permute(0, 3, 1, 4, 2, 5).reshape(5, 3, 16, 16)
    pixels = (images.double() / 255 - 0.5) / 0.5
    mask = mask.view(5, 4, 4).repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None]
    expected = ((pixels - reconstructed).abs() * mask).sum() / mask.sum() / 3
    loss = model(Batch.of_view(images), noise)["loss"]
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)  # labels are float32
    parameters = list(model.parameters())
    one, two = (torch.autograd.grad(value, parameters) for value in (loss, expected))
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-8)
