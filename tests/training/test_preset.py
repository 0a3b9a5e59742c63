"""preset=auto: what it chooses, that typed options win, and that a run keeps what it began with."""

import itertools
import json
import tarfile

import numpy as np
import pytest
import torch
import yaml
from command import one_line
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
from ssvit.models.vit_options import ViT
from ssvit.options import OptionError
from ssvit.training.preset import OBJECTIVE, choose, options
from ssvit.training.recipe import Recipe

TINY = (
    "encoder.width=16", "encoder.depth=1", "encoder.heads=2",
    "recipe.steps=2", "recipe.batch_size=4", "recipe.precision=32-true", "workers=0", "fabric.accelerator=cpu",
)  # fmt: skip


LINE = CommandLine([])


def by_preset(typed):
    """The options that preset=auto adds to these."""
    return options(CommandLine([f"{name}={value}" for name, value in typed.items()]))


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


def test_numbers_of_the_user_decide_those_that_follow_them():
    chosen = choose(3000, 100, cores=2, given={"data.image_size": 96, "recipe.steps": 50})
    assert chosen["encoder.patch_size"] == 12
    assert (chosen["recipe.warmup"], chosen["recipe.evaluate_every"], chosen["recipe.log_every"]) == (2, 5, 1)


def test_several_processes_can_share_the_batch(photographs, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    typed = {"preset": "auto", "data": "folder", "data.root": str(photographs)}

    def batch_size(**more):
        return int(dict(option.split("=", 1) for option in by_preset(typed | more))["recipe.batch_size"])

    assert batch_size() == 7
    assert batch_size(**{"fabric.devices": "2"}) == 6
    assert batch_size(**{"fabric.devices": "2", "fabric.num_nodes": "2"}) == 4
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert batch_size() == 6
    assert choose(5000, 100, cores=2, processes=8)["recipe.batch_size"] == 64
    assert choose(5, 100, cores=2, processes=2)["recipe.batch_size"] == 2


def test_a_gpu_changes_no_setting_and_adds_a_line(photographs, monkeypatch, tmp_path):
    typed = {"preset": "auto", "data": "folder", "data.root": str(photographs)}

    def chosen(driver, **more):
        monkeypatch.setattr("ssvit.training.preset._GPU_DRIVER", str(driver))
        line = CommandLine([f"{name}={value}" for name, value in (typed | more).items()])
        said = []
        monkeypatch.setattr(line, "say", said.append)
        return options(line), said

    settings, lines = chosen(tmp_path / "none")
    on_gpu, (note, *others) = chosen(tmp_path)
    assert (on_gpu, others) == (settings, lines)
    assert "measured on CPUs" in note
    assert chosen(tmp_path, **{"fabric.accelerator": "cpu"}) == (settings, lines)


def test_typed_options_win_and_a_checkpoint_keeps_its_encoder(photographs):
    typed = {"preset": "auto", "data": "folder", "data.root": str(photographs)}
    names = {option.partition("=")[0] for option in by_preset(typed)}
    assert {"encoder", "recipe.steps", "objective", "preset"} <= names
    for own in ("objective", "target", "target.bits", "objective.masking.corrupted"):
        others = {option.partition("=")[0] for option in by_preset(typed | {"recipe.steps": "7", own: "1"})}
        assert others == names - {"recipe.steps", "objective"}
    going_on = {option.partition("=")[0] for option in by_preset(typed | {"checkpoint": "run"})}
    assert going_on == names - {"encoder", "encoder.patch_size", "data.image_size"}
    assert by_preset({"data": "folder", "data.root": str(photographs)}) == ()
    assert by_preset(typed | {"experiment": "mae_imagenet"}) == ()


def test_a_run_tells_what_was_chosen_and_keeps_it(photographs, tool, tmp_path):
    done = tool("pretrain", f"data={photographs}", *TINY)
    first, second, *_ = done.stdout.splitlines()
    assert first.startswith("preset=auto: 30 images of 75 pixels in the median, reduced to 64 (data.image_size=72 ")
    assert f"objective={OBJECTIVE} encoder=small data.image_size=64 encoder.patch_size=8" in second
    assert "recipe.steps" not in second
    kept = yaml.safe_load((tmp_path / "outputs" / f"{OBJECTIVE}_folder" / "config.yaml").read_text())["preset"]
    assert "data.image_size=64" in kept
    for file in photographs.iterdir():  # as of another machine or another version: the run's own numbers stay
        Image.new("RGB", (30, 30)).save(file)
    again = tool("pretrain", f"data={photographs}", *TINY, status=1)
    assert again.stdout.splitlines()[:2] == ["preset=auto: as the run began:", second]
    plain = (
        "preset=null",
        "overwrite=true",
        "objective=masked_patch_decoder",
        "recipe.warmup=1",
        "encoder.patch_size=8",
    )
    told = tool("pretrain", f"data={photographs}", *TINY, *plain, "data.image_size=32")
    assert "preset" not in told.stdout


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["preset=auto"], "preset=auto: needs a folder of images or of shards, or a table: data=PATH"),
        (["preset=best"], "preset=best: must be auto or null"),
    ],
)
def test_mistakes_are_one_line(tool, typed, message):
    assert message in one_line(tool("pretrain", *typed, status=2))


def test_tables_and_shards_are_planned_like_a_folder(photographs, tmp_path):
    folder = by_preset({"preset": "auto", "data": "folder", "data.root": str(photographs)})
    table = photographs.parent / "t.csv"
    table.write_text("path,split\n" + "".join(f"{path.name},train\n" for path in sorted(photographs.iterdir())))
    typed = {"preset": "auto", "data": "csv", "data.table": str(table), "data.root": str(photographs)}
    assert by_preset(typed) == folder
    (tmp_path / "shards").mkdir()
    for number in range(3):
        with tarfile.open(tmp_path / "shards" / f"{number}.tar", "w") as shard:
            for path in sorted(photographs.iterdir(), key=lambda path: int(path.stem))[number::3]:
                shard.add(path, path.name)
    shards = {"preset": "auto", "data": "shards", "data.root": str(tmp_path / "shards")}
    assert by_preset(shards) == folder
    with pytest.raises(OptionError, match="preset=auto: needs"):
        by_preset(shards | {"data.root": f"file://{tmp_path}/shards"})


def test_a_path_says_what_it_holds(photographs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s" / "train").mkdir(parents=True)
    with tarfile.open(tmp_path / "s" / "train" / "0.tar", "w") as shard:
        shard.add(photographs / "0.png", "0.png")
    (tmp_path / "t.csv").write_text("path\n")
    for path, expected in (
        (photographs, ["data=folder", f"data.root={photographs}"]),
        (tmp_path / "s", ["data=shards", f"data.root={tmp_path / 's'}"]),
        (tmp_path / "t.csv", ["data=csv", f"data.table={tmp_path / 't.csv'}"]),
    ):
        assert data_set(f"data={path}", LINE) == expected
    (tmp_path / "s").rename("shards")
    assert data_set("data=./shards", LINE) == ["data=shards", "data.root=./shards"]
    assert [data_set(f"data={name}", LINE) for name in ("csv", "shards")] == [["data=csv"], ["data=shards"]]
    with tarfile.open(photographs / "more.tar", "w") as shard:
        shard.add(photographs / "0.png", "0.png")
    assert data_set(f"data={photographs}", LINE)[0] == "data=folder"  # of images, beside which a tar file lies


def test_images_that_cannot_be_read_are_told(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"not an image")
    with pytest.raises(Exception, match=r"broken\.png: cannot be read as an image"):
        by_preset({"preset": "auto", "data": "folder", "data.root": str(tmp_path)})
    with pytest.raises(OptionError, match="no such folder"):
        by_preset({"preset": "auto", "data": "folder", "data.root": str(tmp_path / "none")})


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
    typed = {"preset": "auto", "data": "folder", "data.root": str(root)}
    added = dict(option.split("=", 1) for option in by_preset(typed))
    assert added["data.channels"] == "1"
    assert ("data.range" in added) == (kind == "png-16")
    source = datasets.folder(
        datasets_options.Folder(root=str(root), channels=1, range=json.loads(added.get("data.range", "null")))
    ).train
    images = torch.stack([source.read(place).double() for place in range(len(source))])
    images /= 1 if "data.range" in added else 255
    assert json.loads(added["data.mean"]) == pytest.approx([images.mean().item()], abs=0.03)
    assert json.loads(added["data.std"]) == pytest.approx([images.std().item()], abs=0.03)
    assert (
        not {"data.mean", "data.std"} & dict(o.split("=", 1) for o in by_preset(typed | {"data.channels": "3"})).keys()
    )
    Image.new("RGB", (60, 70), (200, 90, 0)).save(root / "a" / "0.png")  # of which one suffices
    assert "data.channels" not in dict(option.split("=", 1) for option in by_preset(typed))


def test_one_photograph_in_colour_among_grey_ones_is_read_by_its_luminance(tmp_path):
    Image.new("RGB", (8, 8), (200, 90, 0)).save(tmp_path / "0.png")
    Image.new("RGB", (8, 8), (200, 90, 0)).save(tmp_path / "0.jpg", quality=100)
    for name in ("0.png", "0.jpg"):
        image = load(str(tmp_path / name), GREY)
        assert image.shape == (1, 8, 8)
        assert (image.float() - (0.299 * 200 + 0.587 * 90)).abs().max() <= 2


def test_other_commands_take_channels_and_normalisation_from_the_checkpoint(tmp_path):
    """Of a run on grey images, for other images of any channels that the commands name by their path."""
    root, small = grey(tmp_path / "set", "png"), [f"outputs={tmp_path}/outputs", "fabric.accelerator=cpu"]
    run = pretrain.call([f"data={root}", *TINY, *small[:1], "objective=dino", "objective.prototypes=16", "probe=[]"])
    encoder = manifest.read(manifest.complete(run)[-1])["encoder"]
    assert encoder["channels"] == len(encoder["mean"]) == 1
    other = grey(tmp_path / "other", "jpg-rgb", shade=60)
    checkpoint = f"checkpoint={run}"
    evaluate.call(
        [checkpoint, f"data={other}", "probes=[knn]", "probes.knn.k=[1]", f"output={tmp_path}/report", *small]
    )
    assert (tmp_path / "report" / "report.json").is_file()
    steps = ["recipe.steps=1", "recipe.batch_size=4", "recipe.warmup=0", "recipe.precision=32-true"]
    tuned = finetune.call([checkpoint, f"data={other}", *steps, *small])
    found = manifest.read(manifest.complete(tuned)[-1])["encoder"]
    assert [found[name] for name in ("channels", "mean", "std")] == [
        encoder[name] for name in ("channels", "mean", "std")
    ]
    pack.call([f"data={other}", f"output={tmp_path}/packed", "data.held_out=0.1"])
    for data in (other, tmp_path / "packed"):
        embed.call([checkpoint, f"data={data}", f"output={tmp_path}/{data.name}.npz"])
        assert len(np.load(tmp_path / f"{data.name}.npz")["features"]) > 10
        retrieve.call([checkpoint, f"data={data}", "action=index", f"store={tmp_path}/store_{data.name}"])
