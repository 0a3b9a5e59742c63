"""Evaluation images that were in the pre-training: how many are counted, and with what certainty."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binom

from ssvit.data.fingerprints import BYTES, CONTENT, fingerprints
from ssvit.data.sources.memory import Memory
from ssvit.evaluation.duplicates import Grey, Thumbnails, duplicates
from ssvit.evaluation.leakage import Overlap, fingerprints_of, overlap, sentence


def smooth(count, seed):
    coarse = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return (F.interpolate(coarse, size=48, mode="bicubic").clamp(0, 1) * 255).to(torch.uint8)


def of_one_kind(count, seed):
    """Pictures of one shape that differ by weak noise."""
    noise = torch.randn(count, 3, 48, 48, generator=torch.Generator().manual_seed(seed))
    return (smooth(1, 99).float() + 2 * noise).clamp(0, 255).to(torch.uint8)


def brighter(images):
    return (images.float() * 0.8 + 25).to(torch.uint8)


def counted(recorded, evaluated):
    return overlap(fingerprints(recorded).numpy(), fingerprints(evaluated).numpy())


@pytest.mark.parametrize("share", [0, 0.1, 1])
@pytest.mark.parametrize("change", [lambda images: images, brighter])
def test_a_known_overlap_is_counted(share, change):
    recorded, evaluated = smooth(300, 0), smooth(100, 1)
    count = round(share * 100)
    evaluated[:count] = change(recorded[:count])
    found = counted(recorded, evaluated)
    assert found.seen.tolist() == [True] * count + [False] * (100 - count)
    assert int(found.identical.sum()) == (0 if change is brighter else count)
    assert found.recorded == 300


def test_of_images_of_one_kind_only_identical_ones_are_counted():
    recorded, evaluated = of_one_kind(300, 0), of_one_kind(100, 1)
    evaluated[:5], evaluated[5:10] = recorded[:5], brighter(recorded[5:10])
    found = counted(recorded, evaluated)
    assert (found.bits, f"{100 * found.false_matches:.1f} %" in sentence(found.values({}), "test")) == (0, False)
    assert found.identical.tolist() == [True] * 5 + [False] * 95
    assert int(found.similar[10:].sum()) <= 1


def test_the_limit_of_false_matches_is_that_of_the_binomial_distribution():
    recorded = fingerprints(smooth(300, 0)).numpy()
    evaluated = fingerprints(smooth(100, 1)).numpy()
    found = overlap(recorded, evaluated)
    assert binom.cdf(0, 100, found.false_matches) == pytest.approx(0.05)
    copies = np.repeat(evaluated[:50], 2, axis=0)  # the second nearest image is as near as the first
    copies[::2, :CONTENT] += 1
    assert overlap(copies, evaluated).false_matches == pytest.approx(1.0, abs=0.7)


def test_images_that_were_recorded_twice_are_counted_once():
    recorded, evaluated = smooth(300, 0), smooth(100, 1)
    evaluated[:5], evaluated[5:10] = recorded[:5], brighter(recorded[5:10])
    once, again = (fingerprints(images).numpy() for images in (recorded, recorded.flip(0)))
    prints = fingerprints(evaluated).numpy()
    one, two = overlap(once, prints), overlap(np.concatenate([once, again]), prints)
    assert (two.values({}), two.seen.tolist()) == (one.values({}), one.seen.tolist())
    assert int(two.seen.sum()) == 10


def test_near_duplicates_of_training_images_are_the_same_for_each_pretraining():
    detail = torch.rand(400, 3, 20, 20, generator=torch.Generator().manual_seed(5))
    images = smooth(400, 0) // 2 + (100 * F.interpolate(detail, size=48, mode="bicubic").clamp(0, 1)).to(torch.uint8)
    train, test, others = images[:300], images[300:350], images[350:]
    test[:4], test[4:8] = train[:4], brighter(train[4:8])
    cropped = F.interpolate(train[8:12, :, 1:47, 1:47].float(), size=48, mode="bilinear")
    test[8:12] = cropped.round().to(torch.uint8)
    thumbnails = (Thumbnails()(of_split)["thumbnails"] for of_split in (train, test))
    pairs = duplicates(*thumbnails, lambda which, rows: Grey()((train if which == "train" else test)[rows])["grey"])
    assert sorted(pair.test for pair in pairs) == list(range(12))
    known, shown, rest = (fingerprints(part).numpy() for part in (train, test, others))
    for recorded in (known, np.concatenate([known, known]), np.concatenate([known, rest])):
        assert overlap(recorded, shown, known, pairs).seen.tolist() == [True] * 12 + [False] * 38
    assert overlap(rest, shown, known, pairs).seen.tolist() == [False] * 50
    fewer = overlap(known[2:9], shown, known, pairs)
    assert fewer.seen.nonzero()[:, 0].tolist() == list(range(2, 9))


def test_a_near_duplicate_is_counted_if_a_training_image_is_even_nearer():
    recorded, evaluated = (fingerprints(images).numpy() for images in (smooth(300, 0), smooth(300, 1)))
    evaluated[0] = recorded[0]
    evaluated[0, :CONTENT] += 1  # another content with an equal perceptual hash
    recorded[1, CONTENT:] = recorded[0, CONTENT:]
    recorded[1, CONTENT] ^= 1  # one bit further
    assert overlap(recorded, evaluated, recorded[:1]).similar.tolist() == [True] + [False] * 299
    assert not overlap(recorded, evaluated, recorded[:2]).similar.any()
    assert not overlap(recorded, evaluated, recorded).similar.any()


def test_rows_of_images_that_were_not_shown_are_ignored():
    recorded = fingerprints(smooth(20, 0)).numpy()
    recorded[10:] = 0
    found = overlap(recorded, fingerprints(smooth(20, 0)).numpy())
    assert found.recorded == 10
    assert found.seen.tolist() == [True] * 10 + [False] * 10
    nothing = overlap(np.zeros((4, BYTES), np.uint8), recorded)
    assert (nothing.recorded, int(nothing.seen.sum()), nothing.false_matches) == (0, 0, 1.0)


def test_scores_are_given_with_and_without_the_images():
    found = Overlap(9, torch.tensor([True, False, False, False]), torch.tensor([False, True, False, False]), 5, 0.1)
    scores = {"a": torch.tensor([1.0, 1, 0, 1]), "b": None, "c": torch.ones(3)}
    values = found.values(scores)
    assert values["scores"] == {"a": {"all": 0.75, "without": 0.5}}
    assert (values["identical"], values["near_duplicates"], values["images"]) == (1, 1, 4)
    text = sentence(values, "test")
    assert "50.0 %" in text
    assert "75.0 %" in text
    assert "50.0 %" not in sentence({**values, "identical": 0, "near_duplicates": 0}, "test")


def test_a_report_states_that_all_images_were_in_the_pretraining():
    found = counted(smooth(40, 0), smooth(40, 0)[:12])
    values = json.loads(json.dumps(found.values({"top-1": torch.ones(12)}), allow_nan=False))
    assert (values["identical"], values["scores"]) == (12, {})
    assert "12 of the 12 test images (100.0 %)" in sentence(values, "test")
    assert "nan" not in sentence(values, "test")


def test_images_of_a_source_have_the_fingerprints_of_their_pixels():
    images = smooth(30, 0)
    assert (fingerprints_of(Memory(images), torch.tensor([2, 29, 5])) == fingerprints(images[[2, 29, 5]]).numpy()).all()
