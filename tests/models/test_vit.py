"""Sizes, initialisation and dropout of the encoder, and the images that it rejects."""

import math

import pytest
import tiny
import torch
import torch.nn.functional as F
from composing import composed

from ssvit.errors import OptionError
from ssvit.models import vit_options
from ssvit.models.vit import ViT

SMALL = {"image_size": 16, "patch_size": 4, "width": 24, "depth": 3, "heads": 3}


def build(**options) -> ViT:
    """A small encoder in which no weight is zero or one, so that each of them shows in the output."""
    return tiny.vit(by=0.1, **SMALL | {"pooling": "patch_mean"} | options).eval()


def random_images(b: int = 3, c: int = 3, h: int = 16, w: int = 16) -> torch.Tensor:
    return torch.rand(b, c, h, w, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "patch", "expected"),
    [
        ("ti", 16, 5.52), ("s", 16, 21.67), ("b", 16, 85.80), ("b", 32, 87.46), ("l", 16, 303.30), ("h", 14, 630.76),
        ("g", 14, 1011.20),
    ],
)  # fmt: skip
def test_parameter_counts_are_the_published_ones(name, patch, expected):
    config = composed(f"encoder={name}", "data.image_size=224", f"encoder.patch_size={patch}")
    with torch.device("meta"):
        vit = config.build("encoder")
    assert f"{sum(parameter.numel() for parameter in vit.parameters()) / 1e6:.2f}" == f"{expected:.2f}"


def plain_dropped(vit: ViT, images: torch.Tensor, rate: float, of_weights: float) -> torch.Tensor:
    """The outputs in training, as the authors drop: the sequence, what each branch puts out, and what the MLP hides."""
    tokens = vit.embed(images)
    x = torch.cat([vit.class_token.expand(len(images), -1, -1), tokens], dim=1) + vit.positions[0]()
    x = F.dropout(x, rate)
    for block in vit.blocks:
        heads = block.attention.heads
        normed = F.layer_norm(x, x.shape[-1:], block.norm1.weight, block.norm1.bias, 1e-6)
        packed = F.linear(normed, block.attention.qkv.weight, block.attention.qkv.bias)
        query, key, value = packed.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        weights = F.dropout((query @ key.mT / query.shape[-1] ** 0.5).softmax(-1), of_weights, training=of_weights > 0)
        mixed = (weights @ value).transpose(1, 2).flatten(2)
        x = x + F.dropout(F.linear(mixed, block.attention.out.weight, block.attention.out.bias), rate)
        normed = F.layer_norm(x, x.shape[-1:], block.norm2.weight, block.norm2.bias, 1e-6)
        hidden = F.dropout(F.gelu(F.linear(normed, block.expand.weight, block.expand.bias)), rate)
        x = x + F.dropout(F.linear(hidden, block.contract.weight, block.contract.bias), rate)
    return F.layer_norm(x, x.shape[-1:], vit.norm.weight, vit.norm.bias, 1e-6)


@pytest.mark.parametrize("of_weights", [0.0, 0.3])
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_dropout_is_the_authors_and_that_of_attention_weights_an_option(rate, of_weights):
    vit = build(dropout=rate, attention_dropout=of_weights).double().train()
    images = random_images().double()
    torch.manual_seed(3)
    found = vit(images)
    torch.manual_seed(3)
    torch.testing.assert_close(found, plain_dropped(vit, images, rate, of_weights), atol=1e-12, rtol=1e-12)
    assert torch.equal(vit(images), vit(images)) == (rate == of_weights == 0)


def test_initialisation_is_the_authors():
    torch.manual_seed(0)
    vit = vit_options.ViT(image_size=64, patch_size=8, width=192, depth=2, heads=3, distillation_token=True).build()
    patch = vit.patch.weight
    assert patch.std().item() == pytest.approx(192**-0.5, rel=0.02)
    assert patch.abs().max().item() <= 2 * 192**-0.5 / 0.8796 + 1e-6
    for block in vit.blocks:
        matrices = [*block.attention.qkv.weight.chunk(3), block.attention.out.weight]
        for matrix, fans in [
            *((m, 2 * 192) for m in matrices),
            (block.expand.weight, 960),
            (block.contract.weight, 960),
        ]:
            bound = (6 / fans) ** 0.5
            assert 0.99 * bound < matrix.abs().max().item() <= bound
            assert matrix.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
        for layer in (block.expand, block.contract):
            assert 0.8e-6 < layer.bias.std().item() < 1.2e-6
        for norm in (block.norm1, block.norm2, vit.norm):
            assert (norm.weight == 1).all()
            assert (norm.bias == 0).all()
            assert norm.eps == 1e-6
        assert not block.attention.qkv.bias.any()
        assert not block.attention.out.bias.any()
    assert not vit.patch.bias.any()
    assert not vit.class_token.any()
    assert not vit.distillation_token.any()
    assert vit.positions[0].embedding.std().item() == pytest.approx(0.02, rel=0.03)


def test_bfloat16_does_not_shift_the_colours():
    # A mean rounded to half precision would shift every patch by half a grey level.
    vit = vit_options.ViT(
        image_size=32, patch_size=16, width=256, depth=1, heads=1, mean=130.49 / 255, std=0.229
    ).build()
    torch.nn.init.normal_(vit.patch.weight, std=768**-0.5, generator=torch.Generator().manual_seed(0))
    images = torch.full((1, 3, 32, 32), 130, dtype=torch.uint8)
    with torch.autocast("cpu", torch.bfloat16):
        found = vit.embed(images)[0, 0].double()
    weight = vit.patch.weight.bfloat16().double().sum(1) / 0.229
    error = found - weight * (130 - 130.49) / 255
    levels = (error @ weight / (weight @ weight)).item() * 255
    assert abs(levels) < 0.05


@pytest.mark.parametrize("shape", [(2, 3, 16, 18), (2, 3, 18, 16), (2, 1, 16, 16), (3, 16, 16), (2, 16, 16, 3)])
def test_images_that_the_patches_do_not_divide_are_refused(shape):
    with pytest.raises(OptionError, match=f"^images={'x'.join(map(str, shape[1:]))}: "):
        build()(torch.zeros(shape))


def misread(kind):
    """Images in [0, 1] as another library's habit would give them."""
    images = random_images()
    if kind == "nan":
        images[1, 2, 3, 4] = math.nan
        return images
    return {"bytes": 255 * images, "normalised": (images - 0.5) / 0.25, "infinite": images / 0,
            "integers": (255 * images).long(), "half": (255 * images).half()}[kind]  # fmt: skip


@pytest.mark.parametrize("stem", [None, {"layers": [], "width": 64}])
@pytest.mark.parametrize("kind", ["bytes", "normalised", "nan", "infinite", "integers", "half"])
@pytest.mark.parametrize("training", [False, True])
def test_images_that_are_neither_bytes_nor_in_0_to_1_are_refused(kind, training, stem):
    vit = build(stem=stem).train(training)
    for ask in (vit, vit.embed, vit.represent, lambda images: next(vit.layers(images))):
        with pytest.raises(OptionError, match=r"^images="):
            ask(misread(kind))
    vit(random_images() * 1.4 - 0.2)  # as far as cubic filters go
    vit(random_images()[:0])


def test_the_range_of_images_is_not_asked_where_that_would_wait_or_break_a_graph():
    vit, images = build(), misread("bytes")
    graphs = []
    compiled = torch.compile(vit, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    compiled(images)
    assert graphs
    torch.export.export(vit, (images,))
