"""The loss of images of several classes equals a plain loop, and MixUp mixes the targets."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ssvit.data.batch import Batch
from ssvit.models import vit_options
from ssvit.models.vit import ViT
from ssvit.objectives import classify_options
from ssvit.objectives.classify import Classify, balanced
from ssvit.options import OptionError

CLASSES = ("cat", "dog", "owl", "yak")


def marks(count: int, seed: int = 0, share: float = 0.35) -> Tensor:
    """(count, 4) bool."""
    return torch.rand(count, 4, generator=torch.Generator().manual_seed(seed)) < share


def vit(pooling: str = "patch_mean") -> ViT:
    torch.manual_seed(0)
    return ViT(vit_options.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp_width=32, pooling=pooling))


def classifier(**options: object) -> Classify:
    torch.manual_seed(0)
    objective = Classify(classify_options.Classify(classes=CLASSES, loss="multi_label", **options), encoder=vit())
    torch.nn.init.normal_(objective.head.weight)
    return objective


def batch(count: int = 6) -> Batch:
    images = torch.randint(256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Batch.of(images, marks(count))


def test_the_loss_is_binary_cross_entropy_over_the_classes() -> None:
    given = batch()
    weights = [2.0, 0.5, 1.0, 3.0]
    for options, factors in (({}, [1.0] * 4), ({"class_weights": weights}, weights)):
        objective = classifier(**options).eval()
        logits = objective.logits(given.images).tolist()
        total = 0.0
        for row, own in zip(logits, given.labels.tolist(), strict=True):
            for logit, present, factor in zip(row, own, factors, strict=True):
                p = 1 / (1 + np.exp(-logit))
                total -= factor * np.log(p) if present else np.log(1 - p)
        found = objective(given)
        assert found["loss"].item() == pytest.approx(total / 6, rel=1e-5)
        exact = ((torch.tensor(logits) > 0) == given.labels).all(1).float().mean()
        assert found["exact_match"].item() == pytest.approx(exact.item())
    assert objective.probabilities(torch.tensor([[0.0, 2.0]])).tolist()[0] == pytest.approx([0.5, 0.880797])
    counts = given.labels.sum(0)
    assert balanced(given.labels, 4) == [(6 - n) / n if n else 0.0 for n in counts.tolist()]


def test_mixing_mixes_the_rows() -> None:
    objective, given = classifier(mixup=0.4).train(), batch()
    torch.manual_seed(3)
    images, shares = objective._mix(given.images, given.labels)
    share = (
        (shares - given.labels.roll(1, 0).float()) / (given.labels.float() - given.labels.roll(1, 0).float())
    ).nanmean()
    assert shares.allclose(share * given.labels + (1 - share) * given.labels.roll(1, 0), atol=1e-6)
    assert images.allclose(share * given.images / 255 + (1 - share) * given.images.roll(1, 0) / 255, atol=1e-5)
    assert objective(given)["loss"].isfinite()


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(OptionError, match=r"label_smoothing=0\.1: "):
        classifier(label_smoothing=0.1)
    with pytest.raises(OptionError, match="distillation"):
        classifier(distillation={})
