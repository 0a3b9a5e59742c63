"""Latent prediction equals plain loops: masks, targets, decoder, loss, teacher, exact resumption, the evaluator."""

import itertools
import math

import pytest
import tiny
import torch
import torch.nn.functional as F
from wide import pictures

from ssvit.data.batch import Batch
from ssvit.engine.randomness import uniform
from ssvit.models.vit_options import ViT
from ssvit.objectives import latent_options
from ssvit.objectives.latent import Latent
from ssvit.objectives.mae import Masks

DECODER = {"depth": 3, "width": 12, "groups": 4}


def build(masks=3, layers=2, class_token_weight=0.3, masked=0.75, block=3, **encoder) -> Latent:
    """A small objective with every weight random, the teacher's too."""
    torch.manual_seed(0)
    encoder = {"image_size": (12, 16), "patch_size": 4, "width": 24, "depth": 3, "heads": 3} | encoder
    options = latent_options.Latent(
        decoder=DECODER, masks=masks, layers=layers, class_token_weight=class_token_weight, masked=masked, block=block
    )
    model = Latent(options, encoder=ViT(**encoder).build())
    return tiny.shaken(model)


def test_visible_patches_lie_in_blocks():
    model = build(image_size=56)
    order = model.visible_blocks(torch.arange(300), 39, seed=3, mask=0)
    assert torch.equal(order.sort(1).values, torch.arange(196).expand(300, -1))
    scattered = order.gather(1, torch.rand(300, 196).argsort(1))  # the same number at random
    for ids, whole_blocks in ((order, True), (scattered, False)):
        visible = torch.zeros(300, 196).scatter(1, ids[:, :39], 1).view(300, 1, 14, 14)
        whole = F.conv2d(visible, torch.ones(1, 1, 3, 3)).eq(9).any((1, 2, 3)).float().mean()
        assert whole > 0.95 if whole_blocks else whole < 0.05


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_blocks_are_those_of_plain_loops(length):
    """At the border they are cut off, which is where the authors' clamp leaves them."""
    (rows, columns), visible = (6, 7), 8
    model = build(image_size=(24, 28), block=length)
    order = model.visible_blocks(torch.arange(50), visible, seed=0, mask=2)
    blocks = max(1, int(42 * (visible / 42 + 0.07) / length**2))
    centers = (uniform(0, "block centres", torch.arange(50), blocks, 2) * 42).long().tolist()
    for image, of_image in enumerate(centers):
        inside = set()
        for center in of_image:
            for i, j in itertools.product(range(length), repeat=2):
                y = min(max(center // columns + i - length // 2, 0), rows - 1)
                x = min(max(center % columns + j - length // 2, 0), columns - 1)
                inside.add(y * columns + x)
        first = set(order[image, :visible].tolist())
        assert first <= inside if len(inside) >= visible else inside <= first


@pytest.mark.parametrize(("masked", "count"), [(0.8, 10), (0.01, 1), (0.99, 11)])
def test_each_mask_hides_as_many_patches(masked, count):
    noise = build(masked=masked).sample(torch.arange(40), seed=7)
    assert noise.masked_ids.shape == (40, 3, count)
    assert torch.equal(torch.cat(noise, 2).sort(2).values, torch.arange(12).expand(40, 3, -1))


def convolution(grid: torch.Tensor, layer) -> torch.Tensor:
    """(y, x, d) -> (y, x, e), tap by tap, with zeros around it."""
    height, width, _ = grid.shape
    e, d, kernel, _ = layer.weight.shape  # d: input channels of a group
    group = e // layer.groups
    out = layer.bias.expand(height, width, e).clone()
    for y, x, i, j in itertools.product(range(height), range(width), range(kernel), range(kernel)):
        yy, xx = y + i - kernel // 2, x + j - kernel // 2
        if 0 <= yy < height and 0 <= xx < width:
            inputs = [grid[yy, xx, o // group * d : (o // group + 1) * d] for o in range(e)]
            taps = torch.stack([layer.weight[o, :, i, j] @ inputs[o] for o in range(e)])
            out = out.index_put((torch.tensor(y), torch.tensor(x)), taps, accumulate=True)
    return out


def normed(x: torch.Tensor, dim: int) -> torch.Tensor:
    mean = x.mean(dim, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(dim, keepdim=True) + 1e-5).sqrt()


def by_loops(model: Latent, images: torch.Tensor, noise: Masks) -> torch.Tensor:
    """The loss, image by image and mask by mask."""
    d, losses, tokens = model.encoder.width, [], []
    for image, visibles, maskeds in zip(images, *noise, strict=True):
        with torch.no_grad():
            layers = list(model.teacher.module.layers(image[None]))[-model.options.layers :]
            targets = normed(sum(normed(layer[0, 1:], 0) for layer in layers) / len(layers), 1)
        for visible, masked in zip(visibles, maskeds, strict=True):
            encoded = model.encoder.encode(model.encoder.embed(image[None])[:, visible], patch_ids=visible[None])[0]
            x = torch.zeros(12, d, dtype=encoded.dtype).index_put((visible,), encoded[1:])
            for layer in model.decoder.layers:
                changed = F.gelu(normed(convolution(x.view(3, 4, -1), layer).flatten(0, 1), 1))
                x = changed + x if changed.shape == x.shape else changed
            for place in masked:
                guess = model.decoder.head.weight @ x[place] + model.decoder.head.bias
                losses.append((guess - targets[place]).square().sum() / math.sqrt(d))
            tokens.append((encoded[0] - targets.mean(0)).square().sum() / math.sqrt(d))
    return sum(losses) / len(losses) + model.options.class_token_weight * sum(tokens) / len(tokens)


def test_loss_and_gradients_equal_loops_in_float64():
    model, images = build().double(), pictures(2)
    noise = model.sample(torch.arange(2), seed=4)
    loss, expected = model(Batch.of_view(images), noise)["loss"], by_loops(model, images, noise)
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=0)
    weights = [p for p in model.parameters() if p.requires_grad]
    gradients = (torch.autograd.grad(value, weights, allow_unused=True) for value in (loss, expected))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-9)


def test_one_pass_of_the_teacher_serves_all_masks():
    model, calls = build(), []
    for name, encoder in (("teacher", model.teacher.module), ("student", model.encoder)):
        encoder.blocks[-1].register_forward_hook(lambda m, i, out, name=name: calls.append((name, out.shape[:2])))
    model(Batch.of_view(pictures()), model.sample(torch.arange(5), seed=0))
    assert calls == [("teacher", (5, 13)), ("student", (15, 4))]


def test_without_a_class_token_only_patches_are_predicted():
    model = build(class_token=False, pooling="patch_mean", class_token_weight=0)
    result = model(Batch.of_view(pictures()), model.sample(torch.arange(5), seed=0))
    assert result["loss"].item() == result["patch_loss"].item()
