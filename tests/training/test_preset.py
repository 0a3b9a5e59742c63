"""preset=auto: what it chooses, that typed options win, and that a run keeps what it began with."""

import itertools
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from ssvit.checkpoints import manifest
from ssvit.cli.embed import command as embed
from ssvit.cli.evaluate import command as evaluate
from ssvit.cli.finetune import command as finetune
from ssvit.cli.pack import command as pack
from ssvit.cli.pretrain import command as pretrain
from ssvit.cli.retrieve import command as retrieve
from ssvit.config.command_line import CommandLine
from ssvit.data.arguments import data_set
from ssvit.data.sources import datasets, datasets_options
from ssvit.data.sources.decode import load
from ssvit.data.sources.decode_options import GREY
from ssvit.errors import OptionError, UserError
from ssvit.models.vit_options import ViT
from ssvit.training.preset import OBJECTIVE, choose, expand
from ssvit.training.recipe import Recipe
from ssvit.values import text_of

TINY = (
    "encoder.width=16", "encoder.depth=1", "encoder.heads=2",
    "recipe.steps=2", "recipe.batch_size=4", "recipe.precision=32-true", "workers=0", "launch.accelerator=cpu",
    "figures=none",
)  # fmt: skip


LINE = CommandLine([])
RUN = Path(__file__).parents[1] / "fixtures" / "outputs" / "masked_patch_shapes"


def by_preset(**typed) -> dict[str, str]:
    """The options that preset=auto adds to these, in which __ is a dot."""
    options = {name.replace("__", "."): value for name, value in {"preset": "auto", **typed}.items()}
    line = CommandLine([f"{name}={value}" for name, value in options.items()])
    expand(line)
    return {name: text_of(value) for name, value in line.implied.items()}


@pytest.fixture
def photographs(tmp_path):
    folder = tmp_path / "photographs"
    folder.mkdir()
    for place in range(30):
        Image.new("RGB", (90, 60 + place), (8 * place, 128, 255 - 8 * place)).save(folder / f"{place}.png")
    return folder


@pytest.mark.parametrize(("images", "side"), list(itertools.product((5, 3000, 60_000, 2_000_000), (30, 100, 500))))
def test_what_it_chooses_can_be_trained(images, side):
    chosen = choose(images, side, cores=8)
    recipe = {name.partition(".")[2]: value for name, value in chosen.items() if name.startswith("recipe.")}
    assert Recipe(**recipe).batch_size <= images
    size = {"image_size": chosen["data.image_size"], "patch_size": chosen["encoder.patch_size"]}
    assert ViT(**size, width=192, depth=2, heads=3).grid == (8, 8)
    assert recipe["steps"] * recipe["batch_size"] >= 250_000
    assert 0 <= chosen["workers"] <= 16


def test_more_images_are_seen_longer_up_to_a_limit():
    seen = []
    for images in (1000, 5000, 10_000, 100_000):
        chosen = choose(images, 100, cores=2)
        seen.append(chosen["recipe.steps"] * chosen["recipe.batch_size"])
    assert seen[0] < seen[1] < seen[2] <= seen[3] <= 1_280_000


def test_chosen_numbers_follow_from_typed_ones():
    chosen = choose(3000, 100, cores=2, typed={"data.image_size": 96, "recipe.steps": 50})
    assert chosen["encoder.patch_size"] == 12
    for size in range(1, 300):  # the largest divisor that gives eight patches or more, if there are as many pixels
        patch = choose(3000, 100, cores=2, typed={"data.image_size": size})["encoder.patch_size"]
        assert patch == max(side for side in range(1, size + 1) if size % side == 0 and side <= max(1, size // 8))
    assert choose(60, 100, cores=2, processes=2, typed={"recipe.accumulate": 2})["recipe.batch_size"] == 12
    assert (chosen["recipe.warmup"], chosen["recipe.evaluate_every"], chosen["recipe.log_every"]) == (2, 5, 1)


def test_several_processes_can_share_the_batch(photographs, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)

    def batch_size(**typed):
        return int(by_preset(data="folder", data__root=photographs, **typed)["recipe.batch_size"])

    assert batch_size() == 7
    assert batch_size(launch__devices="2") == 6
    assert batch_size(launch__devices="2", launch__num_nodes="2") == 4
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert batch_size() == 6
    assert choose(5000, 100, cores=2, processes=8)["recipe.batch_size"] == 64
    assert choose(5, 100, cores=2, processes=2)["recipe.batch_size"] == 2


def test_typed_options_win_and_a_checkpoint_keeps_its_encoder(photographs):
    typed = {"data": "folder", "data__root": photographs}
    names = by_preset(**typed).keys()
    assert {"encoder", "recipe.steps", "objective"} <= names
    for name in ("objective", "target", "target.bits", "objective.masking.corrupted"):
        own = {"recipe.optimizer", "recipe.lr"} if name == "objective" else set()
        assert by_preset(**typed, recipe__steps=7, **{name: 1}).keys() == names - {"recipe.steps", "objective"} - own
    of_encoder = {"encoder", "encoder.patch_size", "data.image_size"}
    of_recipe = {"recipe.optimizer", "recipe.lr"}
    for checkpoint in (RUN, "model.safetensors"):
        assert by_preset(**typed, checkpoint=checkpoint).keys() == {"recipe.batch_size", "workers"}
        full = by_preset(**typed, checkpoint=checkpoint, continuation="full")
        assert full.keys() == names - of_encoder - of_recipe
    assert by_preset(**typed, experiment="mae_imagenet") == by_preset(**typed, preset="null") == {}


def test_a_model_of_timm_has_the_planned_options_except_for_its_patches(photographs):
    names = by_preset(data="folder", data__root=photographs, encoder="timm").keys()
    assert {"data.image_size", "recipe.steps"} <= names
    assert "encoder.patch_size" not in names


def test_a_run_uses_and_prints_the_chosen_options(photographs, tool, tmp_path):
    first, second, *_ = tool("pretrain", f"data={photographs}", *TINY).stdout.splitlines()
    assert first.startswith("preset=auto: 30 images ")
    assert "data.image_size=72" in first  # would keep more detail
    assert f"objective={OBJECTIVE} encoder=small data.image_size=64 encoder.patch_size=8" in second
    assert "recipe.steps" not in second
    config = yaml.safe_load((tmp_path / "outputs" / f"{OBJECTIVE}_folder" / "config.yaml").read_text())
    assert (config["preset"], config["data"]["image_size"], config["recipe"]["steps"]) == ("auto", 64, 2)


def test_tables_and_shards_are_planned_like_a_folder(photographs, tmp_path):
    folder = by_preset(data="folder", data__root=photographs)
    table = photographs.parent / "t.csv"
    table.write_text("path,split\n" + "".join(f"{path.name},train\n" for path in sorted(photographs.iterdir())))
    assert by_preset(data="csv", data__table=table, data__root=photographs) == folder
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(3):
        with tarfile.open(shards / f"{number}.tar", "w") as shard:
            for path in sorted(photographs.iterdir(), key=lambda path: int(path.stem))[number::3]:
                shard.add(path, path.name)
    assert by_preset(data="shards", data__root=shards) == folder


def test_a_path_is_a_folder_shards_or_a_table(photographs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s" / "train").mkdir(parents=True)
    with tarfile.open(tmp_path / "s" / "train" / "0.tar", "w") as shard:
        shard.add(photographs / "0.png", "0.png")
    (tmp_path / "t.csv").write_text("path\n")
    for path, expected in (
        (photographs, {"data": "folder", "data.root": str(photographs)}),
        (tmp_path / "s", {"data": "shards", "data.root": str(tmp_path / "s")}),
        (tmp_path / "t.csv", {"data": "csv", "data.table": str(tmp_path / "t.csv")}),
    ):
        assert data_set(str(path), LINE) == expected
    (tmp_path / "s").rename("shards")
    assert data_set("./shards", LINE) == {"data": "shards", "data.root": "./shards"}
    assert [data_set(name, LINE) for name in ("csv", "shards")] == [{"data": "csv"}, {"data": "shards"}]
    with tarfile.open(photographs / "more.tar", "w") as shard:
        shard.add(photographs / "0.png", "0.png")
    assert data_set(str(photographs), LINE)["data"] == "folder"  # of images, next to a tar file


def test_images_that_cannot_be_read_are_an_error(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"broken\.png: cannot be read"):
        by_preset(data="folder", data__root=tmp_path)
    with pytest.raises(OptionError, match="no such folder"):
        by_preset(data="folder", data__root=tmp_path / "none")


def grey(folder, kind, count=24, shade=100):
    """A folder of two classes of grey photographs, as files of one kind."""
    generator = np.random.default_rng(0)
    for place in range(count):
        name = f"{place}.{kind.partition('-')[0]}"
        path = folder / "ab"[place % 2] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        values = generator.normal(shade + 40 * (place % 2), 12, (60, 70)).clip(0, 255).astype(np.uint8)
        if kind == "png-16":
            Image.fromarray(values.astype(np.uint16) * 16).save(path)
        else:
            Image.fromarray(values).convert("RGB" if kind.endswith("-rgb") else "L").save(path)
    return folder


@pytest.mark.parametrize("kind", ["png", "png-rgb", "jpg", "jpg-rgb", "png-16"])
def test_grey_images_have_one_channel_with_the_moments_of_the_sample(tmp_path, kind):
    root = grey(tmp_path / "set", kind)
    typed = {"data": "folder", "data__root": root}
    added = by_preset(**typed)
    assert added["data.channels"] == "1"
    assert ("data.range" in added) == (kind == "png-16")
    source = datasets.folder(
        datasets_options.Folder(root=str(root), channels=1, range=json.loads(added.get("data.range", "null")))
    ).train
    images = torch.stack([source.read(place).double() for place in range(len(source))])
    images /= 1 if "data.range" in added else 255
    assert json.loads(added["data.mean"]) == pytest.approx([images.mean().item()], abs=0.03)
    assert json.loads(added["data.std"]) == pytest.approx([images.std().item()], abs=0.03)
    assert not {"data.mean", "data.std"} & by_preset(**typed, data__channels=3).keys()
    assert not {"data.mean", "data.std"} & by_preset(**typed, checkpoint="weights.pth").keys()
    start = by_preset(**typed, checkpoint="weights.pth", data__channels=1)
    assert all(start[name] == added[name] for name in ("data.mean", "data.std"))
    Image.new("RGB", (60, 70), (200, 90, 0)).save(root / "a" / "0.png")  # one image in colours suffices
    assert "data.channels" not in by_preset(**typed)


def test_mixed_depths_have_no_common_range(tmp_path):
    """The range of 16-bit images would make 8-bit images black."""
    root = grey(grey(tmp_path / "set", "png-16"), "png", count=8)
    assert not {"data.range", "data.mean", "data.std"} & by_preset(data="folder", data__root=root).keys()


def test_one_photograph_in_colour_among_grey_ones_is_read_by_its_luminance(tmp_path):
    Image.new("RGB", (8, 8), (200, 90, 0)).save(tmp_path / "0.png")
    Image.new("RGB", (8, 8), (200, 90, 0)).save(tmp_path / "0.jpg", quality=100)
    for name in ("0.png", "0.jpg"):
        image = load(str(tmp_path / name), GREY)
        assert image.shape == (1, 8, 8)
        assert (image.float() - (0.299 * 200 + 0.587 * 90)).abs().max() <= 2


def test_other_commands_take_channels_and_normalisation_from_the_checkpoint(tmp_path):
    """Commands use the pixel format of a run on grey images for other images that are named by their path."""
    root, small = grey(tmp_path / "set", "png"), [f"outputs={tmp_path}/outputs", "launch.accelerator=cpu"]
    run = pretrain.call([f"data={root}", *TINY, *small[:1], "objective=dino", "objective.prototypes=16", "probes=[]"])
    encoder = manifest.read_manifest(manifest.complete(run)[-1])["encoder"]
    assert encoder["channels"] == len(encoder["mean"]) == 1
    other, report = grey(tmp_path / "other", "jpg-rgb", shade=60), tmp_path / "report"
    checkpoint, data = f"checkpoint={run}", f"data={other}"
    evaluate.call([checkpoint, data, "probes=[knn]", "probes.knn.k=[1]", "figures=none", f"output={report}", *small])
    assert (report / "report.json").is_file()
    steps = ["recipe.steps=1", "recipe.batch_size=4", "recipe.warmup=0", "recipe.precision=32-true", "figures=none"]
    run = finetune.call([checkpoint, data, *steps, *small, "check_frozen=false"])
    tuned = manifest.read_manifest(manifest.complete(run)[-1])["encoder"]
    assert all(tuned[name] == encoder[name] for name in ("channels", "mean", "std"))
    again = pretrain.call([checkpoint, data, "data.channels=1", "name=again", "probes=[]", *steps, *small])
    assert yaml.safe_load((again / "config.yaml").read_text())["data"]["mean"] == encoder["mean"]
    pack.call([data, f"output={tmp_path}/packed", "data.held_out=0.1"])
    for data in (other, tmp_path / "packed"):
        embed.call([checkpoint, f"data={data}", f"output={tmp_path}/{data.name}.npz"])
        assert len(np.load(tmp_path / f"{data.name}.npz")["features"]) > 10
        retrieve.call([checkpoint, f"data={data}", "action=index", f"store={tmp_path}/store_{data.name}"])
