"""Shards hold the images that they were made of, bit for bit, also after interruptions of the command."""

import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from command import error_of, one_line, tiny_options
from images import class_names, picture, pixels, put
from PIL import Image
from runs import final, kill_after

from ssvit.cli.pack import command as pack_command
from ssvit.data.augment.options import InceptionCrop
from ssvit.data.loader import Loader
from ssvit.data.sources import datasets, packing, shards
from ssvit.data.sources.base import Data
from ssvit.data.sources.datasets_options import Csv, Folder, Pack, Shards
from ssvit.data.sources.files import Files
from ssvit.data.sources.memory import Memory
from ssvit.errors import OptionError, UserError

ODD = ("a/x.y.jpg", "a/x.jpg", "a/x.png", "a/x%2Ejpg.jpg", "a/2.JPG", "b/ü\udcff.png", "b/c.d/1.webp", "b/ .gif")


def write_folder(root: Path, count: int = 30) -> Path:
    """Images of two classes for training, and fewer for validation."""
    for part, images in (("train", count), ("val", 6)):
        for i in range(images):
            put(root / part / "ab"[i % 2] / f"{i:03d}.png", picture(i + 100 * (part == "val")))
    return root


@pytest.fixture
def data(tmp_path) -> Data:
    return datasets.folder(Folder(root=str(write_folder(tmp_path / "images"))))


def packed(data: Data, output: Path, progress=lambda done, total: None, **changes: object) -> list[str]:
    options = Pack(output=str(output), **({"shard_size": 0.004, "workers": 2} | changes))  # type: ignore[arg-type]
    return packing.pack(data, output, options, progress)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def batches(source) -> list[torch.Tensor]:
    loader = Loader(source=source, transform=InceptionCrop(size=6).build(), seed=0, batch_size=8)
    return [batch.images for batch in loader.batches(0, 6)]


def assert_equal(data: Data, expected: Data) -> None:
    assert data.classes == expected.classes
    for source, other in ((data.train, expected.train), (data.validation, expected.validation)):
        assert source.fingerprint == other.fingerprint
        assert class_names(source) == class_names(other)
        assert all(torch.equal(source.read(i), other.read(i)) for i in range(len(other)))
    assert all(map(torch.equal, batches(data.train), batches(expected.train)))


def test_splits_and_colours_of_former_shards_do_not_remain(tmp_path, data):
    packed(data, tmp_path / "shards", size=8)
    fewer = Data(data.train, None, None, data.classes)
    with pytest.raises(OptionError, match=r"^output=.*val"):
        packed(fewer, tmp_path / "shards", size=8)
    assert list((tmp_path / "shards" / "val").glob("*.tar"))
    packed(fewer, tmp_path / "shards", size=8, overwrite=True)
    assert not list((tmp_path / "shards" / "val").glob("*.tar"))
    white = Folder(root=str(tmp_path / "images"), background="white")
    options = Pack(output=str(tmp_path / "shards"), size=8, shard_size=0.004, data=white)
    with pytest.raises(OptionError, match=r"^output="):
        packing.pack(fewer, tmp_path / "shards", options, lambda done, total: None)


def test_a_folder_and_its_shards_are_the_same_data(tmp_path, data):
    lines = packed(data, tmp_path / "shards")
    number = len(list((tmp_path / "shards/train").glob("*.tar")))
    assert number > 3
    assert f"30 images in {number} shards" in lines[0]
    before = contents(tmp_path / "shards")
    packed(data, tmp_path / "shards")
    assert contents(tmp_path / "shards") == before
    assert_equal(datasets.shards(Shards(root=str(tmp_path / "shards"))), data)


def test_names_of_any_kind_become_samples_of_their_own(tmp_path):
    for place, name in enumerate(ODD):
        suffix = name.rpartition(".")[2].upper()
        put(tmp_path / "images" / name, picture(place, {"JPG": "JPEG"}.get(suffix, suffix)))
    lost = put(tmp_path / "images/b/lost.jpg")
    data = datasets.folder(Folder(root=str(tmp_path / "images"), held_out=0.1))
    lost.unlink()
    packed(data, tmp_path / "shards", shard_size=10)
    for part, source in (("train", data.train), ("test", data.test)):
        there = [i for i in range(len(source)) if source.name(i) != str(lost)]
        of_index = shards.open_shards(str(tmp_path / "shards"), [f"{part}/000000.tar"])
        assert [of_index.inner_name(i) for i in range(len(of_index))] == [source.inner_name(i) for i in there]
        (tmp_path / "shards" / part / "000000.index.json").unlink()
        of_headers = shards.open_shards(str(tmp_path / "shards"), [f"{part}/000000.tar"])
        for found, classes in ((of_index, source.classes), (of_headers, ("0", "1"))):
            assert class_names(found) == [classes[source.labels[i]] for i in there]
            assert all(torch.equal(found.read(place), source.read(i)) for place, i in enumerate(there))
        with tarfile.open(tmp_path / "shards" / part / "000000.tar") as file:
            suffixes = [member.name.rpartition("/")[2].partition(".")[2].lower() for member in file]
        assert set(suffixes[::2]) == {"cls"}
        assert all("." not in suffix for suffix in suffixes)


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("shard_size", [0.004, 10])
def test_images_of_one_stem_have_names_and_keys_of_their_own(tmp_path, size, shard_size):
    names = [f"{folder}/{stem}.{kind}" for folder in "ab" for stem in range(3) for kind in ("bmp", "png", "jpg")]
    names += ["a/0_1.jpg", "a/0%2Ejpg.jpg", "a/0"]
    for place, name in enumerate(names):
        kind = name.partition(".")[2].upper()
        put(tmp_path / name, picture(place, kind if kind in ("BMP", "PNG") else "JPEG", (20, 24)))
    names += [*names[:3], "a/0"]  # as a table may list a file again
    classes = [str(place) for place in range(len(names))]
    source = Files([str(tmp_path / name) for name in names], list(range(len(names))), classes)
    data = Data(source, None, None, source.classes)

    def interrupt(done: int, total: int) -> None:
        if done >= len(names) - 2:
            raise KeyboardInterrupt

    options = {"size": size, "shard_size": shard_size}
    with pytest.raises(KeyboardInterrupt):
        packed(data, tmp_path / "broken", interrupt, **options)
    for output in ("broken", "whole"):
        packed(data, tmp_path / output, **options)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
    paths = sorted((tmp_path / "whole/train").glob("*.tar"))
    assert (len(paths) > 1) == (shard_size < 1)
    for of_headers in (False, True):
        for path in paths if of_headers else ():
            shards.index_path(path).unlink()
        found = shards.open_shards(str(tmp_path / "whole/train"), [path.name for path in paths], classes)
        assert found.labels.tolist() == source.labels.tolist()
        assert len({found.inner_name(i) for i in range(len(found))}) == len(names)
        if size is None:
            assert all(torch.equal(found.read(i), source.read(i)) for i in range(len(names)))
    members = []
    for path in paths:
        with tarfile.open(path) as file:
            members += file.getnames()
    assert len({member.rpartition(".")[0] for member in members}) * 2 == len(set(members)) == len(members)


@pytest.mark.parametrize("option", ["masks", "mask", "range", "channels"])
def test_what_shards_cannot_contain_is_an_error(tmp_path, option):
    put(tmp_path / "images/a.png", picture(0))
    put(tmp_path / "t.csv", b"path,mask\nimages/a.png,images/a.png\n")
    data = {"masks": ["data=folder", f"data.root={tmp_path}/images", f"data.masks={tmp_path}/images"],
            "mask": ["data=csv", f"data.table={tmp_path}/t.csv"],
            "range": ["data=huggingface", f"data.root={tmp_path}", "data.range=[0,4000]"],
            "channels": ["data=huggingface", f"data.root={tmp_path}", "data.channels=1"]}[option]  # fmt: skip
    error = error_of(pack_command.call, [*data, f"output={tmp_path}/shards"])
    assert (str(error).partition("=")[0], error.status) == (f"data.{option}", 2)
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize("size", [None, 8])
def test_files_without_a_suffix_get_that_of_their_format(tmp_path, size):
    for place, name in enumerate("abc"):
        put(tmp_path / "images" / name, picture(place, "PNG", (20, 24)))
    put(tmp_path / "t.csv", b"path\nimages/a\nimages/b\nimages/c")
    data = datasets.csv(Csv(table=str(tmp_path / "t.csv"), held_out=0.4))
    packed(data, tmp_path / "shards", size=size)
    (tmp_path / "shards" / "train" / "000000.index.json").unlink()
    found = shards.open_shards(str(tmp_path / "shards"), ["train/000000.tar"])
    names = [Path(found.inner_name(place)) for place in range(len(found))]
    assert [name.stem for name in names] == [Path(data.train.name(place)).name for place in range(len(data.train))]
    assert {name.suffix for name in names} == {".png" if size is None else ".jpg"}


@pytest.mark.parametrize("after", [1, 7, 17, 29])
def test_an_interrupted_command_is_continued(tmp_path, data, after):
    packed(data, tmp_path / "whole")

    def interrupt(done: int, total: int) -> None:
        if done >= after:
            raise KeyboardInterrupt

    broken = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        packed(data, broken, interrupt)
    before = {path: path.stat().st_mtime_ns for path in broken.rglob("*.tar")}
    assert len(before) < len(list((tmp_path / "whole/train").glob("*.tar")))
    shown: list[int] = []
    packed(data, broken, lambda done, total: shown.append(done))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (shown[0] > 0) == bool(before)
    assert contents(broken) == contents(tmp_path / "whole")


def test_missing_shards_are_written_again(tmp_path, data):
    for folder in ("whole", "broken"):
        packed(data, tmp_path / folder)
    shards = sorted((tmp_path / "broken/train").glob("*.tar"))
    shards[1].unlink()
    shards[-1].unlink()
    packed(data, tmp_path / "broken")
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


def test_several_classes_are_read_without_the_index(tmp_path):
    labels = torch.tensor([[True, False, True], [False, False, False], [False, True, False], [True, True, True]])
    images = torch.arange(4 * 3 * 5 * 5, dtype=torch.uint8).view(4, 3, 5, 5)
    train = Memory(images, labels, ("a", "b", "c"))
    packed(Data(train, None, train, train.classes), tmp_path)
    for index in tmp_path.rglob("*.json"):
        index.unlink()
    found = datasets.shards(Shards(root=str(tmp_path))).train
    assert torch.equal(found.labels, labels)
    assert tuple(found.classes) == ("0", "1", "2")


def test_shards_of_other_images_or_options_are_replaced_only_with_overwrite(tmp_path, data):
    packed(data, tmp_path / "shards")
    image = tmp_path / "images" / "train" / "a" / "000.png"
    stored = image.read_bytes()
    image.write_bytes(stored[:-1] + b"\0")  # of the same size
    with pytest.raises(OptionError, match=r"^output="):
        packed(datasets.folder(Folder(root=str(tmp_path / "images"))), tmp_path / "shards")
    image.write_bytes(stored)
    put(tmp_path / "foreign/train/photos.tar", b"mine")
    for output, changes in (("shards", {"size": 5}), ("foreign", {})):
        before = contents(tmp_path / output)
        with pytest.raises(OptionError, match=r"output=.*overwrite=true"):
            packed(data, tmp_path / output, **changes)
        assert contents(tmp_path / output) == before
    packed(data, tmp_path / "shards", size=5, overwrite=True)
    with pytest.raises(OptionError, match=r"output=.*overwrite=true"):
        packed(data, tmp_path / "shards")


@pytest.mark.parametrize("part", ["", "train"])
def test_shards_are_not_replaced_by_those_made_of_them(tmp_path, data, part):
    packed(data, tmp_path / "shards")
    before = contents(tmp_path / "shards")
    (tmp_path / "link").symlink_to(tmp_path / "shards")
    of_shards = datasets.shards(Shards(root=str(tmp_path / "shards" / part)))
    for output in ("shards", "link"):
        with pytest.raises(OptionError, match=r"^output="):
            packed(of_shards, tmp_path / output, size=5, overwrite=True)
        assert contents(tmp_path / "shards") == before


def test_no_shards_are_written_if_no_image_of_a_split_can_be_read(tmp_path, data):
    packed(data, tmp_path / "shards")
    before = contents(tmp_path / "shards")
    for path in (tmp_path / "images/val").rglob("*.png"):
        path.unlink()
    for output, overwrite in (("shards", True), ("other", False)):
        with pytest.raises(UserError, match=rf"{output}/val: .*\b6\b"):
            packed(data, tmp_path / output, overwrite=overwrite)
    assert contents(tmp_path / "shards") == before
    assert not (tmp_path / "other").exists()


def test_larger_images_are_resized_and_others_stay_as_they_are(tmp_path):
    sizes = {"large.png": (40, 60), "tall.jpg": (90, 30), "small.png": (20, 50), "just.gif": (24, 24)}
    (tmp_path / "images").mkdir()
    for name, (height, width) in sizes.items():
        ramp = np.linspace(0, 255, width).astype(np.uint8)
        Image.fromarray(np.repeat(np.repeat(ramp[None, :, None], height, 0), 3, 2)).save(tmp_path / "images" / name)
    packed(datasets.folder(Folder(root=str(tmp_path / "images"), held_out=0.3)), tmp_path / "shards", size=24)
    data = datasets.shards(Shards(root=str(tmp_path / "shards")))
    for source in (data.train, data.test):
        for i in range(len(source)):
            name, image = source.inner_name(i), source.read(i)
            old = next(old for old in sizes if old.partition(".")[0] == name.partition(".")[0])
            if min(sizes[old]) <= 24:
                assert (name, source.file(i).tobytes()) == (old, (tmp_path / "images" / old).read_bytes())
            else:
                assert name.endswith(".jpg")
                assert image.shape[1:] == {"large.png": (24, 36), "tall.jpg": (72, 24)}[old]
                assert np.abs(image[0, 5].numpy() - np.linspace(0, 255, image.shape[2])).max() < 12


def test_images_in_memory_become_png(tmp_path):
    images = torch.randint(0, 256, (12, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    source = Memory(images, [2, 0] * 6, ("z", "y", "x"))
    packed(Data(source, None, source.take(torch.tensor([3, 5])), source.classes), tmp_path / "shards")
    data = datasets.shards(Shards(root=str(tmp_path / "shards")))
    assert (data.classes, data.train.labels.tolist()) == (("z", "y", "x"), [2, 0] * 6)
    assert torch.equal(torch.stack([data.train.read(i) for i in range(12)]), images)
    assert torch.equal(data.test.read(1), images[5])


def test_webdataset_reads_these_shards(tmp_path, data):
    webdataset = pytest.importorskip("webdataset")
    packed(data, tmp_path / "shards")
    paths = sorted(map(str, (tmp_path / "shards/train").glob("*.tar")))
    samples = list(webdataset.WebDataset(paths, shardshuffle=False))
    numbers = [*range(0, 30, 2), *range(1, 30, 2)]
    assert [sample["__key__"] for sample in samples] == [f"{'ab'[i % 2]}/{i:03d}" for i in numbers]
    assert [int(sample["cls"]) for sample in samples] == data.train.labels.tolist()
    assert all(torch.equal(pixels(sample["png"]), data.train.read(i)) for i, sample in enumerate(samples))


def test_a_shard_that_differs_from_its_index_is_named(tmp_path, data):
    packed(data, tmp_path / "shards")
    shard = tmp_path / "shards/train/000002.tar"
    os.truncate(shard, shard.stat().st_size - 512)
    with pytest.raises(UserError, match=r"000002\.tar: .*\d+.*\d+"):
        datasets.shards(Shards(root=str(tmp_path / "shards")))
    (tmp_path / "shards/train/000002.index.json").write_text("{")
    with pytest.raises(UserError, match=r"000002\.index\.json: "):
        datasets.shards(Shards(root=str(tmp_path / "shards")))


def test_a_run_on_shards_resumes_bit_for_bit(tool, tmp_path):
    pack_command.call([f"data={write_folder(tmp_path / 'images', 40)}", f"output={tmp_path}/packed", "shard_size=0.01"])
    options = (*tiny_options("data"), "data=shards", "data.root=packed", "data.image_size=16", "encoder.patch_size=4")
    tool("pretrain", *options, "name=whole")
    kill_after(tmp_path, "step 3/6", *options, "name=killed", "workers=2")
    tool("pretrain", *options, "name=killed", "workers=1")
    assert final(tmp_path / "outputs/killed") == final(tmp_path / "outputs/whole")
    manifest = json.loads(next((tmp_path / "outputs/whole").glob("step_*6/manifest.json")).read_text())
    assert manifest["order"] == "bijection"
    assert "data.order=permutation" in one_line(
        tool("pretrain", *options, "name=killed", "data.order=permutation", status=1)
    )
