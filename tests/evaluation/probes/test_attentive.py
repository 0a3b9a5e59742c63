"""The attentive probe: its pooling against plain loops, what it finds that a mean hides, the same bits each time."""

import math
from itertools import pairwise

import pytest
import torch
from sklearn.metrics import average_precision_score

from ssvit.evaluation.features import Features, Half
from ssvit.evaluation.probes import linear
from ssvit.evaluation.probes.attentive import Attentive, Heads, Scaled, losses, share
from ssvit.evaluation.probes.base import check_labels
from ssvit.evaluation.probes.logistic import Logistic

CLASSES = ("a", "b", "c")


def hidden(images, seed, *, width=12):
    """One patch, marked by its first feature, tells the class; the same feature has any value in all other patches."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % 3
    values = torch.randn(images, 4, 4, width, generator=generator)
    values[..., 0] = 0
    rows, patch = torch.arange(images), torch.randint(16, (images,), generator=generator)
    flat = values.flatten(1, 2)
    flat[rows, patch, 0] = 8
    flat[rows, patch, 1:4] = 3 * torch.eye(3)[labels]
    return Features(flat.unflatten(1, (4, 4)).half(), labels, CLASSES)


def plain(heads, place, image):
    """Attention with keys and values of every patch, head by head and patch by patch, in float64: (n, d) -> (k,)."""
    width, count = image.shape[1], heads.heads
    size = width // count
    vector = torch.zeros(width, dtype=torch.float64)
    query, key, value = (getattr(heads, name)[place].double() for name in ("query", "key", "value"))
    for head in range(count):
        own = slice(head * size, (head + 1) * size)
        scores = [(query[own] * (key[own] @ patch + 0.3)).sum() / math.sqrt(size) for patch in image]  # 0.3: a bias
        weights = torch.stack(scores).softmax(0)
        for weight, patch in zip(weights, image, strict=True):
            vector[own] += weight * (value[own] @ patch + heads.value_bias[place].double()[own])
    return heads.classifier[place].double() @ vector + heads.bias[place].double()


@pytest.mark.parametrize(("width", "count"), [(128, 2), (48, 1), (100, 1)])
def test_heads_are_attention_with_keys_and_values_of_every_patch(width, count):
    generator = torch.Generator().manual_seed(0)
    heads = Heads(width, 5, count=3, generator=generator)
    assert heads.heads == count
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))
    images = torch.randn(2, 6, width, generator=generator)
    found = heads(images, [2, 0])
    assert found.shape == (2, 2, 5)
    for image, logits in zip(images.double(), found, strict=True):
        for place, row in zip((2, 0), logits, strict=True):
            torch.testing.assert_close(row.double(), plain(heads, place, image), rtol=1e-4, atol=1e-5)


def test_patches_are_scaled_by_those_of_the_images_trained_on():
    values = torch.randn(30, 2, 3, 5, generator=torch.Generator().manual_seed(0)) * 7 + 2
    values[..., 4] = 1.5  # the same everywhere
    trained = torch.arange(20)
    scaled = Scaled.of(values, trained, standardize=True)(values, trained).flatten(0, 1)
    torch.testing.assert_close(scaled.mean(0), torch.zeros(5), rtol=0, atol=1e-5)
    torch.testing.assert_close(scaled.std(0, correction=0), torch.tensor([1.0, 1, 1, 1, 0]), rtol=1e-5, atol=0)
    as_it_is = Scaled.of(values, trained, standardize=False)(values, trained)
    assert torch.equal(as_it_is, values[trained].flatten(1, 2))


def test_learning_rates_rise_and_fall():
    shares = [share(step, 100) for step in range(100)]
    assert shares[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert shares[10] == 1
    assert shares[55] == pytest.approx(0.5)
    assert all(later < sooner for sooner, later in pairwise(shares[10:]))


def test_it_finds_what_the_mean_over_the_patches_hides():
    train, test = hidden(600, 0), hidden(300, 1)
    probe = Attentive(learning_rates=[3e-3, 1e-2, 3e-2], weight_decays=[5e-4], epochs=30, batch_size=64)
    found = probe(train, test)
    means = [Features(of.values.float().mean((1, 2)), of.labels, CLASSES) for of in (train, test)]
    of_means = Logistic(l2s=[1e-3, 1e-2, 1e-1])(*means)
    assert found.scores["test"] > 0.95
    assert of_means.scores["test"] < 0.7
    assert found.per_image.mean().item() == found.scores["test"]
    # Chosen on the held-out training images alone.
    grid = found.numbers["validation_grid"]
    assert found.choice[0] == max(grid) == found.scores["validation"]
    rates = [rate for (rate, _), accuracy in zip(found.numbers["grid"], grid, strict=True) if accuracy == max(grid)]
    assert found.numbers["learning_rate"] in rates


def several(images, seed, *, width=12):
    """Each class is there or not, and marked by a patch of its own, whose first feature tells it from the others."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.rand(images, 3, generator=generator) < 0.5
    flat = torch.randn(images, 16, width, generator=generator)
    flat[..., 0] = 0
    for image in range(images):
        patches = torch.randperm(16, generator=generator)
        for number in labels[image].nonzero()[:, 0].tolist():
            flat[image, patches[number], 0] = 8
            flat[image, patches[number], 1:4] = 3 * torch.eye(3)[number]
    return Features(flat.unflatten(1, (4, 4)).half(), labels, CLASSES)


def test_images_of_several_classes_are_measured_by_their_average_precision(monkeypatch):
    train, test = several(600, 0), several(300, 1)
    seen = []
    original = linear.score_several
    monkeypatch.setattr(linear, "score_several", lambda *given: seen.append(given) or original(*given))
    probe = Attentive(learning_rates=[1e-2, 3e-2], weight_decays=[5e-4], epochs=30, batch_size=64)
    check_labels(probe, train.labels, test.labels, CLASSES)
    found = probe(train, test)
    logits, truth = seen[-1]
    means = [Features(of.values.float().mean((1, 2)), of.labels, CLASSES) for of in (train, test)]
    of_means = Logistic(l2s=[1e-3, 1e-2, 1e-1])(*means)
    assert found.scores["test"] > 0.98
    assert found.scores["test"] > of_means.scores["test"]
    assert truth.equal(test.labels)
    expected = [average_precision_score(truth[:, k].numpy(), logits[:, k].numpy()) for k in range(3)]
    assert found.scores["test"] == pytest.approx(sum(expected) / 3)
    assert found.per_image is None
    assert found.choice[0] == max(found.numbers["validation_grid"]) == found.scores["validation"]


def test_losses_are_those_of_softmax_or_of_sigmoids():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 2, 3, generator=generator)
    labels, truth = torch.arange(7) % 3, torch.rand(7, 3, generator=generator) < 0.5
    for b in range(7):
        for r in range(2):
            row = logits[b, r].double()
            one = -torch.log(row.exp() / row.exp().sum())[labels[b]]
            share = 1 / (1 + torch.exp(-row))
            many = -torch.where(truth[b], share, 1 - share).log().sum()
            assert losses(logits, labels)[b, r].item() == pytest.approx(one.item(), rel=1e-5)
            assert losses(logits, truth)[b, r].item() == pytest.approx(many.item(), rel=1e-5)


def test_a_classifier_does_not_depend_on_the_others_of_its_grid():
    train, test = hidden(90, 0), hidden(30, 1)
    both, alone = (
        Attentive(weight_decays=[5e-4], epochs=2, batch_size=16, learning_rates=rates)(train, test).numbers
        for rates in ([1e-2, 1e-1], [1e-2])
    )
    assert alone["validation_grid"] == both["validation_grid"][:1]


def test_half_keeps_the_features_in_sixteen_bits():
    class Doubled:
        def __init__(self):
            self.identity, self.identities = "doubled", {"x": "doubled x"}

        def __call__(self, images):
            return {"x": 2 * images}

    half = Half(Doubled())
    assert half.identities == {"x": "doubled x in float16"}
    found = half(torch.rand(3, 4))["x"]
    assert found.dtype == torch.float16
