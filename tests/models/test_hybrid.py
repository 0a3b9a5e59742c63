"""Hybrids: the stem against the authors' equations written as loops and timm's, and what they share with a ViT."""

import re
from functools import partial

import pytest
import timm
import tiny
import torch
import torch.nn.functional as F
from composing import composed
from timm.layers import StdConv2dSame, pad_same
from timm.models.resnetv2 import ResNetV2

from ssvit.checkpoints import storage
from ssvit.errors import OptionError
from ssvit.models import hybrid, vit_options
from ssvit.models.hybrid import Bottleneck, Convolution, ResNet
from ssvit.models.vit import ViT
from ssvit.objectives import masked_patch_options
from ssvit.objectives.base import parameter_groups
from ssvit.objectives.masked_patch import MaskedPatch
from ssvit.objectives.masked_patch_options import Masking
from ssvit.objectives.targets_options import MeanColor
from ssvit.variants import VARIANTS

# The hybrids, their peers of timm, and how many tokens an image of 224 pixels has.
HYBRIDS = {
    "r50_vit_b16": ("vit_base_r50_s16_224", 196), "r50_vit_b32": (None, 49), "r50_vit_l16": (None, 196),
    "r50_vit_l32": ("vit_large_r50_s32_224", 49), "r26_vit_b32": ("vit_base_r26_s32_224", 49),
    "r26_vit_s32": ("vit_small_r26_s32_224", 49), "r_vit_ti16": ("vit_tiny_r_s16_p8_224", 49),
}  # fmt: skip
SMALL = {"image_size": 16, "patch_size": 8, "width": 24, "depth": 2, "heads": 3}


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    """The module with no weight zero or one, so that each of them shows in the output."""
    torch.manual_seed(1)
    return tiny.shaken(module).eval()


def build(layers=(1, 1), **options) -> ViT:
    torch.manual_seed(0)
    return shaken(vit_options.ViT(**SMALL | {"stem": {"layers": list(layers), "width": 32}} | options).build())


def random_images(b: int = 2, h: int = 16, w: int = 16, c: int = 3) -> torch.Tensor:
    return torch.rand(b, c, h, w, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("size", "stride"), [(7, 2), (3, 2), (3, 1), (1, 1)])
def test_the_authors_convolution_has_standardised_filters_and_zeros_around_the_map_as_in_jax(size, stride):
    (convolution, norm), x = hybrid.normed(4, 32, size, stride, epsilons="authors"), torch.rand(2, 4, 6, 10)
    deviation, mean = torch.std_mean(convolution.weight, (1, 2, 3), correction=0, keepdim=True)
    padded = pad_same(x, [size, size], [stride, stride])
    expected = F.conv2d(padded, (convolution.weight - mean) / (deviation + 1e-5), stride=stride)
    torch.testing.assert_close(convolution(x), expected)
    assert (norm.num_groups, norm.eps) == (32, 1e-6)


@pytest.mark.parametrize(
    "options",
    [{"image_size": [8, 16], "mean": [0.4, 0.5, 0.3], "std": 0.3},
     {"image_size": [32, 16], "patch_size": [16, 8], "channels": 2}],
)  # fmt: skip
def test_patches_are_cut_from_the_map_of_normalised_images(options):
    vit = build((1, 1), **options)
    images = random_images(2, *vit.image_size, vit.channels)
    features = vit.stem((images - vit.mean[:, None, None]) / vit.std[:, None, None])
    side = vit.patch_size[0] // 8, vit.patch_size[1] // 8
    cut = F.unfold(features, side, stride=side)
    torch.testing.assert_close(vit.embed(images), vit.patch(cut.mT))


def test_equals_timm():
    stem = shaken(ResNet(vit_options.Stem(layers=(1, 2, 1), width=32, epsilons="timm"), channels=3))
    peer = ResNetV2(
        layers=(1, 2, 1), channels=(128, 256, 512), stem_chs=32, num_classes=0, global_pool="", preact=False,
        stem_type="same", conv_layer=partial(StdConv2dSame, eps=1e-8),
    ).eval()  # fmt: skip
    names = {"root.": "stem.conv.", "shortcut.0": "downsample.conv", "shortcut.1": "downsample.norm"}
    state = {}
    for name, value in stem.state_dict().items():
        name = re.sub(r"^norm\.", "stem.norm.", re.sub(r"stages\.(\d)\.(\d)", r"stages.\1.blocks.\2", name))
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        state[name] = value
    peer.load_state_dict(state)
    images = random_images(2, 64, 96) - 0.5
    found = stem(images)
    assert found.shape == (2, 512, 4, 6)
    torch.testing.assert_close(found, peer.forward_features(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", HYBRIDS)
def test_configurations_have_the_published_parameters(name):
    peer, tokens = HYBRIDS[name]
    config = composed(f"encoder={name}", "data.image_size=224")
    with torch.device("meta"):
        vit = config.build("encoder")
        assert vit(torch.zeros(1, 3, 224, 224)).shape == (1, 1 + tokens, vit.width)
        count = sum(parameter.numel() for parameter in vit.parameters())
        if peer:
            theirs = timm.create_model(peer, num_classes=0)
            assert count == sum(parameter.numel() for parameter in theirs.parameters())
            assert tokens == theirs.patch_embed.num_patches


def test_every_configuration_of_a_hybrid_is_counted():
    assert {name for name in VARIANTS["encoder"] if "_vit_" in name} == HYBRIDS.keys()


def test_a_unit_starts_as_its_shortcut():
    unit, x = Bottleneck(inputs=128, width=32, stride=1, epsilons="authors"), torch.randn(1, 128, 4, 4)
    assert torch.equal(unit(x), x.relu())
    assert not any(isinstance(module, Convolution) for module in unit.shortcut.modules())


def test_initialisation_is_the_authors():
    stem = vit_options.ViT(**SMALL | {"patch_size": 16}, stem={"layers": [1, 2, 1], "width": 64}).build().stem
    for name, parameter in stem.named_parameters():
        if parameter.ndim == 4:
            std = parameter[0].numel() ** -0.5
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert parameter.abs().max().item() <= 2 * std / 0.8796 + 1e-6
        elif name.endswith("bias") or "norm3" in name:
            assert not parameter.any(), name
        else:
            assert (parameter == 1).all(), name


def objective(**options) -> MaskedPatch:
    torch.manual_seed(0)
    encoder = vit_options.ViT(**SMALL | {"patch_size": 4} | options, stem={"layers": [1], "width": 32}).build()
    return MaskedPatch(
        masked_patch_options.MaskedPatch(masking=Masking()),
        encoder=encoder,
        target=MeanColor(bits=1).build(encoder=encoder),
    )


def test_the_stem_lies_at_the_bottom_and_its_filters_decay():
    model = objective()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model.named_parameters(), 0.1, layer_decay=0.5, encoder=model.encoder)
    found = {names[id(p)]: (group["share"], group["weight_decay"]) for group in groups for p in group["params"]}
    stem = {name: value for name, value in found.items() if name.startswith("encoder.stem.")}
    assert len(stem) == len(list(model.encoder.stem.parameters()))
    for name, value in stem.items():
        assert model.encoder.layers_above(name.removeprefix("encoder.")) == 3
        assert value == (0.125, 0.1 if model.get_parameter(name).ndim == 4 else 0.0)


@pytest.mark.parametrize("epsilons", ["authors", "timm"])
def test_a_checkpoint_brings_the_stem_to_images_of_another_size(epsilons, tmp_path):
    encoder = build(stem={"layers": [1, 1], "width": 32, "epsilons": epsilons})
    trained = MaskedPatch(
        masked_patch_options.MaskedPatch(masking=Masking()),
        encoder=encoder,
        target=MeanColor().build(encoder=encoder),
    )
    path = storage.save(tmp_path, 1, {"model": trained.state_dict()}, trained.metadata)
    assert torch.equal(tiny.loaded(path)(random_images()), trained.encoder(random_images()))
    wide = tiny.loaded(path, image_size=[24, 40])
    assert wide.grid == (3, 5)
    assert wide(random_images(1, 24, 40)).shape == (1, 16, 24)
    for name, value in trained.encoder.stem.state_dict().items():
        assert torch.equal(wide.stem.state_dict()[name], value)


def test_the_same_stem_may_be_written_in_other_words():
    build((1, 1)).load_weights_from(build((1, 1), stem={"layers": (1, 1), "width": 32, "epsilons": "authors"}))


@pytest.mark.parametrize(
    "stem",
    [
        None,
        {"layers": [1, 2], "width": 32},
        {"layers": [1, 1], "width": 64},
        {"layers": [1, 1], "width": 32, "epsilons": "timm"},
    ],
)
def test_another_stem_is_refused(stem):
    with pytest.raises(OptionError, match=r"^stem=.*: .*\{layers: \[1,1\], width: 32, epsilons: authors"):
        vit_options.ViT(**SMALL, stem=stem).build().load_weights_from(build())
