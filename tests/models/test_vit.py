"""The encoder against the paper's equations written as loops, against timm, and against its own longer ways."""

import math
import re
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from composing import composed
from timm.models.deit import VisionTransformerDistilled

from ssvit.models import vit_options
from ssvit.models.vit import ViT
from ssvit.options import OptionError

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "encoder"
SMALL = {"image_size": 16, "patch_size": 4, "width": 24, "depth": 3, "heads": 3}
KINDS = ("learned_1d", "learned_2d", "sine_cosine_2d", "relative", "none")
PLACES = [(kind, "stem") for kind in KINDS] + [
    (kind, at) for kind in KINDS[:3] for at in ("every_layer", "every_layer_shared")
]

SPECIAL = [{"class_token": False}, {"class_token": True}, {"distillation_token": True}]


def build(**options) -> ViT:
    """A small encoder in which no weight is zero or one, so that each of them shows in the output."""
    torch.manual_seed(0)
    vit = ViT(vit_options.ViT(**SMALL | {"pooling": "patch_mean"} | options))
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return vit.eval()


def random_images(b: int = 3, c: int = 3, h: int = 16, w: int = 16) -> torch.Tensor:
    return torch.rand(b, c, h, w, generator=torch.Generator().manual_seed(1))


def some(b: int, n: int, m: int, seed: int = 0) -> torch.Tensor:
    """m different places of n for each of b images, in random order."""
    return torch.rand(b, n, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :m]


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    mean = x.sum() / len(x)
    return (x - mean) / ((x - mean).square().sum() / len(x) + 1e-6).sqrt() * weight + bias


def gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()], dtype=x.dtype)


def from_config(name: str, image_size: int, **changes) -> tuple[ViT, str]:
    """An encoder of configs/encoder, without memory for its weights, and the text of its file."""
    config = composed(f"encoder={name}", f"data.image_size={image_size}")
    with torch.device("meta"):
        encoder = config.config.options.encoder.changed(**changes).build()
    assert type(encoder) is ViT
    return encoder, (CONFIGS / f"{name}.yaml").read_text()


def millions(vit: ViT) -> float:
    return sum(parameter.numel() for parameter in vit.parameters()) / 1e6


@pytest.mark.parametrize(
    ("name", "patch", "expected"),
    [
        ("ti", 16, 5.52),
        ("s", 16, 21.67),
        ("b", 16, 85.80),
        ("b", 32, 87.46),
        ("l", 16, 303.30),
        ("h", 14, 630.76),
    ],
)
def test_parameter_counts_are_the_published_ones(name, patch, expected):
    vit, _ = from_config(name, 224, patch_size=patch)
    assert f"{millions(vit):.2f}" == f"{expected:.2f}"


@pytest.mark.parametrize(("name", "size"), [("ti", 224), ("s", 224), ("b", 224), ("l", 224), ("h", 224), ("small", 32)])
def test_configurations_say_their_own_count(name, size):
    vit, text = from_config(name, size)
    said = re.search(r"([\d.]+) million parameters", text)[1]
    assert f"{millions(vit):.{len(said.split('.')[1])}f}" == said


@pytest.mark.parametrize(
    ("size", "patch", "channels", "special"),
    [((32, 32), 8, 3, 1), ((16, 40), 8, 3, 1), ((32, 24), 8, 1, 1), ((32, 32), 8, 4, 0), ((16, 24), 8, 3, 2)],
)
def test_equals_timm(size, patch, channels, special):
    vit = build(
        image_size=size, patch_size=patch, width=48, depth=4, heads=4, channels=channels, **SPECIAL[special],
        mean=0.45, std=0.22,
    )  # fmt: skip
    names = {"attention.qkv": "attn.qkv", "attention.out": "attn.proj", "expand": "mlp.fc1", "contract": "mlp.fc2"}
    names |= {"class_token": "cls_token", "patch.": "patch_embed.proj.", "positions.0.embedding": "pos_embed"}
    names |= {"distillation_token": "dist_token"}
    state = {}
    for name, value in vit.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        state[name] = value
    mean, std = (state.pop(name).view(-1, 1, 1) for name in ("mean", "std"))
    state["pos_embed"] = state["pos_embed"][None]
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].view(48, channels, patch, patch)
    kind = VisionTransformerDistilled if special == 2 else timm.models.VisionTransformer
    peer = kind(
        img_size=size, patch_size=patch, in_chans=channels, embed_dim=48, depth=4, num_heads=4, num_classes=0,
        global_pool="token" if special else "", class_token=special > 0,
    ).eval()  # fmt: skip
    peer.load_state_dict(state)
    images = random_images(4, channels, *size)
    torch.testing.assert_close(vit(images), peer.forward_features((images - mean) / std), atol=1e-5, rtol=1e-5)


def test_normalisation_is_that_of_the_channels():
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    vit = build(mean=mean, std=std)
    by_hand = (random_images() - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    expected = F.linear(vit.patchify(by_hand), vit.patch.weight, vit.patch.bias)
    torch.testing.assert_close(vit.embed(random_images()), expected, atol=1e-5, rtol=1e-5)
    assert vit.state_dict()["mean"].tolist() == pytest.approx(mean)
    assert vit.state_dict()["std"].tolist() == pytest.approx(std)


def test_gradients_pass_through_the_folded_normalisation():
    vit = build(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    weight = torch.randn(3, 16, 24)
    (vit.embed(random_images()) * weight).sum().backward()
    found = vit.patch.weight.grad.clone(), vit.patch.bias.grad.clone()
    vit.zero_grad()
    by_hand = (random_images() - vit.mean[:, None, None]) / vit.std[:, None, None]
    (F.linear(vit.patchify(by_hand), vit.patch.weight, vit.patch.bias) * weight).sum().backward()
    torch.testing.assert_close(found, (vit.patch.weight.grad, vit.patch.bias.grad), atol=2e-4, rtol=1e-4)


def test_a_patch_is_embedded_by_itself():
    vit = build()
    images = random_images()
    changed = images.clone()
    changed[:, :, 4:8, 8:12] = 0
    differs = (vit.embed(images) != vit.embed(changed)).any(-1)
    assert torch.equal(differs, (torch.arange(16) == 6).expand(3, -1))


def test_brightness_is_not_normalised_away():
    vit = build()
    grey = torch.full((2, 3, 16, 16), 0.5)
    assert (vit.embed(grey) - vit.embed(grey * 1.2)).abs().min(-1).values.min() > 1e-4


def test_an_image_does_not_depend_on_its_batch():
    vit = build()
    images = random_images(5)
    torch.testing.assert_close(vit(images)[3:4], vit(images[3:4]), atol=1e-6, rtol=1e-5)


def test_one_place_may_be_asked_twice():
    vit = build()
    tokens = vit.embed(random_images())
    outputs = vit.encode(tokens, output_ids=torch.tensor([[4, 4]]).expand(3, -1))
    torch.testing.assert_close(outputs[:, 0], outputs[:, 1])


def test_without_positions_the_order_of_patches_is_unknown():
    vit = build(positions="none")
    tokens, order = vit.embed(random_images()), torch.randperm(16)
    torch.testing.assert_close(
        vit.encode(tokens[:, order])[:, 1:], vit.encode(tokens)[:, 1 + order], atol=1e-5, rtol=1e-5
    )


def test_encoding_leaves_the_tokens_as_they_were():
    vit = build()
    tokens = vit.embed(random_images()).detach()
    before = tokens.clone()
    vit.encode(tokens, output_ids=some(3, 16, 4))
    assert torch.equal(tokens, before)


POOLED = [("patch_mean", options) for options in SPECIAL] + [("class_token", options) for options in SPECIAL[1:]]


@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize(("pooling", "special"), POOLED)
def test_an_image_is_represented_by_its_pooled_outputs(pooling, special, positions):
    vit = build(pooling=pooling, positions=positions, **special).double()
    images, weight = random_images().double(), torch.randn(3, 24).double()
    results = []
    for representation in (vit.pool(vit(images)), vit.represent(images)):
        vit.zero_grad()
        (representation * weight).sum().backward()
        results.append((representation.detach(), {name: p.grad.clone() for name, p in vit.named_parameters()}))
    (whole, gradients), (found, found_gradients) = results
    assert pooling == "class_token" or torch.equal(found, whole)
    torch.testing.assert_close(found, whole, atol=1e-14, rtol=1e-13)
    torch.testing.assert_close(found_gradients, gradients, atol=1e-12, rtol=1e-10)


def test_eval_is_without_chance():
    images = random_images()
    vit = build(dropout=0.5, stochastic_depth=0.5)
    without = ViT(vit_options.ViT(**SMALL, pooling="patch_mean")).eval()
    without.load_state_dict(vit.state_dict())
    assert torch.equal(vit(images), without(images))
    vit.train()
    assert not torch.equal(vit(images), vit(images))


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


def test_training_without_dropout_is_without_chance():
    vit = build().train()
    assert torch.equal(vit(random_images()), vit(random_images()))


def test_stochastic_depth_grows_linearly():
    rates = [block.drop.rate for block in ViT(vit_options.ViT(**SMALL | {"depth": 5}, stochastic_depth=0.2)).blocks]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


def test_initialisation_is_the_authors():
    torch.manual_seed(0)
    vit = ViT(vit_options.ViT(image_size=64, patch_size=8, width=192, depth=2, heads=3, distillation_token=True))
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


@pytest.mark.parametrize(
    ("positions", "at", "copies"),
    [("learned_1d", "stem", 1), ("learned_1d", "every_layer", 3), ("learned_1d", "every_layer_shared", 1)],
)
def test_positions_of_each_layer_are_its_own_unless_shared(positions, at, copies):
    without = millions(ViT(vit_options.ViT(**SMALL, positions="none")))
    found = (millions(ViT(vit_options.ViT(**SMALL, positions=positions, positions_at=at))) - without) * 1e6
    assert round(found) == copies * 17 * 24


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ("learned_2d", 4 * 12 + 4 * 12 + 24),
        ("sine_cosine_2d", 0),
        ("relative", 3 * 33 * 8),
    ],
)
def test_parameters_of_the_other_positions(positions, expected):
    found = millions(ViT(vit_options.ViT(**SMALL, positions=positions))) - millions(
        ViT(vit_options.ViT(**SMALL, positions="none"))
    )
    assert round(found * 1e6) == expected


@pytest.mark.parametrize(("positions", "at"), PLACES)
def test_weights_and_normalisation_travel_in_a_file(positions, at):
    vit = build(positions=positions, positions_at=at, mean=[0.1, 0.2, 0.3], std=0.3, distillation_token=True)
    file = safetensors.torch.save(vit.state_dict())
    torch.manual_seed(5)
    other = ViT(vit_options.ViT(**vit.arguments | {"mean": 0.5, "std": 0.5})).eval()
    other.load_state_dict(safetensors.torch.load(file))
    assert torch.equal(other(random_images()), vit(random_images()))
    assert {"mean", "std", "class_token", "distillation_token", "patch.weight", "norm.bias"} <= vit.state_dict().keys()


def test_bfloat16_does_not_shift_the_colours():
    # Half a grey level is what a mean rounded to half precision would be off by, in every patch alike.
    vit = ViT(vit_options.ViT(image_size=32, patch_size=16, width=256, depth=1, heads=1, mean=130.49 / 255, std=0.229))
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
    right = "takes 3 channels, and a height and width that patches of 4x4 divide$"
    with pytest.raises(OptionError, match=right) as raised:
        build()(torch.zeros(shape))
    assert "x".join(map(str, shape[1:])) in str(raised.value)


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
        with pytest.raises(
            OptionError, match=r"takes uint8, or float in \[0, 1\], and normalises images itself"
        ) as raised:
            ask(misread(kind))
        assert "\n" not in str(raised.value)
    vit(random_images() * 1.4 - 0.2)  # as far as cubic filters go
    vit(random_images()[:0])


def test_the_range_of_images_is_not_asked_where_that_would_wait_or_break_a_graph():
    vit, images = build(), misread("bytes")
    graphs = []
    compiled = torch.compile(vit, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    compiled(images)
    assert graphs
    torch.export.export(vit, (images,))
