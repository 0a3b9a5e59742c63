"""The codebook equals plain loops in float64; it is fitted before the first step and stored with the run."""

import itertools
import math

import numpy as np
import pytest
import tiny
import torch
from command import one_line, tiny_options
from PIL import Image

from ssvit.checkpoints import storage
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.data.batch import Batch
from ssvit.data.loader import Loader
from ssvit.objectives import codebook, codebook_options
from ssvit.objectives.codebook import Codebook, Windows, k_means

SIZE = (12, 16)


def images_of(count: int = 24, seed: int = 0) -> torch.Tensor:
    """(count, 3, 12, 16) uint8: smooth colours and some noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 3, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=SIZE, mode="bilinear") * 200
    return (smooth + torch.rand(count, 3, *SIZE, generator=generator) * 55).to(torch.uint8)


def endless(images: torch.Tensor, size: int = 5):
    """Batches of images again and again, as a loader gives them."""
    for step in itertools.count():
        ids = torch.arange(step * size, (step + 1) * size)
        yield Batch.of_view(images[ids % len(images)], None, ids)


def fitted(images: torch.Tensor, patch: int | tuple[int, int] = 4, **options) -> Codebook:
    target = Codebook(
        codebook_options.Codebook(**{"clusters": 7, "images": 24, "components": 10} | options),
        encoder=tiny.patches(patch),
    )
    target.prepare(endless(images))
    return target


def loop_windows(image: torch.Tensor, patch: tuple[int, int], window: tuple[int, int]) -> list[np.ndarray]:
    """The window around each patch of an image (c, h, w) in raster order, flat, in [0, 1], float64."""
    around = [((w - p) // 2, w - p - (w - p) // 2) for w, p in zip(window, patch, strict=True)]
    padded = np.pad(image.double().numpy() / 255, [(0, 0), *around], mode="reflect")
    corners = itertools.product(range(0, image.shape[1], patch[0]), range(0, image.shape[2], patch[1]))
    return [padded[:, y : y + window[0], x : x + window[1]].flatten() for y, x in corners]


@pytest.mark.parametrize(
    ("patch", "window", "used"), [(4, None, (12, 12)), (4, 4, (4, 4)), ((4, 2), [7, 6], (7, 6)), (2, 3, (3, 3))]
)
def test_labels_are_those_of_a_plain_loop(patch, window, used):
    images = images_of()
    target = fitted(images, patch, window=window)
    axes, offset = target.vectors.projection.flatten(1).double().numpy(), target.vectors.offset.double().numpy()
    centroids = target.centroids.double().numpy()
    expected = [
        [
            min(range(7), key=lambda k: ((axes @ window + offset - centroids[k]) ** 2).sum())
            for window in loop_windows(image, target.patch_size, used)
        ]
        for image in images
    ]
    assert target.labels(images)[..., 0].tolist() == expected
    assert torch.equal(target.labels(images / 255), target.labels(images))
    assert len(set(itertools.chain(*expected))) == 7


def test_windows_are_whitened_by_their_principal_components():
    images = images_of(40)
    windows = Windows(codebook_options.Codebook(window=12, components=9), encoder=tiny.patches(4))
    windows.fit(images)  # by all windows, since there are few
    flat = np.array([window for image in images for window in loop_windows(image, (4, 4), (12, 12))])
    lengths, axes = np.linalg.eigh(np.cov(flat.T))
    exact = axes[:, ::-1][:, :9] / np.sqrt(lengths[::-1][:9])
    fitted_axes = windows.projection.flatten(1).T.double().numpy()
    np.testing.assert_allclose(np.abs((exact * fitted_axes).sum(0) / (exact**2).sum(0)), 1, atol=1e-3)
    vectors = windows(images).flatten(0, 1).double()
    torch.testing.assert_close(vectors.mean(0), torch.zeros(9).double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(vectors.T.cov(), torch.eye(9).double(), atol=1e-3, rtol=0)


def test_components_without_variance_are_not_stretched():
    for value in (0, 50):
        target = fitted(torch.full((24, 3, *SIZE), value, dtype=torch.uint8))
        assert all(buffer.isfinite().all() for buffer in target.buffers())
    grey = images_of()[:, :1].expand(-1, 3, -1, -1)
    assert all(buffer.isfinite().all() for buffer in fitted(grey, components=144 * 3).buffers())


def test_k_means_finds_clusters_that_lie_apart_and_the_same_ones_again():
    centers = tiny.noise(5, 6) * 20
    near = tiny.noise(5, 50, 6, seed=1)
    vectors = (centers[:, None] + near).flatten(0, 1)[torch.randperm(250, generator=torch.Generator().manual_seed(2))]
    state = torch.random.get_rng_state()
    found = k_means(vectors, 5)
    nearest = torch.cdist(vectors, found).argmin(1)
    for cluster in range(5):
        torch.testing.assert_close(found[cluster], vectors[nearest == cluster].mean(0), atol=1e-4, rtol=1e-4)
    assert torch.equal(k_means(vectors, 5), found)
    images = images_of()
    one, two = (fitted(images).state_dict() for _ in range(2))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_fit_takes_the_first_images_and_reports_the_perplexity():
    images = images_of()
    options = codebook_options.Codebook(clusters=7, images=18, components=10)
    targets = [Codebook(options, encoder=tiny.patches(4)) for _ in range(2)]
    assert not any(buffer.any() for buffer in targets[0].buffers())
    batches = endless(images)
    line = targets[0].prepare(batches)
    assert next(batches).slots[0] == 20  # 4 batches of 5 are enough
    targets[1].prepare(endless(torch.cat([images[:18], images_of(seed=1)])))
    assert all(map(torch.equal, *(target.buffers() for target in targets)))
    shares = targets[0].labels(images[:18]).flatten().bincount(minlength=7).double() / (18 * 12)
    perplexity = math.exp(-torch.xlogy(shares, shares).sum().item())
    assert line == f"codebook: 7 clusters of 216 patches; perplexity {perplexity:.0f}, {(shares == 0).sum()} empty"


def test_a_cluster_is_painted_with_the_mean_pixels_of_its_patches():
    images = images_of()
    target = fitted(images)
    sums: dict[int, list[torch.Tensor]] = {}
    for image, labels in zip(images, target.labels(images), strict=True):
        for place, label in enumerate(labels.flatten().tolist()):
            y, x = place // 4 * 4, place % 4 * 4
            sums.setdefault(label, []).append(image[:, y : y + 4, x : x + 4].double() / 255)
    for label, patches in sums.items():
        painted = target.paint(torch.tensor([[label]]))
        assert painted.shape == (1, 3, 4, 4)
        torch.testing.assert_close(painted[0].double(), torch.stack(patches).mean(0), atol=1e-5, rtol=0)


def test_features_are_those_after_the_layer_of_a_frozen_encoder():
    objective, images = tiny.codebook(0.3, features=True), tiny.pictures(20)
    objective.prepare(endless(images))
    objective.train()  # the frozen encoder stays without dropout
    target = objective.target
    torch.manual_seed(7)
    whole = tiny.encoder(0.5).eval()
    features = whole.norm(next(whole.layers(images)))[:, 1:]
    torch.testing.assert_close(target.vectors(images), features)
    nearest = torch.cdist(features.double(), target.centroids.double()).argmin(-1)
    assert torch.equal(target.labels(images)[..., 0], nearest)
    assert not any(parameter.requires_grad for parameter in target.parameters())


def test_labels_are_compared_in_float32_under_autocast():
    objective, images = tiny.codebook(), tiny.pictures(20)
    objective.prepare(endless(images))
    expected = objective.target.labels(images)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(objective.target.labels(images), expected)


@pytest.mark.parametrize("features", [False, True], ids=["windows", "features"])
def test_a_run_that_continues_does_not_fit_again(tmp_path, features, monkeypatch):
    """Exact resumption of all objectives: test_objective_contract.py."""
    fits = []
    monkeypatch.setattr(codebook, "k_means", lambda *given: fits.append(given) or k_means(*given))
    for calls, count in ((3, 1), (9, 2), (9, 2)):  # before the first checkpoint, and after it
        objective = tiny.interrupted(tiny.codebook(0.2, features=features), calls)
        with pytest.raises(tiny.Interrupted):
            tiny.train(tmp_path, objective=objective, accumulate=2)
        assert len(fits) == count
    _, objective = tiny.train(tmp_path, objective=tiny.codebook(0.2, 1, features=features), accumulate=2)
    assert len(fits) == 2
    states = storage.load(Checkpoint.open(tmp_path / "step_00000012"))
    for state in (states["model"], states["ema"]):
        assert state["target.centroids"].equal(objective.target.centroids)
        assert state["target.centroids"].any()
    assert not any("target" in name for name in states["optimizer"])


def test_an_objective_without_a_fit_reads_no_images_before_the_first_step(tmp_path, monkeypatch):
    calls, batches = [], Loader.batches
    monkeypatch.setattr(Loader, "batches", lambda loader, *steps: calls.append(steps) or batches(loader, *steps))
    tiny.train(tmp_path / "mae", objective=tiny.mae(), steps=2, warmup=1)
    assert calls == [(0, 2)]
    assert tiny.model().prepare(iter(())) == ""


@pytest.mark.slow
def test_from_the_command_line_a_second_stage_clusters_the_features_of_the_first(tool, tmp_path):
    run = tiny_options("target.")
    run += ["target=codebook", "target.clusters=12", "target.images=40", "probes=[]"]
    assert "codebook: 12 clusters of 640 patches" in tool("pretrain", *run, "name=first").stdout
    stage = ["name=second", "target.checkpoint=outputs/first", "target.layer=1"]
    done = tool("pretrain", *run, *stage, "recipe.steps=4", "figures=end")
    assert "codebook: 12 clusters of 640 patches" in done.stdout
    with Image.open(tmp_path / "outputs" / "second" / "mosaic.png") as image:
        assert min(image.size) > 200
    weights = storage.load(Checkpoint.open(tmp_path / "outputs" / "second"))["model"]
    first = tiny.loaded(tmp_path / "outputs" / "first")
    for name, value in first.state_dict().items():
        if not name.startswith("blocks.1."):
            assert weights[f"target.vectors.teacher.module.{name}"].equal(value)
    assert "is finished" in tool("pretrain", *run, *stage, "recipe.steps=4").stdout
    stage[1] = "target.checkpoint=outputs/gone"
    line = one_line(tool("pretrain", *run, *stage, "recipe.steps=4", status=2))
    assert line.startswith("ssvit: target.checkpoint=outputs/gone: ")
    tuned = tiny_options("data", "encoder", "target")
    assert "accuracy" in tool("finetune", *tuned, "checkpoint=outputs/second").stdout
    options = ("checkpoint=outputs/second", "probes=[knn]", "train_images=32", "figures=none")
    assert "knn" in tool("evaluate", *options).stdout.lower()
