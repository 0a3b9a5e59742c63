"""An encoder as another model's backbone: its maps are its tokens."""

import pytest
import tiny
import torch

from ssvit.errors import OptionError
from ssvit.models.backbone import FeatureMaps
from ssvit.models.vit import ViT


def encoder(**changes) -> ViT:
    shape = {"image_size": 32, "patch_size": 8, "width": 16, "depth": 3, "heads": 2, "mean": 0.5, "std": 0.25}
    return tiny.vit(**shape | changes)


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
    with pytest.raises(OptionError, match=r": .*\b1\b.*\b3\b"):
        FeatureMaps(encoder(), layers)
