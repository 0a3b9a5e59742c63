"""DIET equals a plain loop in float64, learns the indices of images, and does so in any number of processes."""

import math

import pytest
import tiny
import torch
from command import tiny_options
from runs import rows, states, train_in_processes

from ssvit.data.augment.options import InceptionCrop
from ssvit.data.loader import Loader
from ssvit.data.sources.base import subset
from ssvit.models import timm_options
from ssvit.models.timm import Timm
from ssvit.objectives import diet_options
from ssvit.objectives.diet import Diet

SHUFFLED = torch.tensor([5, 2, 0, 3, 1, 4])


def forward(objective: Diet, batch, step: int = 6) -> dict[str, torch.Tensor]:
    return objective(batch, (), tiny.scheduled(objective, step))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 0.8])
def test_loss_and_accuracy_are_those_of_a_plain_loop(smoothing, normalize):
    objective = tiny.shaken(tiny.diet(label_smoothing=smoothing, normalize=normalize), by=0.5).double().eval()
    batch = tiny.views(objective, 6)._replace(indices=SHUFFLED)
    result = forward(objective, batch)
    losses, correct = [], 0
    for image, index in zip(batch.images, SHUFFLED.tolist(), strict=True):
        features = objective.encoder.represent(image[None])[0].tolist()
        length = math.sqrt(sum(x**2 for x in features)) if normalize else 1.0
        weights = objective.head.weight.tolist()
        scores = [sum(w * x / length for w, x in zip(row, features, strict=True)) for row in weights]
        total = math.log(sum(map(math.exp, scores)))
        targets = [smoothing / 24 + (1 - smoothing) * (number == index) for number in range(24)]
        losses.append(sum(target * (total - score) for target, score in zip(targets, scores, strict=True)))
        correct += max(range(24), key=scores.__getitem__) == index
    assert result["loss"].item() == pytest.approx(sum(losses) / 6, rel=1e-12)
    assert result["accuracy"].item() == pytest.approx(correct / 6)
    assert [name for name, _ in objective.head.named_parameters()] == ["weight"]


def test_the_class_of_an_image_is_its_index_in_the_subset():
    images = subset(tiny.source(), part=(0, 1), images=9)
    whole = InceptionCrop(size=16, scale=(1, 1), ratio=(1, 1), flip=0).build()
    loader = Loader(source=images, transform=whole, seed=3, batch_size=6)
    for batch in loader.batches(0, 6):
        for image, index in zip(batch.images, batch.indices.tolist(), strict=True):
            assert image.equal(images.read(index))


def test_it_learns_the_indices_of_augmented_images(tmp_path):
    objective = tiny.diet()
    tiny.train(tmp_path, objective=objective, steps=150, warmup=10, save_every=150, batch_size=24)
    accuracies, losses = rows(tmp_path, "train/accuracy"), rows(tmp_path, "train/loss")
    assert sum(accuracies[step] for step in range(141, 151)) / 10 > 10 / 24
    assert losses[150] < losses[1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_and_micro_batches_have_the_loss_and_accuracy_of_one_process(tmp_path, strategy):
    options = {"steps": 6, "precision": "64-true"}
    tiny.train(tmp_path / "one", objective=tiny.diet(), **options)
    more = {"strategy": strategy, "accumulate": 2, "objective": ("diet", {}), **options}
    assert train_in_processes(tmp_path / "two", 2, **more) == [0, 0]
    for key in ("train/loss", "train/accuracy"):
        assert rows(tmp_path / "two", key) == pytest.approx(rows(tmp_path / "one", key), rel=1e-6)


def test_an_encoder_of_timm_is_trained_as_a_whole():
    encoder = Timm(timm_options.Timm(model="test_resnet", image_size=32))
    objective = Diet(diet_options.Diet(), encoder=encoder, images=4)
    batch = tiny.views(objective, 4)
    forward(objective, batch)["loss"].backward()
    assert all(parameter.grad is not None for parameter in objective.parameters())


def test_the_number_of_classes_is_the_number_of_images_of_the_subset(tool, tmp_path):
    run = tiny_options("target")
    tool("pretrain", *run, "objective=diet", "subset.images=40", "name=run")
    assert states(tmp_path / "outputs" / "run")["model"]["head.weight"].shape == (40, 16)
