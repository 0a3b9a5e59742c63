"""Masked patch prediction with an encoder of uncorrupted patches only: the maths of MAE with any target."""

import pytest
import tiny
import torch
from wide import pictures

from ssvit.data.batch import Batch
from ssvit.models.vit_options import ViT
from ssvit.objectives import mae_options, masked_patch_options
from ssvit.objectives.mae import MAE, Masks
from ssvit.objectives.masked_patch import MaskedPatch, sample_corruption, uncorrupted
from ssvit.objectives.masked_patch_options import Masking
from ssvit.objectives.targets_options import MeanColor, Pixels

DECODER = {"depth": 2, "width": 16, "heads": 2}
PARTS = (MeanColor(bits=2), MeanColor(grid=2, bits=1), Pixels())
TARGETS = [part.build(encoder=tiny.patches(4)) for part in PARTS]


def masking(corrupted: float = 0.75) -> Masking:
    return Masking(corrupted=corrupted, mask=1, replace=0, unchanged=0)


def build(target=None) -> MaskedPatch:
    """A small objective with every weight random."""
    torch.manual_seed(0)
    shape = {"image_size": (12, 16), "patch_size": 4, "width": 24, "depth": 2, "heads": 3}
    model = MaskedPatch(
        masked_patch_options.MaskedPatch(masking=masking(), decoder=DECODER),
        encoder=ViT(**shape, positions="sine_cosine_2d", pooling="patch_mean").build(),
        target=target or MeanColor().build(encoder=tiny.patches(4)),
    )
    return tiny.shaken(model)


@pytest.mark.parametrize("patches", [4, 12, 64])
@pytest.mark.parametrize("fraction", [0.1, 0.6, 0.75, 1.0])
def test_uncorrupted_patches_are_the_others_in_order(patches, fraction):
    ids = sample_corruption(masking(fraction), torch.arange(20), seed=0, grid=(2, patches // 2)).ids
    expected = [[place for place in range(patches) if place not in own] for own in ids.tolist()]
    assert uncorrupted(ids, patches).tolist() == expected


def test_loss_and_gradients_on_pixels_are_those_of_a_masked_autoencoder_in_float64():
    """The loss equals MAE's with pixels in [-1, 1] and the same masks; test_mae compares `MAE` with transformers."""
    model, images = build(Pixels().build(encoder=tiny.patches(4))).double(), pictures()
    peer = MAE(
        mae_options.MAE(decoder=DECODER, norm_pixels=False), encoder=ViT(**model.encoder.arguments).build()
    ).double()
    peer.load_state_dict(model.state_dict())
    noise = model.sample(torch.arange(5), seed=3)
    losses = (
        model(Batch.of_view(images), noise)["loss"],
        peer(Batch.of_view(images), Masks(uncorrupted(noise.ids, 12), noise.ids))["loss"],
    )
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)  # pixels of `Pixels` are float32
    gradients = [torch.autograd.grad(loss, list(m.parameters())) for loss, m in zip(losses, (model, peer), strict=True)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: type(target).__name__)
def test_any_target_is_predicted(target):
    model, images = build(target), pictures()
    noise = model.sample(torch.arange(5), seed=0)
    prediction = model.predict(images, noise)
    assert prediction.shape == (5, 9, target.width)
    truth = torch.stack([target.labels(images)[image, noise.ids[image]] for image in range(5)])
    expected = target.losses(prediction, truth).mean().item()
    assert model(Batch.of_view(images), noise)["loss"].item() == pytest.approx(expected, rel=1e-6)


def test_the_encoders_layers_run_over_visible_patches_alone():
    model, seen = build(), []
    model.encoder.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    model.predict(pictures(), model.sample(torch.arange(5), seed=0))
    assert seen == [1 + 3]
