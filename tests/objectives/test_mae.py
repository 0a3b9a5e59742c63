"""Masked autoencoding: what is reconstructed, from what, what may not leak, exact resumption, the evaluator's words."""

import math

import pytest
import tiny
import torch
import torch.nn.functional as F
from transformers import ViTMAEConfig, ViTMAEForPreTraining
from wide import pictures

from ssvit.data.batch import Batch
from ssvit.models.vit_options import ViT
from ssvit.objectives import mae_options
from ssvit.objectives.mae import MAE, Masks

MEAN, STD = [0.49, 0.48, 0.45], [0.25, 0.24, 0.26]
DECODER = {"depth": 2, "width": 16, "heads": 2}


def build(*, decoder=DECODER, masked: float = 0.75, norm_pixels: bool = True, **options) -> MAE:
    """A small objective with every weight random."""
    torch.manual_seed(0)
    options = {"image_size": (12, 16), "patch_size": 4, "width": 24, "depth": 2, "heads": 3} | options
    encoder = ViT(**{"mean": MEAN, "std": STD, "positions": "sine_cosine_2d"} | options).build()
    model = MAE(mae_options.MAE(decoder=decoder, masked=masked, norm_pixels=norm_pixels), encoder=encoder)
    return tiny.shaken(model)


def waves(place: int, columns: int, width: int) -> torch.Tensor:
    """The position of a patch in sines and cosines of its column and of its row."""
    y, x = divmod(place, columns)
    rates = [10_000 ** (-i / (width // 4)) for i in range(width // 4)]
    rows = [math.sin(x * r) for r in rates], [math.cos(x * r) for r in rates]
    rows = *rows, [math.sin(y * r) for r in rates], [math.cos(y * r) for r in rates]
    return torch.tensor(rows, dtype=torch.float64).flatten()


def as_transformers(model: MAE) -> dict[str, torch.Tensor]:
    """The weights and positions by the names that transformers has for them; of a square image in patches of 4."""
    encoder, decoder, (_, q) = model.encoder, model.decoder, model.encoder.patch_size

    def table(width):
        rows = [torch.zeros(width), *(waves(place, q, width).float() for place in range(encoder.patches))]
        return torch.stack(rows)[None]

    state = {
        "vit.embeddings.cls_token": encoder.class_token,
        "vit.embeddings.position_embeddings": table(encoder.width),
        "vit.embeddings.patch_embeddings.projection.weight": encoder.patch.weight.view(-1, 3, 4, 4),
        "vit.embeddings.patch_embeddings.projection.bias": encoder.patch.bias,
        "decoder.mask_token": decoder.mask_token[None, None],
        "decoder.decoder_pos_embed": table(len(decoder.mask_token)),
    }
    modules = {"vit.layernorm": encoder.norm, "decoder.decoder_norm": decoder.norm}
    modules |= {"decoder.decoder_embed": decoder.embed}
    for name, blocks in (("vit.layers", encoder.blocks), ("decoder.decoder_layers", decoder.blocks)):
        for layer, block in enumerate(blocks):
            own = f"{name}.{layer}"
            modules |= {f"{own}.attention.o_proj": block.attention.out, f"{own}.mlp.fc1": block.expand}
            modules |= {f"{own}.mlp.fc2": block.contract, f"{own}.layernorm_before": block.norm1}
            modules |= {f"{own}.layernorm_after": block.norm2}
            for kind in ("weight", "bias"):
                parts = getattr(block.attention.qkv, kind).chunk(3)
                state |= {f"{own}.attention.{part}_proj.{kind}": x for part, x in zip("qkv", parts, strict=True)}
    state |= {f"{name}.{kind}": value for name, module in modules.items() for kind, value in module.named_parameters()}
    # Its pixels of a patch are in the order of rows, columns and channels.
    for kind, value in decoder.head.named_parameters():
        state[f"decoder.decoder_pred.{kind}"] = value.unflatten(0, (3, 16)).transpose(0, 1).flatten(0, 1)
    return state


@torch.no_grad()
@pytest.mark.parametrize("norm_pixels", [True, False])
def test_predictions_and_loss_are_those_of_transformers(norm_pixels):
    model = build(image_size=16, norm_pixels=norm_pixels)
    images = F.interpolate(pictures(), size=(16, 16))
    noise = model.sample(torch.arange(5), seed=0)
    peer = ViTMAEForPreTraining(
        ViTMAEConfig(
            image_size=16, patch_size=4, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
            intermediate_size=96, decoder_hidden_size=16, decoder_num_hidden_layers=2, decoder_num_attention_heads=2,
            decoder_intermediate_size=64, norm_pix_loss=norm_pixels, layer_norm_eps=1e-6,
        )
    )  # fmt: skip
    peer.load_state_dict(as_transformers(model))
    mean, std = (torch.tensor(value)[:, None, None] for value in (MEAN, STD))
    order = torch.cat(noise, 1).argsort(1) / 16  # it masks the patches of the greatest numbers
    found = peer.eval()((images / 255 - mean) / std, noise=order)
    assert torch.equal(found.mask.bool(), torch.zeros(5, 16).scatter(1, noise.masked_ids, 1.0).bool())
    ids = noise.masked_ids[:, :, None].expand(-1, -1, 48)
    expected = found.logits.gather(1, ids).unflatten(2, (16, 3)).transpose(2, 3).flatten(2)
    torch.testing.assert_close(model.predict(images, noise), expected, rtol=1e-4, atol=1e-4)
    assert model(Batch.of_view(images), noise)["loss"].item() == pytest.approx(found.loss.item(), rel=1e-5)


@pytest.mark.parametrize(("masked", "count"), [(0.75, 9), (0.5, 6), (0.01, 1), (0.99, 11)])
def test_masked_and_visible_patches_are_all_patches_and_each_is_masked_as_often(masked, count):
    noise = build(masked=masked).sample(torch.arange(400), seed=7)
    assert noise.masked_ids.shape == (400, count)
    assert torch.equal(torch.cat(noise, 1).sort(1).values, torch.arange(12).expand(400, -1))
    share = torch.bincount(noise.masked_ids.flatten(), minlength=12) / 400
    # Five standard errors of a share.
    assert (share - count / 12).abs().max() < 5 * math.sqrt(count / 12 * (1 - count / 12) / 400)


def test_predictions_follow_their_patches():
    """The order of the indices of visible and masked patches has no effect, since each index has its position."""
    model, images = build().eval(), pictures()
    noise = model.sample(torch.arange(5), seed=0)
    turned = Masks(noise.visible_ids.flip(1), noise.masked_ids.roll(1, 1))
    one, two = model.predict(images, noise), model.predict(images, turned)
    torch.testing.assert_close(two, one.roll(1, 1), rtol=1e-4, atol=1e-5)
    assert (one[:, 1:] - one[:, :1]).abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("norm_pixels", [True, False])
def test_labels_painted_are_the_image(norm_pixels):
    model, images = build(norm_pixels=norm_pixels), pictures()
    labels = model.labels(images)
    torch.testing.assert_close(model.paint(labels, images), images / 255, rtol=0, atol=1e-5)
    if norm_pixels:
        torch.testing.assert_close(labels.mean(-1), torch.zeros(5, 12), rtol=0, atol=1e-4)
        torch.testing.assert_close(labels.var(-1), torch.ones(5, 12), rtol=1e-3, atol=0)
        of_one_colour = build(mean=0.5, std=0.5).labels(torch.full_like(images, 90))
        assert not of_one_colour.abs().max() > 1e-3
