"""The panel that says whether a model learns: its baselines against plain loops, its numbers, words and pictures."""

import math
import re
from collections import Counter

import pytest
import torch

from ssvit.data.augment.crop import CenterCrop
from ssvit.data.batch import Batch
from ssvit.data.sources.memory import Memory
from ssvit.evaluation.panels import prediction_options
from ssvit.evaluation.panels.prediction import Prediction, describe
from ssvit.evaluation.panels.reconstruction import nearest_uncorrupted
from ssvit.figures.display import PLAIN
from ssvit.models import vit_options
from ssvit.models.vit import ViT
from ssvit.objectives import masked_patch_options
from ssvit.objectives.masked_patch import KINDS, MaskedPatch, Masking
from ssvit.objectives.targets import ColorGrid, MeanColor, Pixels

TARGETS = [MeanColor(patch_size=4), ColorGrid(patch_size=4, grid=2), Pixels(patch_size=4)]
IDS = [type(target).__name__ for target in TARGETS]
SIZE = (16, 24)


def smooth_images(count: int = 40, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, channels, 2, 3, generator=generator)
    fine = torch.nn.functional.interpolate(coarse, size=SIZE, mode="bilinear")
    return (fine * 255).to(torch.uint8)


def build(target=None, masking=None, channels: int = 3) -> MaskedPatch:
    torch.manual_seed(0)
    encoder = ViT(vit_options.ViT(image_size=SIZE, patch_size=4, width=24, depth=2, heads=3, channels=channels))
    target = target or MeanColor(patch_size=4, channels=channels)
    model = MaskedPatch(masked_patch_options.MaskedPatch(masking=masking or Masking()), encoder=encoder, target=target)
    torch.nn.init.normal_(model.head.weight)
    return model.eval()


def panel(pictures: torch.Tensor | None = None, **options) -> Prediction:
    source = Memory(smooth_images() if pictures is None else pictures)
    return Prediction(
        prediction_options.Prediction(**{"images": 40, "batch_size": 16} | options),
        source=source,
        transform=CenterCrop(size=SIZE),
    )


@pytest.mark.parametrize("grid", [(4, 4), (3, 7), (1, 9), (8, 8)])
@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.9])
def test_nearest_is_the_nearest_and_the_first_of_equals(grid, fraction):
    n = grid[0] * grid[1]
    at = Masking(corrupted=fraction).sample(torch.arange(30), seed=0, grid=grid).ids
    found = nearest_uncorrupted(at, grid)
    ties = 0
    for image in range(30):
        free = [place for place in range(n) if place not in at[image].tolist()]
        for place, answer in zip(at[image].tolist(), found[image].tolist(), strict=True):
            y, x = divmod(place, grid[1])
            distances = [math.dist((y, x), divmod(other, grid[1])) for other in free]
            assert answer == free[distances.index(min(distances))]
            ties += distances.count(min(distances)) > 1
    assert ties > 10 or fraction == 0.9


def test_nearest_of_none_is_an_error():
    with pytest.raises(ValueError, match="every patch is corrupted"):
        nearest_uncorrupted(torch.arange(4).expand(2, -1), (2, 2))


def numbers(model: MaskedPatch, images: torch.Tensor, seed: int) -> dict[str, float]:
    """The whole panel by loops over images and patches."""
    target, grid = model.target, model.encoder.grid
    draw = model.sample(torch.arange(len(images)), seed=seed)
    name = target.score_name
    losses, scores = {fate: [] for fate in KINDS}, {fate: [] for fate in KINDS}
    truth, copied = [], []
    for image in range(len(images)):
        one = images[image : image + 1]
        labels = target.labels(one)[0]
        own = type(draw)(*(choice[image : image + 1] for choice in draw))
        prediction = model.predict(one, own)[0]
        corrupted = own.ids[0].tolist()
        free = [place for place in range(grid[0] * grid[1]) if place not in corrupted]
        for rank, (place, fate) in enumerate(zip(corrupted, own.kind[0].tolist(), strict=True)):
            nearest = min(free, key=lambda other: math.dist(divmod(place, grid[1]), divmod(other, grid[1])))
            if isinstance(target, Pixels):
                error = (prediction[rank] - labels[place]).square().mean().item()
                losses[KINDS[fate]].append(error)
                scores[KINDS[fate]].append(error)
                copied.append((labels[nearest] - labels[place]).square().mean().item())
            else:
                logits = prediction[rank].view(-1, 512)
                chosen = logits.log_softmax(-1)[range(len(logits)), labels[place]]
                losses[KINDS[fate]].append(-chosen.mean().item())
                scores[KINDS[fate]].append((logits.argmax(-1) == labels[place]).double().mean().item())
                copied.append((labels[nearest] == labels[place]).double().mean().item())
            truth.append(labels[place].tolist())
    mean = {f"loss_{fate}": sum(values) / len(values) for fate, values in losses.items()}
    mean |= {f"{name}_{fate}": sum(values) / len(values) for fate, values in scores.items()}
    mean["loss"] = sum(map(sum, losses.values())) / len(truth)
    mean[name] = sum(map(sum, scores.values())) / len(truth)
    mean[f"{name}_copying"] = sum(copied) / len(copied)
    cells = list(zip(*truth, strict=True))
    if isinstance(target, Pixels):
        variances = []
        for cell in cells:
            middle = sum(cell) / len(cell)
            variances.append(sum((value - middle) ** 2 for value in cell) / len(cell))
        mean["loss_constant"] = mean[f"{name}_constant"] = sum(variances) / len(variances)
    else:
        counts = [Counter(cell) for cell in cells]
        entropies = [-sum(c / len(truth) * math.log(c / len(truth)) for c in count.values()) for count in counts]
        mean["loss_constant"] = sum(entropies) / len(entropies)
        mean[f"{name}_constant"] = sum(max(count.values()) for count in counts) / len(counts) / len(truth)
    return mean


@torch.no_grad()
@pytest.mark.parametrize("target", TARGETS, ids=IDS)
def test_measures_equal_loops(target):
    model = build(target)
    metrics = panel(seed=5)(model).metrics
    expected = numbers(model, smooth_images(), seed=5)
    assert metrics.keys() == expected.keys()
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


@torch.no_grad()
def test_measuring_again_asks_the_same_questions():
    model, prediction = build(), panel()
    first = prediction(model).metrics
    torch.manual_seed(77)
    assert prediction(model).metrics == first
    assert panel()(model).metrics == first
    assert panel(seed=1)(model).metrics["loss"] != first["loss"]


@torch.no_grad()
def test_a_better_model_measures_better_against_the_same_baselines():
    model, prediction = build(), panel()
    before = prediction(model).metrics
    with torch.enable_grad():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(60):
            optimizer.zero_grad()
            model(Batch.of(smooth_images()), model.sample(torch.arange(40) + 40 * step, seed=9))["loss"].backward()
            optimizer.step()
    after = prediction(model).metrics
    assert after["loss"] < before["loss"]
    assert after["accuracy"] > before["accuracy"] + 0.02
    baselines = {name for name in after if name.endswith(("constant", "copying"))}
    assert {name: after[name] for name in baselines} == {name: before[name] for name in baselines}


@torch.no_grad()
def test_no_copying_where_everything_is_corrupted_and_no_fate_that_does_not_occur():
    model = build(masking=Masking(corrupted=1.0, mask=1, replace=0, keep=0))
    prediction = panel()
    metrics = prediction(model).metrics
    assert not {name for name in metrics if "copying" in name or "unchanged" in name or "replaced" in name}
    assert all(math.isfinite(value) for value in metrics.values())
    lines = describe(metrics)
    assert not any("copying" in line for line in lines)


GOOD = {
    "loss": 2.5, "accuracy": 0.45, "loss_masked": 2.6, "accuracy_masked": 0.4, "accuracy_replaced": 0.41,
    "accuracy_unchanged": 0.9, "loss_constant": 4.3, "accuracy_constant": 0.06, "accuracy_copying": 0.33,
}  # fmt: skip
ERRORS = {
    "loss": 0.1, "squared_error": 0.1, "squared_error_masked": 0.12, "squared_error_replaced": 0.12,
    "squared_error_unchanged": 0.01, "loss_constant": 0.3, "squared_error_constant": 0.3, "squared_error_copying": 0.2,
}  # fmt: skip
ABSOLUTE = {name.replace("squared", "absolute"): value for name, value in ERRORS.items()}
CASES = [
    # changes to the metrics; then, of the lines on the loss, copying and the constant: side, and whether it is better
    (GOOD, {}, [("below", True), ("above", True), ("above", True)]),
    (GOOD, {"loss": 5.0}, [("above", False), ("above", True), ("above", True)]),
    (GOOD, {"accuracy_masked": 0.2}, [("below", True), ("below", False), ("above", True)]),
    (GOOD, {"accuracy_masked": 0.01}, [("below", True), ("below", False), ("below", False)]),
    (ERRORS, {}, [("below", True), ("below", True), ("below", True)]),
    (ERRORS, {"squared_error_masked": 0.25}, [("below", True), ("above", False), ("below", True)]),
    (ABSOLUTE, {}, [("below", True), ("below", True), ("below", True)]),
    (ERRORS, {"loss": 0.5, "squared_error_masked": 0.6}, [("above", False)] * 3),
]


@pytest.mark.parametrize(("metrics", "changes", "expected"), CASES)
def test_words_say_which_side_of_each_baseline_and_whether_that_is_good(metrics, changes, expected):
    lines = describe(metrics | changes)
    assert all("\n" not in line for line in lines)
    asked = [
        next(line for line in lines if line.startswith("loss")),
        next(line for line in lines if "copying" in line),
        next(line for line in lines if re.search("most frequent|mean patch|median patch", line)),
    ]
    for line, (side, good) in zip(asked, expected, strict=True):
        assert f": {side}, {'better than' if good else 'NO better than'} " in line
    passed = sum(good for _, good in expected)
    learned = "has learned to use the context" in lines[-1]
    assert learned == (passed == 3)
    assert learned or f"{passed} of 3" in lines[-1]


def test_what_equals_its_baseline_is_no_better():
    lines = describe(GOOD | {"loss": 4.3, "accuracy_masked": 0.33})
    assert [line for line in lines if "above" in line and "copying" in line] == []
    assert sum("NO better" in line for line in lines) == 2


@torch.no_grad()
def test_words_of_a_model_that_knows_nothing():
    model, prediction = build(), panel()
    torch.nn.init.zeros_(model.head.weight)
    metrics = prediction(model).metrics
    assert metrics["loss"] == pytest.approx(math.log(512), abs=1e-5)
    lines = describe(metrics)
    assert "NO better" in lines[0]
    assert "has not learned" in lines[-1]


@torch.no_grad()
@pytest.mark.parametrize(("count", "channels"), [(1, 3), (5, 1), (12, 4), (40, 3)])
def test_the_mosaic_shows_each_image_four_times_and_nothing_hidden(count, channels):
    target = MeanColor(patch_size=4, channels=channels, bits=2)
    pictures = smooth_images(count, channels)
    model, prediction = build(target, channels=channels), panel(pictures, images=count)
    mosaic = prediction(model, [{"step": 0}]).figures["mosaic"]
    shown = min(count, 12)
    chosen = [place * (count - 1) // max(shown - 1, 1) for place in range(shown)]
    images = PLAIN(pictures[chosen])
    draw = model.sample(torch.tensor(chosen), seed=0)
    painted = PLAIN(target.paint(target.labels(pictures[chosen])))
    original, corrupted, predicted, true = mosaic.columns.values()
    torch.testing.assert_close(original, images)
    assert set(mosaic.frames) | {"masked"} == set(mosaic.legend)
    for image in range(shown):
        kinds = dict(zip(draw.ids[image].tolist(), draw.kind[image].tolist(), strict=True))
        replacements = dict(zip(draw.ids[image].tolist(), draw.replacement[image].tolist(), strict=True))
        for place in range(24):
            here = (image, slice(None), *(slice(4 * at, 4 * at + 4) for at in divmod(place, 6)))
            torch.testing.assert_close(true[here], painted[image, place], check_dtype=False)
            kind = KINDS[kinds[place]] if place in kinds else ""
            framed = {name for name, frames in mosaic.frames.items() if frames[image].flatten()[place]}
            assert {name.split()[0].rstrip(",") for name in framed} == {kind} - {"", "masked"}
            if kind == "masked":
                assert corrupted[here].unique().numel() == 1
                continue
            source = replacements[place] if kind == "replaced" else place
            there = (image, slice(None), *(slice(4 * at, 4 * at + 4) for at in divmod(source, 6)))
            torch.testing.assert_close(corrupted[here], images[there])
            if not kind:
                torch.testing.assert_close(predicted[here], painted[image, place], check_dtype=False)
