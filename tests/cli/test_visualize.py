"""ssvit visualize: what it writes and says is what a plain computation on the same images gives."""

import json
import math
from pathlib import Path

import pytest
import torch
from command import TINY
from composing import composed, untrained
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ssvit.analysis import attention, inside, similarity
from ssvit.analysis.options import plotted
from ssvit.cli import visualize
from ssvit.data.augment.crop import CenterCrop
from ssvit.data.sources.decode import load
from ssvit.figures.display import PLAIN
from ssvit.loading import encoder as loading
from ssvit.loading import encoder_options as loading_options
from ssvit.models import vit_options
from ssvit.models.vit import ViT
from ssvit.options import OptionError, UserError
from ssvit.randomness import key

ROOT = Path(__file__).parents[2]
FIGURES = {"filters", "positions", "attention_distance", "similarity", "rollout", "heads"}


@pytest.fixture
def run(tmp_path):
    return untrained(tmp_path / "outputs" / "run", *TINY)


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
    """Six pictures of their own, wider than high."""
    (tmp_path / "pictures").mkdir()
    for number in range(6):
        image = Image.effect_noise((40, 30), 60 + number).convert("RGB")
        image.save(tmp_path / "pictures" / f"{number}.png")
    return tmp_path / "pictures"


def seen(encoder, images):
    """Attention weights of each layer (b, h, t, t), and its tokens (b, t, d)."""
    weights, tokens = {}, []
    with torch.no_grad(), attention.watched(encoder, weights.__setitem__):
        tokens = list(encoder.layers(images))
    return [weights[layer] for layer in range(len(tokens))], tokens


def test_numbers_are_those_of_the_pictures_whatever_the_batch(look, run, pictures):
    other = untrained(run.parent.parent / "other", *TINY, "encoder.depth=3", seed=1, stage="finetune")
    numbers, out = look(f"checkpoint={run}", f"other={other}", "batch_size=8", "shown=2", "layer=1", images=[pictures])
    encoder, second = (
        loading.load_encoder(loading_options.LoadEncoder(path=run)),
        loading.load_encoder(loading_options.LoadEncoder(path=other)),
    )
    images = CenterCrop(size=16)([load(str(pictures / f"{number}.png")) for number in range(6)])
    weights, tokens = seen(encoder, images)
    apart = attention.between_patches(encoder)
    found = numbers["attention_distance"]["layers_by_heads"]["the encoder"]
    assert found == [pytest.approx(attention.mean_distance(one, apart).mean(0).tolist(), abs=1e-4) for one in weights]
    assert numbers["attention_distance"]["all_patches_alike"] == pytest.approx(apart.mean().item())
    rollout = attention.rolled(attention.rolled(None, weights[0]), weights[1])
    assert numbers["rollout"]["images"] == numbers["heads"]["images"] == ["0.png", "3.png"]
    assert numbers["rollout"]["attention"] == [pytest.approx(rollout[i, 0, 1:].tolist(), abs=1e-4) for i in (0, 3)]
    for place, i in enumerate((0, 3)):
        heads = numbers["heads"]["attention"][place]
        assert heads == [pytest.approx(weights[0][i, head, 0, 1:].tolist(), abs=1e-4) for head in range(2)]
    grams = torch.stack([similarity.gram(one) for one in (*tokens, *seen(second, images)[1])])
    cka = similarity.cka(similarity.hsic(grams))
    assert numbers["cka"]["layers"] == [pytest.approx(row.tolist(), abs=1e-4) for row in cka[:2, :2]]
    assert numbers["cka"]["layers_by_layers_of_other"] == [pytest.approx(row.tolist(), abs=1e-4) for row in cka[:2, 2:]]
    assert "same_layer" not in numbers["cka"]
    assert "similarity with other: it has another depth" in out
    assert f"mean attention distance of the encoder: layer 1 {sum(found[0]) / 2:.2f} pixels" in out
    assert "mean attention distance of other: layer 1 " in out


def test_statistics_do_not_depend_on_how_images_are_parted(run):
    encoder = loading.load_encoder(loading_options.LoadEncoder(path=run))
    images = torch.rand(33, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    whole, _ = inside.measure([encoder], images, 64)
    told = []
    parts, alignment = inside.measure([encoder, encoder], images, 8, lambda *done: told.append(done))
    torch.testing.assert_close(parts[0], whole[0])
    torch.testing.assert_close(parts[1], whole[0])
    torch.testing.assert_close(alignment[:2, 2:], alignment[:2, :2])
    assert told == [(7, 33), (14, 33), (21, 33), (27, 33), (33, 33)]


def test_held_out_images_are_looked_at_and_everything_is_written(look, run):
    numbers, out = look("other=scratch", "count=16", "shown=3")
    folder = run.parent / "visualize"
    assert {path.stem for path in folder.glob("*.png")} == FIGURES
    board = EventAccumulator(str(folder))
    board.Reload()
    assert set(board.Tags()["images"]) == FIGURES
    assert {event.step for name in FIGURES for event in board.Images(name)} == {6}
    with Image.open(folder / "heads.png") as picture:
        (shown,) = board.Images("heads")
        assert (shown.width, shown.height) == picture.size
    assert not list(folder.glob(".*"))
    for name in FIGURES:
        assert f"written: {folder / name}.png" in out
    assert (numbers["images"], numbers["step"], numbers["checkpoint"]) == (16, 6, str(run))
    assert (numbers["image_size"], numbers["grid"]) == ([16, 16], [4, 4])
    assert numbers["filters"]["components"] == 15  # of 16 filters around their mean
    assert len(numbers["positions"]["cosine"]) == 16
    assert "16 held-out images of 16x16 pixels" in out
    torch.manual_seed(key(0, "weights"))
    encoder = ViT(vit_options.ViT(**loading.load_encoder(loading_options.LoadEncoder(path=run)).arguments)).eval()
    random = numbers["attention_distance"]["layers_by_heads"]["random weights"]
    assert random != numbers["attention_distance"]["layers_by_heads"]["the encoder"]
    assert len(random) == len(encoder.blocks)
    told = " ".join(f"{value:.3f}" for value in numbers["cka"]["same_layer"])
    least = 1 + min(range(2), key=lambda layer: numbers["cka"]["same_layer"][layer])
    assert f"similarity with random weights, layer by layer: {told}; layer {least} differs most" in out


def test_newest_is_the_newest_fine_tuning(run, look, tmp_path):
    tuned = untrained(tmp_path / "outputs" / "tuned", *TINY, stage="finetune")
    sizes = {"resize": "paper", "image_size": [16, 32]}
    options = visualize.Visualize(other="newest", outputs=str(tmp_path / "outputs"))
    found = visualize.checkpoint_of_other(options, sizes, 3, print)
    assert found.path == tuned
    second = loading.load_encoder(loading_options.LoadEncoder(path=found.path, **sizes))
    assert (found.name, second.image_size, second.training) == ("tuned", (16, 32), False)
    for other, path, named in (("newest", str(tuned), ["the encoder", "tuned"]), ("null", None, ["the encoder"])):
        numbers, _ = look(f"checkpoint={run}", f"other={other}", "count=8", "batch_size=8", "shown=1")
        assert numbers["other"] == path
        assert list(numbers["attention_distance"]["layers_by_heads"]) == named


def test_what_an_encoder_lacks_is_told_and_the_rest_is_drawn(pictures):
    small = vit_options.ViT(image_size=16, patch_size=4, width=16, depth=2, heads=2)
    bare = ViT(small.changed(positions="relative", class_token=False, pooling="patch_mean")).eval()
    (pictures / "bad.png").write_text("no image")
    told = []
    paths = [str(pictures / "1.png"), str(pictures / "bad.png")]
    seen = inside.from_files(paths, CenterCrop(size=16), 5, told.append)
    assert told == [f"{pictures / 'bad.png'}: not an image of a known format; left out"]
    found = inside.look(bare, seen, layer=1, pooling="patch_mean", shown=8, batch_size=8, display=PLAIN)
    assert set(found.figures) == FIGURES - {"positions", "similarity"}
    assert any(line.startswith("positions: not available, since positions=relative") for line in found.lines)
    assert "similarity: not available of fewer than 4 images" in found.lines
    assert (found.numbers["positions"], found.numbers["cka"], found.numbers["images"]) == (None, None, 1)
    with pytest.raises(UserError, match="none of the 1 pictures can be read"):
        inside.from_files([paths[1]], CenterCrop(size=16), 5, told.append)


def test_a_hybrid_is_looked_into_but_for_its_filters():
    torch.manual_seed(0)
    stem = {"layers": [1], "width": 32}
    hybrid = ViT(vit_options.ViT(image_size=[16, 24], patch_size=8, width=16, depth=2, heads=2, stem=stem)).eval()
    images = torch.randint(256, (5, 3, 16, 24), dtype=torch.uint8)
    found = inside.look(hybrid, inside.Pictures(images, ("",) * 5, "5 images"),
                        layer=2, pooling="class_token", shown=5, batch_size=8, display=PLAIN)  # fmt: skip
    assert set(found.figures) == FIGURES - {"filters"}
    assert "filters: not available, since a hybrid embeds its patches by convolutions" in found.lines
    centres = [(8 * row, 8 * column) for row in range(2) for column in range(3)]
    mean = sum(math.dist(a, b) for a in centres for b in centres) / 36
    assert found.numbers["attention_distance"]["all_patches_alike"] == pytest.approx(mean)


def test_pictures_are_taken_evenly_from_those_that_can_be_read(pictures):
    paths = sorted(map(str, pictures.iterdir()))
    found = inside.from_files(paths, CenterCrop(size=16), 4, pytest.fail)
    assert (found.names, found.description) == (("0.png", "1.png", "3.png", "4.png"), "4 of 6 pictures")
    assert torch.equal(found.some(2).images, found.images[[0, 2]])
    for name in ("1.png", "4.png"):
        (pictures / name).write_text("no image")
    told = []
    found = inside.from_files(paths, CenterCrop(size=16), 4, told.append)
    assert (found.names, found.description) == (("0.png", "2.png", "3.png", "5.png"), "4 of 6 pictures")
    assert told == [f"{pictures / name}: not an image of a known format; left out" for name in ("1.png", "4.png")]
    for image, name in zip(found.images, found.names, strict=True):
        assert torch.equal(image, CenterCrop(size=16)([load(str(pictures / name))])[0])
    assert inside.from_files(paths, CenterCrop(size=16), 5, told.append).names == found.names


def test_whose_attention_and_which_layer():
    encoder = vit_options.ViT(image_size=16, patch_size=4, width=16, depth=3, heads=2)
    assert plotted(encoder, layer="last", pooling=None) == (3, "class_token")
    assert plotted(encoder, layer=2, pooling="patch_mean") == (2, "patch_mean")
    without = encoder.changed(class_token=False, pooling="patch_mean")
    assert plotted(without, layer="last", pooling=None) == (3, "patch_mean")
    with pytest.raises(OptionError, match="pooling=class_token: must be patch_mean: the encoder has no class token"):
        plotted(without, layer="last", pooling="class_token")


def test_as_a_command_on_rectangles_of_another_resolution(run, tool, pictures):
    done = tool("visualize", "data.image_size=[16,32]", f"{pictures}/1.png", f"{pictures}/2.png")
    assert done.stderr == ""
    assert "positions resized from 4x4 to 4x8" in done.stdout
    assert "2 pictures of 16x32 pixels, 4x8 patches" in done.stdout
    numbers = json.loads((run.parent / "visualize" / "numbers.json").read_text())
    assert (numbers["image_size"], numbers["grid"]) == ([16, 32], [4, 8])
    assert [len(row) for row in numbers["rollout"]["attention"]] == [32, 32]


@pytest.mark.parametrize(
    ("encoder", "options", "named"),
    [
        (("encoder.channels=1", "encoder.mean=0.5", "encoder.std=0.5"), (), "channels"),
        (("encoder.patch_size=8",), ("data.image_size=12",), "patch_size=8"),
    ],
)
def test_an_encoder_that_other_images_need_is_named(run, look, encoder, options, named):
    other = untrained(run.parent.parent / "other", *TINY, *encoder)
    with pytest.raises(OptionError, match=rf"^other={other}: .*{named}"):
        look(f"checkpoint={run}", f"other={other}", *options)


@pytest.mark.parametrize(("option", "value"), [("count", 0), ("batch_size", 4), ("pooling", "max")])
def test_options_out_of_their_range_are_named(run, look, option, value):
    with pytest.raises(UserError, match=f"^{option}={value}: "):
        look(f"checkpoint={run}", f"{option}={value}")
