"""The segmentation probe: equal to plain loops in float64; ignored pixels have no effect."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from command import TINY, tiny_options
from composing import untrained
from PIL import Image
from plots import Page
from scipy.ndimage import zoom
from sklearn.metrics import jaccard_score

from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources.base import Data, Unreadable
from ssvit.data.sources.memory import Memory
from ssvit.errors import UserError
from ssvit.evaluation.features import Features, Frozen, PatchPixels
from ssvit.evaluation.options import FeatureSpec
from ssvit.evaluation.probes.options import Segmentation
from ssvit.evaluation.probes.segmentation import class_shares, label, mean_iou
from ssvit.evaluation.report import frozen
from ssvit.models.vit_options import ViT

K, GRID, SIZE = 4, (3, 2), (12, 8)
FEW = {"train_images": 20, "test_images": 20, "l2s": [0.1, 1e-3]}


def random_masks(count: int, seed: int) -> torch.Tensor:
    """Return blobs of the first classes; some of their pixels are ignored."""
    blobs = tiny.noise(count, K, *GRID, seed=seed)
    masks = F.interpolate(blobs, size=SIZE, mode="bilinear").argmax(1).to(torch.uint8)
    return masks.masked_fill(tiny.noise(count, *SIZE, seed=seed + 1) > 1, 255)


def features(count: int, seed: int, noise: float = 0.8) -> Features:
    masks = random_masks(count, seed)
    values = F.pad(class_shares(masks, GRID, K), (0, 3)) + noise * tiny.noise(count, *GRID, K + 3, seed=seed + 2)
    return Features(values, None, (), masks)


def plain_shares(masks: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Class frequencies by loops; patches that do not divide a mask overlap by the pixels that they share."""
    bounds = [
        [(place * side // count, -(-(place + 1) * side // count)) for place in range(count)]
        for side, count in zip(SIZE, grid, strict=True)
    ]
    shares = torch.zeros(len(masks), *grid, K, dtype=torch.float64)
    for i, mask in enumerate(masks):
        for (y, (top, bottom)), (x, (left, right)) in product(*map(enumerate, bounds)):
            counted = [pixel for pixel in mask[top:bottom, left:right].flatten().tolist() if pixel != 255]
            shares[i, y, x] = torch.tensor([counted.count(number) / max(1, len(counted)) for number in range(K)])
    return shares


def plain_iou(answers: torch.Tensor, masks: torch.Tensor) -> float:
    counted = masks != 255
    return jaccard_score(masks[counted].numpy(), answers[counted].numpy(), average="macro")


def plain_label(scores: torch.Tensor) -> torch.Tensor:
    """Bilinear interpolation between the centres of patches by scipy."""
    factors = (1, SIZE[0] // GRID[0], SIZE[1] // GRID[1], 1)
    large = zoom(scores.double().numpy(), factors, order=1, mode="nearest", grid_mode=True)
    return torch.from_numpy(large.argmax(-1)).to(torch.uint8)


def test_mean_iou_is_that_of_a_loop_over_pixels():
    answers, masks = random_masks(5, 1), random_masks(5, 4)
    answers[answers == 255] = 0
    assert mean_iou(answers, masks, K) == pytest.approx(plain_iou(answers, masks))
    answers[answers == 3], masks[masks == 3] = 0, 1  # a class that neither has
    assert mean_iou(answers, masks, K) == pytest.approx(plain_iou(answers, masks))
    assert mean_iou(torch.where(masks == 255, 0, masks), masks, K) == 1


def test_shares_and_labels_are_those_of_loops():
    masks = random_masks(3, 2)
    masks[0, :4, :4] = 255
    assert class_shares(masks, GRID, K)[0, 0, 0].sum() == 0
    for grid in (GRID, (5, 3)):
        torch.testing.assert_close(class_shares(masks, grid, K).double(), plain_shares(masks, grid))
    scores = tiny.noise(3, *GRID, K)
    assert torch.equal(label(scores, SIZE), plain_label(scores))


def test_the_layer_is_the_optimum_in_float64():
    train = features(12, 30)
    train.masks[1] = 255
    shares = class_shares(train.masks, GRID, K)
    (layer,) = Segmentation(**FEW).build().fit(train.values, shares, [0.01])
    counts = shares.sum(-1) > 0
    x, y = train.values[counts].double(), shares[counts].double()
    x = (x - x.mean(0)) / x.std(0, correction=0)
    weights = torch.zeros(K, x.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    descent = torch.optim.LBFGS([weights], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss():
        descent.zero_grad()
        value = -(y * (x @ weights[:, :-1].T + weights[:, -1]).log_softmax(1)).sum(1).mean()
        value = value + 0.005 * weights[:, :-1].square().sum()
        value.backward()
        return value

    descent.step(loss)
    expected = (x @ weights[:, :-1].T + weights[:, -1]).softmax(1).detach()
    torch.testing.assert_close(layer(train.values)[counts].softmax(-1).double(), expected, rtol=1e-3, atol=1e-4)


def test_the_columns_are_those_of_plain_answers():
    train, test = features(20, 40), features(8, 50)
    probe = Segmentation(**FEW).build()
    found = probe(train, test)
    shares = class_shares(train.masks, GRID, K)
    most = int(torch.bincount(train.masks[train.masks != 255].long()).argmax())
    (layer,) = probe.fit(train.values, shares, [found.numbers["l2"]])
    expected = {"constant": torch.full_like(test.masks, most), "linear": plain_label(layer(test.values))}
    assert list(found.scores) == list(expected)
    for name, answers in expected.items():
        assert found.scores[name] == pytest.approx(plain_iou(answers, test.masks), abs=0.01)
    assert found.numbers["l2"] in FEW["l2s"]
    assert plain_iou(found.predictions, test.masks) == pytest.approx(found.scores["linear"])
    assert found.scores["constant"] < found.scores["linear"]


def test_pixels_that_do_not_count_change_nothing():
    train, test = features(20, 60), features(8, 70)
    hidden = test.masks == 255
    answers = Segmentation(**FEW).build()(train, test).predictions
    other = torch.where(hidden, (answers + 1) % K, answers)
    assert mean_iou(answers, test.masks, K) == mean_iou(other, test.masks, K)
    # A patch whose pixels are all ignored has no effect on the fit, whatever its features are.
    train.masks[:, :4, :4] = 255
    loud = train.values.clone()
    loud[:, 0, 0] = 1e3
    shares = class_shares(train.masks, GRID, K)
    fits = [Segmentation(**FEW).build().fit(values, shares, [0.1])[0].weights for values in (train.values, loud)]
    assert torch.equal(*fits)


@pytest.mark.parametrize("seed", [0, 1])
def test_images_without_labelled_pixels_change_nothing(seed):
    train, test = features(20, 60), features(8, 70)
    masks = torch.cat([train.masks, torch.full((40, *SIZE), 255, dtype=torch.uint8)])
    sparse = Features(torch.cat([train.values, tiny.noise(40, *train.values.shape[1:])]), None, (), masks)
    alone, together = (Segmentation(**FEW, seed=seed).build()(part, test) for part in (train, sparse))
    assert together.numbers == alone.numbers
    sparse.masks[1:] = 255
    with pytest.raises(UserError, match=r"\bmasks\b"):
        Segmentation(**FEW, seed=seed).build()(sparse, test)


@pytest.mark.parametrize("images", [120, 20])
def test_images_with_unreadable_masks_are_left_out_up_to_one_in_a_hundred(images):
    class Damaged(Memory):
        def mask(self, index):
            if index == 0:
                raise Unreadable(f"{index}.png", "damaged")
            return super().mask(index)

    masks = torch.arange(images, dtype=torch.uint8)[:, None, None].expand(-1, 4, 4) % 3
    train = Damaged(torch.zeros(images, 3, 4, 4, dtype=torch.uint8), masks=masks)
    test = Memory(train.in_memory[:9], masks=masks[:9])
    view = CenterCrop(size=4, resize=None)
    encoder = frozen.Evaluated("", "", PatchPixels((2, 2)), view, view, Data(train, None, test, ()))
    if images < 100:
        with pytest.raises(UserError, match=r"^1 of 20 "):
            frozen._with_masks([encoder])
        return
    (found,), (of_train, of_test) = frozen._with_masks([encoder])
    assert torch.equal(of_train, masks[1:])
    assert torch.equal(of_test, masks[:9])
    assert (len(found.data.train), len(found.data.test)) == (images - 1, 9)


def test_patch_features_lie_where_the_patches_do():
    torch.manual_seed(0)
    encoder = ViT(image_size=[8, 12], patch_size=4, width=16, depth=2, heads=2, class_token=True).build().eval()
    images = torch.randint(256, (3, 3, 8, 12), dtype=torch.uint8)
    function = Frozen(encoder, [FeatureSpec(2, "patches")], identity="x")
    found = function(images)["layer2_patches"]
    assert found.shape == (3, 2, 3, 16)
    torch.testing.assert_close(found.flatten(1, 2), encoder(images)[:, 1:])
    pixels = PatchPixels((4, 4))(images)["pixels"]
    assert torch.equal(pixels[1, 1, 2], images[1, :, 4:, 8:].flatten() / 255)


@pytest.mark.parametrize(
    ("values", "expected"), [((0, 255), True), ((0, 1, 255), False), ((0, 1), False), ((0,), False)]
)
def test_masks_whose_only_other_value_is_ignored_are_recognised(values, expected):
    masks = torch.tensor(values, dtype=torch.uint8).repeat(20, 6, 1)
    assert frozen.has_one_class(Memory(torch.zeros(20, 3, 6, len(values)), masks=masks)) is expected


def test_masks_of_one_class_are_told():
    train = features(4, 0)
    train.masks[:] = 0
    with pytest.raises(UserError, match=r"\bmasks\b"):
        Segmentation(**FEW).build()(train, train)


QUICK = (
    "probes=[segmentation]", "probes.segmentation.l2s=[0.1]",
    "probes.segmentation.train_images=12", "probes.segmentation.test_images=6", "launch.accelerator=cpu",
)  # fmt: skip


def test_measures_the_rendered_shapes(call, tmp_path):
    run = untrained(tmp_path / "outputs" / "run", *TINY)
    call("evaluate", f"checkpoint={run}", *QUICK, "probes=[knn,segmentation]", "probes.knn.k=3", "output=report")
    knn, found = json.loads((tmp_path / "report" / "report.json").read_text())["measured"]
    assert (knn["measure"], found["measure"]) == ("knn", "segmentation")
    assert list(found["values"]) == ["layer2_patches", "random_layer2_patches", "pixels"]
    assert (found["best"], found["chance"]) == ("layer2_patches", None)
    figures = [image["alt"] for image in Page((tmp_path / "report" / "report.html").read_text()).all("img")]
    assert any("masks" in title for title in figures)


def picture_folder(folder: Path, *, masks: bool) -> list[str]:
    """Bright squares on dark ground, without labels."""
    numbers = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir()
    for place in range(20):
        mask = np.zeros((20, 24), dtype=np.uint8)
        y, x = numbers.integers(0, 12, 2)
        mask[y : y + 8, x : x + 8] = 1
        pixels = numbers.integers(0, 60, (20, 24, 3)) + 150 * mask[:, :, None]
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / f"{place}.png")
        mask[0] = 255
        Image.fromarray(mask).save(folder / "masks" / f"{place}.png")
    return ["data=folder", f"data.root={folder}/images", "data.image_size=16", "data.held_out=0.3"] + (
        [f"data.masks={folder}/masks"] if masks else []
    )


def test_measures_a_folder_with_masks(tool, tmp_path):
    data = picture_folder(tmp_path, masks=True)
    model = tiny_options("data")
    tool("pretrain", *model, *data, "probes=[knn,segmentation]", "name=run", "recipe.steps=3")
    assert '"probe/' not in (tmp_path / "outputs" / "run" / "metrics.jsonl").read_text()  # there are no labels
    tool("evaluate", *QUICK, *data, "figures=none", f"output={tmp_path}/report")
    (found,) = json.loads((tmp_path / "report" / "report.json").read_text())["measured"]
    constant, linear = found["values"]["pixels"]
    assert linear > constant
    assert found["numbers"]["pixels"]["classes"] == 2
    failed = tool("evaluate", *QUICK, *data[:-1], status=1)
    (line,) = failed.stderr.splitlines()
    assert "data.masks=PATH" in line
