"""Evaluations of predicted patches: their baselines and metrics equal plain loops, and mosaics show the corruption."""

import math
from collections import Counter

import pytest
import tiny
import torch

from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources.memory import Memory
from ssvit.evaluation.evaluators import latent, prediction
from ssvit.evaluation.evaluators.autoencoding import Autoencoding
from ssvit.evaluation.evaluators.latent import LatentPrediction
from ssvit.evaluation.evaluators.options import HeldOut
from ssvit.evaluation.evaluators.prediction import Prediction
from ssvit.evaluation.evaluators.reconstruction import nearest_uncorrupted
from ssvit.figures.display import PLAIN
from ssvit.models.vit import ViT
from ssvit.objectives import latent_options, mae_options, masked_patch_options
from ssvit.objectives.latent import Latent
from ssvit.objectives.mae import MAE
from ssvit.objectives.masked_patch import CORRUPTION_TYPES, MaskedPatch, sample_corruption
from ssvit.objectives.masked_patch_options import Masking
from ssvit.objectives.targets_options import MeanColor, Pixels

PARTS = (MeanColor(), MeanColor(grid=2), Pixels())
TARGETS = [part.build(encoder=tiny.patches(4)) for part in PARTS]
SIZE, GRID = (16, 24), (4, 6)


def smooth_images(count: int = 40, channels: int = 3) -> torch.Tensor:
    coarse = torch.rand(count, channels, 2, 3, generator=torch.Generator().manual_seed(0))
    return (torch.nn.functional.interpolate(coarse, size=SIZE, mode="bilinear") * 255).to(torch.uint8)


def encoder(channels: int = 3, **options) -> ViT:
    shape = {"image_size": SIZE, "patch_size": 4, "width": 24, "depth": 2, "heads": 2, "channels": channels}
    return tiny.vit(**shape | options)


def masked_patch(target=None, masking=None, channels: int = 3) -> MaskedPatch:
    options = masked_patch_options.MaskedPatch(masking=masking or Masking())
    target = target or MeanColor().build(encoder=tiny.patches(4, channels))
    model = MaskedPatch(options, encoder=encoder(channels), target=target)
    torch.nn.init.normal_(model.head.weight)
    return model.eval()


def mae(channels: int = 3, **options) -> MAE:
    decoder = {"depth": 1, "width": 8, "heads": 2}
    return MAE(mae_options.MAE(decoder=decoder, **options), encoder=encoder(channels, mean=0.5, std=0.25)).eval()


def latent_model() -> Latent:
    options = {"decoder": {"depth": 1, "width": 8, "groups": 4}, "masks": 2, "layers": 2}
    return Latent(latent_options.Latent(**options), encoder=encoder()).eval()


def evaluator(kind, pictures: torch.Tensor, **options):
    return kind(HeldOut(batch_size=16, **options), source=Memory(pictures), transform=CenterCrop(size=SIZE).build())


def distance(a: int, b: int, columns: int = GRID[1]) -> float:
    return math.dist(divmod(a, columns), divmod(b, columns))


def mean_square(values: torch.Tensor) -> float:
    return values.double().square().mean().item()


@pytest.mark.parametrize("grid", [(4, 4), (3, 7), (1, 9), (8, 8)])
@pytest.mark.parametrize("fraction", [0.3, 0.9])
def test_the_nearest_patch_is_the_first_of_the_nearest(grid, fraction):
    at = sample_corruption(Masking(corrupted=fraction), torch.arange(30), seed=0, grid=grid).ids
    nearest = nearest_uncorrupted(at, grid)
    ties = 0
    for image in range(30):
        free = [place for place in range(grid[0] * grid[1]) if place not in at[image].tolist()]
        for place, answer in zip(at[image].tolist(), nearest[image].tolist(), strict=True):
            distances = [distance(place, other, grid[1]) for other in free]
            assert answer == free[distances.index(min(distances))]
            ties += distances.count(min(distances)) > 1
    assert ties > 10 or fraction == 0.9


def prediction_by_loops(model: MaskedPatch, images: torch.Tensor, seed: int) -> dict[str, float]:
    """Compute all metrics of `Prediction` by loops over images and patches."""
    target, noise = model.target, model.sample(torch.arange(len(images)), seed=seed)
    name, is_error = target.score_name, target.score_name != "accuracy"
    losses, scores = {kind: [] for kind in CORRUPTION_TYPES}, {kind: [] for kind in CORRUPTION_TYPES}
    truth, copied = [], []
    for image in range(len(images)):
        labels = target.labels(images[image : image + 1])[0]
        of_image = type(noise)(*(choice[image : image + 1] for choice in noise))
        predictions = model.predict(images[image : image + 1], of_image)[0]
        corrupted = of_image.ids[0].tolist()
        free = [place for place in range(24) if place not in corrupted]
        for guess, place, kind in zip(predictions, corrupted, of_image.types[0].tolist(), strict=True):
            nearest = labels[min(free, key=lambda other: distance(place, other))]
            truth.append(labels[place])
            if is_error:
                losses[CORRUPTION_TYPES[kind]].append(mean_square(guess - truth[-1]))
                scores[CORRUPTION_TYPES[kind]].append(losses[CORRUPTION_TYPES[kind]][-1])
                copied.append(mean_square(nearest - truth[-1]))
            else:
                logits = guess.view(-1, 512)
                losses[CORRUPTION_TYPES[kind]].append(
                    -logits.log_softmax(-1)[range(len(logits)), truth[-1]].mean().item()
                )
                scores[CORRUPTION_TYPES[kind]].append((logits.argmax(-1) == truth[-1]).double().mean().item())
                copied.append((nearest == truth[-1]).double().mean().item())
    metrics = {f"loss_{kind}": sum(values) / len(values) for kind, values in losses.items()}
    metrics |= {f"{name}_{kind}": sum(values) / len(values) for kind, values in scores.items()}
    metrics |= {"loss": sum(map(sum, losses.values())) / len(truth), name: sum(map(sum, scores.values())) / len(truth)}
    metrics[f"{name}_copying"] = sum(copied) / len(copied)
    columns = torch.stack(truth).double().T
    if is_error:
        metrics["loss_constant"] = metrics[f"{name}_constant"] = columns.var(1, correction=0).mean().item()
    else:
        shares = [[count / len(truth) for count in Counter(column.tolist()).values()] for column in columns]
        entropies = [-sum(share * math.log(share) for share in column) for column in shares]
        metrics["loss_constant"] = sum(entropies) / len(entropies)
        metrics[f"{name}_constant"] = sum(map(max, shares)) / len(shares)
    return metrics


@torch.no_grad()
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: type(target).__name__)
def test_metrics_of_masked_patch_prediction_equal_loops(target):
    model, images = masked_patch(target), smooth_images()
    metrics = evaluator(Prediction, images, seed=5)(model).metrics
    assert metrics == pytest.approx(prediction_by_loops(model, images, seed=5), rel=1e-4, abs=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("norm_pixels", [True, False])
def test_metrics_of_masked_autoencoding_equal_loops(norm_pixels):
    model, images = mae(norm_pixels=norm_pixels), smooth_images(7)
    noise, labels = model.sample(torch.arange(7), seed=3), model.labels(images).double()
    losses = {"loss": [], "loss_mean": [], "loss_copying": []}
    for image in range(7):
        of_image = type(noise)(*(ids[image : image + 1] for ids in noise))
        prediction = model.predict(images[image : image + 1], of_image)[0]
        visible, masked = (ids[0].tolist() for ids in of_image)
        color = labels[image, visible].view(-1, 3, 16).mean((0, 2)).repeat_interleave(16)
        for rank, place in enumerate(masked):
            nearest = min(sorted(visible), key=lambda other: distance(place, other))
            for values, guess in zip(losses.values(), (prediction[rank], color, labels[image, nearest]), strict=True):
                values.append(mean_square(guess - labels[image, place]))
    metrics = evaluator(Autoencoding, images, seed=3)(model).metrics
    assert metrics == pytest.approx({name: sum(values) / len(values) for name, values in losses.items()}, rel=1e-4)


@torch.no_grad()
def test_metrics_of_latent_prediction_equal_loops():
    model, images = latent_model(), smooth_images(7)
    noise, targets = model.sample(torch.arange(7), seed=3), model.targets(images).double()
    prediction = model.predict(images, noise)[0][:, 0].double()
    losses = {name: [] for name in ("loss", *latent.BASELINES)}
    for image in range(7):
        visible, masked = (ids[image, 0].tolist() for ids in noise)
        for rank, place in enumerate(masked):
            nearest = min(sorted(visible), key=lambda other: distance(place, other))
            of_image = targets[image, visible].mean(0), targets[image, nearest]
            guesses = prediction[image, rank], targets.mean((0, 1)), targets[:, place].mean(0), *of_image
            for values, guess in zip(losses.values(), guesses, strict=True):
                values.append((guess - targets[image, place]).square().sum().item() / math.sqrt(24))
    expected = {name: sum(values) / len(values) for name, values in losses.items()}
    expected["target_std"] = targets.flatten(0, 1).std(0).mean().item()
    expected["target_std_images"] = targets.std(0, correction=0).mean().item()
    expected["prediction_std"] = prediction.flatten(0, 1).std(0).mean().item()
    assert evaluator(LatentPrediction, images, seed=3)(model).metrics == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def test_there_is_no_copying_without_uncorrupted_patches_and_no_metric_of_other_corruption():
    model = masked_patch(masking=Masking(corrupted=1.0, mask=1, replace=0, unchanged=0))
    metrics = evaluator(Prediction, smooth_images())(model).metrics
    assert not {name for name in metrics if "copying" in name or "unchanged" in name or "replaced" in name}
    assert all(math.isfinite(value) for value in metrics.values())
    assert not any("copying" in line for line in prediction.describe(metrics))


METRICS = {
    "loss": 2.5, "accuracy": 0.45, "accuracy_masked": 0.4, "accuracy_unchanged": 0.9, "loss_constant": 4.3,
    "accuracy_constant": 0.06, "accuracy_copying": 0.33,
}  # fmt: skip
ERRORS = {
    "loss": 0.1, "squared_error": 0.1, "squared_error_masked": 0.12, "loss_constant": 0.3,
    "squared_error_constant": 0.3, "squared_error_copying": 0.2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "worse"),
    [
        (METRICS, 0), (METRICS | {"loss": 5.0}, 1), (METRICS | {"loss": 4.3, "accuracy_masked": 0.33}, 2),
        (METRICS | {"accuracy_masked": 0.01}, 2), (ERRORS, 0), (ERRORS | {"squared_error_masked": 0.25}, 1),
        ({name.replace("squared", "absolute"): value for name, value in ERRORS.items()}, 0),
        (ERRORS | {"loss": 0.5, "squared_error_masked": 0.6}, 3),
    ],
)  # fmt: skip
def test_lines_state_for_each_baseline_whether_the_model_is_better(metrics, worse):
    scores, conclusion = prediction.describe(metrics)
    answers = [scores.count(words) for words in ("worse than", "equal to")]
    assert sum(answers) == worse - (metrics["loss"] >= metrics["loss_constant"])
    assert answers[1] == (metrics.get("accuracy_masked") == metrics.get("accuracy_copying", math.nan))
    assert f"{3 - worse} of 3" in conclusion if worse else conclusion.startswith("the model has learned")


@torch.no_grad()
def test_a_collapse_of_targets_or_predictions_is_reported():
    metrics = dict(zip(("loss", *latent.BASELINES), (1.0, 2.0, 1.5, 2.5, 3.0), strict=True))
    metrics |= {"target_std": 1.0, "target_std_images": 0.9, "prediction_std": 0.5}
    assert "COLLAPSED" not in latent.describe(metrics)[-1]
    for name, value in (("target_std", 0.05), ("target_std_images", 0.05), ("prediction_std", 0.005)):
        conclusion = latent.describe(metrics | {name: value})[-1]
        assert conclusion.startswith("COLLAPSED")
        assert f"{name.split('_')[0]}s hardly differ" in conclusion
    model = latent_model()
    for block in model.teacher.module.blocks:
        block.contract.bias.zero_()
    model.teacher.module.patch.weight.zero_()
    metrics = evaluator(LatentPrediction, smooth_images(7))(model).metrics
    assert metrics["target_std"] > 0.5  # from position to position
    assert metrics["target_std_images"] < 1e-3


def at(place: int) -> tuple[slice, ...]:
    """The pixels of a patch."""
    return slice(None), *(slice(4 * side, 4 * side + 4) for side in divmod(place, GRID[1]))


@torch.no_grad()
@pytest.mark.parametrize(("count", "channels"), [(1, 3), (5, 1), (12, 4), (40, 3)])
def test_the_mosaic_of_masked_patch_prediction_shows_the_corruption_and_the_labels(count, channels):
    target = MeanColor(bits=2).build(encoder=tiny.patches(4, channels))
    images, model = smooth_images(count, channels), masked_patch(target, channels=channels)
    mosaic = evaluator(Prediction, images, images=count)(model, [{"step": 0}]).figures["mosaic"]
    shown = min(count, 12)
    chosen = [place * (count - 1) // max(shown - 1, 1) for place in range(shown)]
    noise = model.sample(torch.tensor(chosen), seed=0)
    painted = PLAIN(target.paint(target.labels(images[chosen])))
    original, corrupted, predicted, true = mosaic.columns.values()
    torch.testing.assert_close(original, PLAIN(images[chosen]))
    for image in range(shown):
        kinds = dict(zip(noise.ids[image].tolist(), noise.types[image].tolist(), strict=True))
        replacements = dict(zip(noise.ids[image].tolist(), noise.replacement[image].tolist(), strict=True))
        for place in range(24):
            torch.testing.assert_close(true[image][at(place)], painted[image, place], check_dtype=False)
            kind = CORRUPTION_TYPES[kinds[place]] if place in kinds else ""
            if kind == "masked":
                assert corrupted[image][at(place)].unique().numel() == 1
                continue
            source = replacements[place] if kind == "replaced" else place
            torch.testing.assert_close(corrupted[image][at(place)], original[image][at(source)])
            if not kind:
                torch.testing.assert_close(predicted[image][at(place)], painted[image, place], check_dtype=False)


@torch.no_grad()
@pytest.mark.parametrize("channels", [1, 3])
def test_the_mosaic_of_masked_autoencoding_shows_visible_patches_and_reconstructions(channels):
    images, model = torch.randint(256, (3, channels, *SIZE), dtype=torch.uint8), mae(channels)
    mosaic = evaluator(Autoencoding, images)(model, [{"step": 0}]).figures["mosaic"]
    noise, whole = model.sample(torch.arange(3), seed=0), PLAIN(images)
    for image in range(3):
        visible, copied, painted, true = (column[image] for column in mosaic.columns.values())
        torch.testing.assert_close(true, whole[image], rtol=0, atol=1e-5)
        for place in range(24):
            original = whole[image][at(place)]
            if place in noise.masked_ids[image].tolist():
                assert visible[at(place)].unique().numel() == 1
                # The painted patch has the mean of the true patch, unless it is clipped at black or white.
                if copied[at(place)].min() > 0 and copied[at(place)].max() < 1:
                    assert copied[at(place)].mean().item() == pytest.approx(original.mean().item(), abs=0.02)
                assert not torch.allclose(painted[at(place)], original, atol=1e-3)
            else:
                for part in (visible, copied, painted):
                    torch.testing.assert_close(part[at(place)], original, rtol=0, atol=1e-5)
