"""ssvit inspect: its numbers are those of the encoders that the command names."""

import json

import pytest
import tiny
import torch
from command import TINY
from composing import composed, untrained

from ssvit.analysis import bias, similarity
from ssvit.analysis.inside import read_pictures
from ssvit.cli import inspect
from ssvit.models import timm_options
from ssvit.models.timm import Timm

SMALL = ("against.small.depth=2", "against.small.width=16", "against.small.heads=2")


def inspected(folder, *options):
    values = composed(f"outputs={folder}", "device=cpu", f"output={folder}/result", *options, tool="inspect")
    inspect.run(values.config)
    return json.loads((folder / "result" / "numbers.json").read_text()), values


def test_encoders_side_by_side(tmp_path, capsys):
    runs = [untrained(tmp_path / name, *TINY, seed=seed) for seed, name in enumerate(("first", "second"))]
    against = f"against=[small,test_resnet,{runs[1].parent}]"
    numbers, values = inspected(
        tmp_path,
        f"checkpoint={runs[0]}",
        against,
        *SMALL,
        "count=20",
        "train_images=24",
        "batch_size=8",
        "patch_size=2",
    )
    assert [*numbers["encoders"]] == ["first", "small", "test_resnet", "second"]
    assert numbers["layers"] == {"first": 2, "small": 2, "test_resnet": 5, "second": 2}
    assert {path.name for path in (tmp_path / "result").iterdir()} == {"biases.png", "similarity.png", "numbers.json"}
    assert "test_resnet" in capsys.readouterr().out
    first, second = (tiny.loaded(run) for run in runs)
    data, view = values.build("data"), values.build("data.view")
    train, pictures = (
        read_pictures(source, view, count, batch_size=8)
        for source, count in ((data.train, 24), (data.validation_or_test, 20))
    )
    for name, encoder in (("first", first), ("second", second)):
        expected = bias.measure(encoder, train, pictures, patch_size=2, batch_size=8, seed=0)
        stored = numbers["encoders"][name]
        assert stored["cosine"] == pytest.approx(expected.cosine, abs=1e-5)
        assert stored["changed"] == pytest.approx(expected.changed)
        assert stored["receptive_field"] == pytest.approx(expected.receptive_field, abs=1e-4)
        assert stored["attention_distance"] == pytest.approx(expected.attention_distance, abs=1e-4)
    assert numbers["encoders"]["test_resnet"]["attention_distance"] == []
    between = torch.tensor(numbers["cka"])[:2, 9:]
    torch.testing.assert_close(between, similarity.cka([first, second], pictures.images, 8)[:2, 2:].float())


def test_random_weights_alone_depend_on_the_seed(tmp_path):
    options = (
        "checkpoint=scratch", "encoder=timm", "encoder.model=test_resnet", "data=shapes", "data.images=64",
        "data.held_out_images=32", "data.image_size=16", "count=8", "train_images=10", "patch_size=1",
    )  # fmt: skip
    results = [inspected(tmp_path, *options, f"seed={seed}")[0]["encoders"] for seed in (0, 0, 1)]
    assert [*results[0]] == ["test_resnet"]
    assert results[0] == results[1] != results[2]


def test_maps_of_timm_end_with_the_features_of_the_model():
    torch.manual_seed(0)
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    for model, last, layers in (("resnet10t", (1, 1), 5), ("mixer_s16_224", (2, 2), 8)):
        encoder = Timm(timm_options.Timm(model=model, image_size=32)).eval()
        with torch.no_grad():
            maps, outputs = encoder.maps(images), next(encoder.layers(images))
        assert len(maps) == layers
        assert maps[-1].shape[1:3] == last
        if model == "resnet10t":
            torch.testing.assert_close(maps[-1].movedim(-1, 1), outputs)
        else:
            torch.testing.assert_close(encoder.model.norm(maps[-1].flatten(1, 2)), outputs)
