"""The attentive probe: its pooling against plain loops, what it finds that a mean hides, the same bits each time."""

import math
from itertools import pairwise

import pytest
import torch

from ssvit.evaluation.features import Features
from ssvit.evaluation.probes.attentive import AttentionPooling, rate_factor
from ssvit.evaluation.probes.options import Attentive, Logistic

CLASSES = ("a", "b", "c")


def hidden(images, seed, *, width=12):
    """Return features where one patch, marked by its first feature, determines the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % 3
    values = torch.randn(images, 4, 4, width, generator=generator)
    values[..., 0] = 0
    rows, patch = torch.arange(images), torch.randint(16, (images,), generator=generator)
    flat = values.flatten(1, 2)
    flat[rows, patch, 0] = 8
    flat[rows, patch, 1:4] = 3 * torch.eye(3)[labels]
    return Features(flat.unflatten(1, (4, 4)).half(), labels, CLASSES)


def plain(pooling, image):
    """Attention with keys and values of every patch, head by head and patch by patch, in float64: (n, d) -> (k,)."""
    query, key, value, bias = (
        parameter.double() for parameter in (pooling.query, pooling.key, pooling.value, pooling.value_bias)
    )
    pooled = []
    for head in range(len(query)):
        scores = [(query[head] * (key[head] @ patch + 0.3)).sum() / math.sqrt(query.shape[1]) for patch in image]
        weights = torch.stack(scores).softmax(0)  # 0.3: a bias of the keys
        pooled.append(sum(weight * (value[head] @ patch) for weight, patch in zip(weights, image, strict=True)))
    return pooling.classifier.double() @ (torch.cat(pooled) + bias) + pooling.bias.double()


@pytest.mark.parametrize(("width", "heads"), [(128, 2), (48, 1), (100, 1)])
def test_the_pooling_is_attention_with_keys_and_values_of_every_patch(width, heads):
    generator = torch.Generator().manual_seed(0)
    pooling = AttentionPooling(width, 5, generator)
    assert pooling.query.shape == (heads, width // heads)
    with torch.no_grad():
        for parameter in pooling.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))
    images = torch.randn(2, 6, width, generator=generator)
    for image, logits in zip(images.double(), pooling(images), strict=True):
        torch.testing.assert_close(logits.double(), plain(pooling, image), rtol=1e-4, atol=1e-5)


def test_learning_rates_rise_and_fall():
    shares = [rate_factor(step, 100) for step in range(100)]
    assert shares[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert shares[10] == 1
    assert shares[55] == pytest.approx(0.5)
    assert all(later < sooner for sooner, later in pairwise(shares[10:]))


def test_it_finds_what_the_mean_over_the_patches_hides():
    train, test = hidden(600, 0), hidden(300, 1)
    probe = Attentive(learning_rates=[3e-3, 1e-2, 3e-2], weight_decays=[5e-4], epochs=30, batch_size=64).build()
    found = probe(train, test)
    means = [Features(of.values.float().mean((1, 2)), of.labels, CLASSES) for of in (train, test)]
    of_means = Logistic(l2s=[1e-3, 1e-2, 1e-1]).build()(*means)
    assert found.scores["test"] > 0.95
    assert of_means.scores["test"] < 0.7
    assert found.per_image.mean().item() == found.scores["test"]
    # Chosen on the held-out training images alone.
    grid = found.numbers["validation_grid"]
    assert found.choice[0] == max(grid) == found.scores["validation"]
    assert found.numbers["grid"][grid.index(max(grid))]["weight_decay"] == 5e-4


def test_a_classifier_does_not_depend_on_the_others_of_its_grid():
    train, test = hidden(90, 0), hidden(30, 1)
    both, alone = (
        Attentive(weight_decays=[5e-4], epochs=2, batch_size=16, learning_rates=rates).build()(train, test).numbers
        for rates in ([1e-2, 1e-1], [1e-2])
    )
    assert alone["validation_grid"] == both["validation_grid"][:1]
