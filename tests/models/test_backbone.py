"""An encoder as another model's backbone: its maps are its tokens, and the pyramid is what detectors take."""

import pytest
import torch
from torchvision.models.convnext import LayerNorm2d
from torchvision.models.detection import FasterRCNN

from ssvit.models import vit_options
from ssvit.models.backbone import ChannelNorm, FeatureMaps, FeaturePyramid
from ssvit.models.vit import ViT
from ssvit.options import OptionError


def encoder(**changes) -> ViT:
    torch.manual_seed(0)
    return ViT(
        vit_options.ViT(
            **{"image_size": 32, "patch_size": 8, "width": 16, "depth": 3, "heads": 2, "mean": 0.5, "std": 0.25}
            | changes
        )
    )


@pytest.mark.parametrize("class_token", [True, False])
def test_a_map_holds_each_patch_s_token_at_its_place(class_token):
    vit = encoder(class_token=class_token, **({} if class_token else {"pooling": "patch_mean"}))
    images = torch.rand(2, 3, 24, 40)
    second, last = FeatureMaps(vit, [2, 3])(images)
    tokens = vit(images)[:, vit.num_prefix_tokens :]
    assert last.shape == second.shape == (2, 16, 3, 5)
    for y in range(3):
        for x in range(5):
            torch.testing.assert_close(last[:, :, y, x], tokens[:, 5 * y + x])
    tokens = vit.norm(list(vit.layers(images))[1])[:, vit.num_prefix_tokens :]
    torch.testing.assert_close(second[0, :, 2, 1], tokens[0, 11])


def test_layers_come_in_the_order_asked_and_no_further_one_is_computed():
    vit, images = encoder(), torch.rand(1, 3, 32, 32)
    one, two = FeatureMaps(vit, [1, 2])(images)
    vit.blocks[2].forward = None  # computing the third layer would fail
    again = FeatureMaps(vit, [2, 1])(images)
    assert torch.equal(again[0], two)
    assert torch.equal(again[1], one)


@pytest.mark.parametrize("layers", [[], [0], [4], [1, 9]])
def test_a_layer_that_there_is_not_is_refused(layers):
    with pytest.raises(OptionError, match="from 1 to 3"):
        FeatureMaps(encoder(), layers)


def test_the_norm_over_channels_is_torchvision_s():
    x, ours, theirs = torch.randn(2, 6, 3, 5), ChannelNorm(6, eps=1e-6), LayerNorm2d(6, eps=1e-6)
    torch.nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))


def test_the_pyramid_has_a_map_of_each_stride():
    maps = FeaturePyramid(encoder(), out_channels=12)(torch.rand(2, 3, 32, 64))
    assert {name: tuple(value.shape) for name, value in maps.items()} == {
        "0": (2, 12, 16, 32), "1": (2, 12, 8, 16), "2": (2, 12, 4, 8), "3": (2, 12, 2, 4), "pool": (2, 12, 1, 2),
    }  # fmt: skip


def test_a_detector_of_torchvision_trains_the_encoder():
    vit = encoder()
    detector = FasterRCNN(
        FeaturePyramid(vit, out_channels=8), 3, image_mean=[0, 0, 0], image_std=[1, 1, 1], min_size=32, max_size=64
    )
    images = [torch.rand(3, 32, 32), torch.rand(3, 48, 40)]
    boxes = {"boxes": torch.tensor([[2.0, 3.0, 20.0, 25.0]]), "labels": torch.tensor([1])}
    sum(detector(images, [boxes, boxes]).values()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in vit.patch.parameters())
    assert vit.patch.weight.grad.abs().max() > 0
    found = detector.eval()(images)
    assert all(one["boxes"].shape[1] == 4 for one in found)
