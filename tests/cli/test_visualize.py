"""ssvit visualize: its files and lines equal a plain computation on the same images."""

import json
import math
from pathlib import Path

import pytest
import tiny
import torch
from command import TINY
from composing import composed, untrained
from PIL import Image

from ssvit.analysis import attention, inside
from ssvit.analysis.options import plotted
from ssvit.cli import visualize
from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources.decode import load
from ssvit.data.sources.files import Files
from ssvit.errors import OptionError, UserError
from ssvit.figures.display import PLAIN
from ssvit.models.vit_options import ViT

ROOT = Path(__file__).parents[2]
FIGURES = {"filters", "positions", "attention_distance", "rollout", "heads"}


@pytest.fixture
def run(tmp_path):
    return untrained(tmp_path / "outputs" / "run", *TINY, "encoder.positions=sine_cosine_2d")


@pytest.fixture
def look(run, tmp_path, capsys):
    """Run the tool's main function in this process: look("count=4") -> its numbers as JSON, and what it printed."""

    def look(*options, images=()):
        options = (f"outputs={tmp_path}/outputs", "device=cpu", *options, *map(str, images))
        config = composed(*options, tool="visualize")
        capsys.readouterr()
        visualize.run(config.config)
        folder = Path(config.output or run.parent / "visualize")
        return json.loads((folder / "numbers.json").read_text()), capsys.readouterr().out

    return look


@pytest.fixture
def pictures(tmp_path):
    """Write six different pictures, wider than high."""
    (tmp_path / "pictures").mkdir()
    for number in range(6):
        image = Image.effect_noise((40, 30), 60 + number).convert("RGB")
        image.save(tmp_path / "pictures" / f"{number}.png")
    return tmp_path / "pictures"


def seen(encoder, images):
    """Attention weights of each layer (b, h, t, t), and its tokens (b, t, d)."""
    weights, tokens = {}, []
    with torch.no_grad(), attention.attention_hooks(encoder, weights.__setitem__):
        tokens = list(encoder.layers(images))
    return [weights[layer] for layer in range(len(tokens))], tokens


@pytest.mark.parametrize("batch_size", [8, 4])
def test_numbers_are_those_of_the_pictures_for_any_batch_size(look, run, pictures, batch_size):
    (pictures / "bad.png").write_text("no image")
    numbers, out = look(f"checkpoint={run}", f"batch_size={batch_size}", "shown=2", "layer=1", images=[pictures])
    assert f"{pictures}/bad.png: " in out
    encoder = tiny.loaded(run)
    images = CenterCrop(size=16).build()([load(str(pictures / f"{number}.png")) for number in range(6)])
    weights, _ = seen(encoder, images)
    apart = attention.patch_distances(encoder)
    distances = numbers["attention_distance"]["layers_by_heads"]
    expected = [attention.mean_distance(layer, apart).mean(0).tolist() for layer in weights]
    assert distances == [pytest.approx(layer, abs=1e-4) for layer in expected]
    assert numbers["attention_distance"]["uniform_attention"] == pytest.approx(apart.mean().item())
    rollout = attention.extend_rollout(attention.extend_rollout(None, weights[0]), weights[1])
    assert numbers["rollout"]["images"] == numbers["heads"]["images"] == ["0.png", "3.png"]
    assert numbers["rollout"]["attention"] == [pytest.approx(rollout[i, 0, 1:].tolist(), abs=1e-4) for i in (0, 3)]
    for place, i in enumerate((0, 3)):
        heads = numbers["heads"]["attention"][place]
        assert heads == [pytest.approx(weights[0][i, head, 0, 1:].tolist(), abs=1e-4) for head in range(2)]


def test_held_out_images_are_analysed_and_all_files_are_written(look, run):
    numbers, _ = look("count=16", "shown=3")
    folder = run.parent / "visualize"
    assert {path.name for path in folder.iterdir()} == {"numbers.json", *(f"{name}.png" for name in FIGURES)}
    assert (numbers["images"], numbers["step"], numbers["checkpoint"]) == (16, 6, str(run))
    assert (numbers["image_size"], numbers["grid"]) == ([16, 16], [4, 4])
    assert numbers["filters"]["components"] == 15  # of 16 filters around their mean
    assert len(numbers["positions"]["cosine"]) == 16


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"positions": "relative", "class_token": False, "pooling": "patch_mean"}, "positions"),
        ({"patch_size": 8, "stem": {"layers": [1], "width": 32}}, "filters"),
    ],
)
def test_an_analysis_that_does_not_apply_is_reported_and_the_others_are_made(options, missing):
    torch.manual_seed(0)
    shape = {"image_size": [16, 24], "patch_size": 4, "width": 16, "depth": 2, "heads": 2}
    encoder = ViT(**shape | options).build().eval()
    pictures = inside.Pictures(torch.randint(256, (5, 3, 16, 24), dtype=torch.uint8), ("",) * 5)
    pooling = encoder.options.pooling
    report = inside.analyse(encoder, pictures, layer=2, pooling=pooling, shown=5, batch_size=8, display=PLAIN)
    assert set(report.figures) == FIGURES - {missing}
    assert report.numbers[missing] is None
    assert any(line.startswith(f"{missing}: ") for line in report.lines)
    y, x = encoder.grid
    centres = [(encoder.patch_size[0] * row, encoder.patch_size[1] * column) for row in range(y) for column in range(x)]
    mean = sum(math.dist(a, b) for a in centres for b in centres) / len(centres) ** 2
    assert report.numbers["attention_distance"]["uniform_attention"] == pytest.approx(mean)


def test_pictures_that_cannot_be_read_are_an_error(tmp_path):
    (tmp_path / "bad.png").write_text("no image")
    with pytest.raises(UserError):
        inside.read_pictures(Files([str(tmp_path / "bad.png")]), CenterCrop(size=16).build(), 5, batch_size=8)


def test_whose_attention_and_which_layer():
    encoder = ViT(image_size=16, patch_size=4, width=16, depth=3, heads=2)
    assert plotted(encoder, layer="last", pooling=None) == (3, "class_token")
    assert plotted(encoder, layer=2, pooling="patch_mean") == (2, "patch_mean")
    without = encoder.changed(class_token=False, pooling="patch_mean")
    assert plotted(without, layer="last", pooling=None) == (3, "patch_mean")
    with pytest.raises(OptionError, match=r"pooling=class_token: .*patch_mean"):
        plotted(without, layer="last", pooling="class_token")


def test_the_options_of_a_part_are_checked_against_the_other_parts(look):
    with pytest.raises(OptionError, match=r"image_size=18: "):
        look("data.image_size=18")


def test_as_a_command_on_rectangles_of_another_resolution(run, tool, pictures):
    done = tool("visualize", "data.image_size=[16,32]", f"{pictures}/1.png", f"{pictures}/2.png")
    assert done.stderr == ""
    numbers = json.loads((run.parent / "visualize" / "numbers.json").read_text())
    assert (numbers["image_size"], numbers["grid"]) == ([16, 32], [4, 8])
    assert [len(row) for row in numbers["rollout"]["attention"]] == [32, 32]
