"""Shards hold the images that they were made of, bit for bit, whatever interrupts the command that makes them."""

import json
import os
import subprocess
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from command import LIMIT, TINY, one_line, program
from PIL import Image
from runs import final, kill_after
from test_shards import in_memory
from test_source_contract import picture, pixels

from ssvit.cli.pack import command as pack_tool
from ssvit.data.augment.crop import InceptionCrop
from ssvit.data.loader import Loader
from ssvit.data.sources import datasets, datasets_options, packing, shards
from ssvit.data.sources.base import Data
from ssvit.data.sources.memory import Memory
from ssvit.data.sources.packing_options import Pack
from ssvit.options import Failure, OptionError, UserError

ODD = ("a/x.y.jpg", "a/x.jpg", "a/x.png", "a/x%2Ejpg.jpg", "a/2.JPG", "b/ü\udcff.png", "b/c.d/1.webp", "b/ .gif")


def own(output: Path, **changes: object) -> Pack:
    return Pack(output=str(output), **({"shard_size": 0.004, "workers": 2} | changes))  # type: ignore[arg-type]


def folder(root: Path, count: int = 30) -> Path:
    """Images of two classes to train on, and fewer for choices."""
    for part, images in (("train", count), ("val", 6)):
        for i in range(images):
            path = root / part / "ab"[i % 2] / f"{i:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(i + 100 * (part == "val")))
    return root


def packed(data: Data, output: Path, **changes: object) -> list[str]:
    return packing.pack(data, output, own(output, **changes), lambda done, total: None)


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_folder_and_its_shards_are_the_same_data(tmp_path: Path) -> None:
    data = datasets.folder(datasets_options.Folder(root=str(folder(tmp_path / "images"))))
    lines = packed(data, tmp_path / "shards")
    number = len(list((tmp_path / "shards/train").glob("*.tar")))
    assert number > 3
    assert lines[0].startswith(f"{tmp_path}/shards/train: 30 images in {number} shards, ")
    assert packed(data, tmp_path / "shards")[0].endswith(", there already")
    found = datasets.shards(datasets_options.Shards(root=str(tmp_path / "shards")))
    assert data.validation is not None
    assert found.validation is not None
    assert found.classes == data.classes
    for one, other in ((found.train, data.train), (found.validation, data.validation)):
        assert one.fingerprint == other.fingerprint
        assert one.labels is not None
        assert one.labels.tolist() == other.labels.tolist()  # type: ignore[union-attr]
        assert all(torch.equal(one.read(i), other.read(i)) for i in range(len(other)))
    of_both = [
        Loader(source=source, transform=InceptionCrop(size=6), seed=0, batch_size=8).batches(0, 6)
        for source in (found.train, data.train)
    ]
    assert all(torch.equal(one.images, other.images) for one, other in zip(*of_both, strict=True))


def test_names_of_any_kind_become_samples_of_their_own(tmp_path: Path) -> None:
    for place, name in enumerate(ODD):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = {"jpg": "JPEG"}.get(path.suffix[1:].lower(), path.suffix[1:].upper())
        path.write_bytes(picture(place, kind))
    (tmp_path / "images/b/lost.jpg").touch()
    data = datasets.folder(datasets_options.Folder(root=str(tmp_path / "images"), held_out=0.1))
    (tmp_path / "images/b/lost.jpg").unlink()
    packed(data, tmp_path / "shards", shard_size=10)
    for part, source in (("train", data.train), ("test", data.test)):
        assert source is not None
        there = [i for i in range(len(source)) if not source.name(i).endswith("lost.jpg")]
        with_index = shards.find(str(tmp_path / "shards"), [f"{part}/000000.tar"])
        names = [os.path.relpath(source.name(i), tmp_path / "images") for i in there]
        assert [with_index.index.name(i) for i in range(len(with_index))] == names
        (tmp_path / "shards" / part / "index.safetensors").unlink()
        without = shards.find(str(tmp_path / "shards"), [f"{part}/000000.tar"])
        assert source.labels is not None
        for one, classes in ((with_index, source.classes), (without, ("0", "1"))):
            assert one.labels is not None
            assert [one.classes[label] for label in one.labels] == [classes[source.labels[i]] for i in there]
            assert all(torch.equal(one.read(place), source.read(i)) for place, i in enumerate(there))
        with tarfile.open(tmp_path / "shards" / part / "000000.tar") as file:
            endings = [member.name.rpartition("/")[2].partition(".")[2].lower() for member in file]
        assert set(endings[::2]) == {"cls"}
        assert all("." not in ending for ending in endings)


@pytest.mark.parametrize("after", [1, 7, 17, 29])
def test_an_interrupted_command_goes_on(tmp_path: Path, after: int) -> None:
    data = datasets.folder(datasets_options.Folder(root=str(folder(tmp_path / "images"))))
    packed(data, tmp_path / "whole")

    def interrupt(done: int, total: int) -> None:
        if done >= after:
            raise KeyboardInterrupt

    broken = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        packing.pack(data, broken, own(broken), interrupt)
    before = {path: path.stat().st_mtime_ns for path in broken.rglob("*.tar")}
    assert len(before) < len(list((tmp_path / "whole/train").glob("*.tar")))
    shown: list[int] = []
    packing.pack(data, broken, own(broken), lambda done, total: shown.append(done))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert (shown[0] > 0) == bool(before)
    assert files(broken) == files(tmp_path / "whole")


def test_other_images_or_options_do_not_mix_with_what_is_there(tmp_path: Path) -> None:
    data = datasets.folder(datasets_options.Folder(root=str(folder(tmp_path / "images", 10))))
    packed(data, tmp_path / "shards")
    with pytest.raises(
        OptionError, match=r"output=.*train holds shards of other images or by other options: overwrite"
    ):
        packed(data, tmp_path / "shards", size=5)
    packed(data, tmp_path / "shards", size=5, overwrite=True)
    with pytest.raises(OptionError, match="overwrite=true replaces them"):
        packed(data, tmp_path / "shards")
    (tmp_path / "foreign/train").mkdir(parents=True)
    (tmp_path / "foreign/train/photos.tar").write_text("mine")
    with pytest.raises(OptionError, match="overwrite=true replaces them"):
        packed(data, tmp_path / "foreign")
    assert files(tmp_path / "foreign") == {"train/photos.tar": b"mine"}


@pytest.mark.parametrize("part", ["", "train"])
def test_shards_are_not_replaced_by_what_is_made_of_them(tmp_path: Path, part: str) -> None:
    packed(datasets.folder(datasets_options.Folder(root=str(folder(tmp_path / "images", 10)))), tmp_path / "shards")
    before = files(tmp_path / "shards")
    (tmp_path / "link").symlink_to(tmp_path / "shards")
    data = datasets.shards(datasets_options.Shards(root=str(tmp_path / "shards" / part)))
    for output in ("shards", "link"):
        with pytest.raises(OptionError, match=rf"output=.*{output}: is the folder that the images are read from"):
            packed(data, tmp_path / output, size=5, overwrite=True)
        assert files(tmp_path / "shards") == before


def test_no_shards_are_made_where_no_image_of_a_split_can_be_read(tmp_path: Path) -> None:
    packed(datasets.folder(datasets_options.Folder(root=str(folder(tmp_path / "images", 10)))), tmp_path / "shards")
    before = files(tmp_path / "shards")
    data = datasets.folder(datasets_options.Folder(root=str(tmp_path / "images")))
    for path in (tmp_path / "images/val").rglob("*.png"):
        path.unlink()
    for output, overwrite in (("shards", True), ("other", False)):
        with pytest.raises(UserError, match=f"{output}/val: none of the 6 images that it is to hold can be read"):
            packed(data, tmp_path / output, overwrite=overwrite)
    assert files(tmp_path / "shards") == before
    assert not (tmp_path / "other").exists()


def test_larger_images_are_made_smaller_and_others_stay_as_they_are(tmp_path: Path) -> None:
    sizes = {"large.png": (40, 60), "tall.jpg": (90, 30), "small.png": (20, 50), "just.gif": (24, 24)}
    (tmp_path / "images").mkdir()
    for name, (height, width) in sizes.items():
        ramp = np.linspace(0, 255, width).astype(np.uint8)
        Image.fromarray(np.repeat(np.repeat(ramp[None, :, None], height, 0), 3, 2)).save(tmp_path / "images" / name)
    data = datasets.folder(datasets_options.Folder(root=str(tmp_path / "images"), held_out=0.3))
    packed(data, tmp_path / "shards", size=24)
    found = datasets.shards(datasets_options.Shards(root=str(tmp_path / "shards")))
    for source in (found.train, found.test):
        assert isinstance(source, shards.Shards)
        for i in range(len(source)):
            name, image = source.index.name(i), source.read(i)
            old = next(old for old in sizes if old.partition(".")[0] == name.partition(".")[0])
            height, width = sizes[old]
            if min(height, width) <= 24:
                assert (name, source.file(i).tobytes()) == (old, (tmp_path / "images" / old).read_bytes())
            else:
                assert name.endswith(".jpg")
                assert image.shape[1:] == (24, 36) if old == "large.png" else (72, 24)
                there = np.linspace(0, 255, image.shape[2])
                assert np.abs(image[0, 5].numpy() - there).max() < 12


def test_images_in_memory_become_png(tmp_path: Path) -> None:
    images = torch.randint(0, 256, (12, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    source = Memory(images, [2, 0] * 6, ("z", "y", "x"))
    packed(Data(source, None, source.take(torch.tensor([3, 5])), source.classes), tmp_path / "shards")
    found = datasets.shards(datasets_options.Shards(root=str(tmp_path / "shards")))
    assert found.classes == ("z", "y", "x")
    assert found.train.labels is not None
    assert found.train.labels.tolist() == [2, 0] * 6
    assert torch.equal(torch.stack([found.train.read(i) for i in range(12)]), images)
    assert found.test is not None
    assert torch.equal(found.test.read(1), images[5])


def test_webdataset_reads_these_shards_and_its_own_are_read(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    data = datasets.folder(datasets_options.Folder(root=str(folder(tmp_path / "images"))))
    packed(data, tmp_path / "shards")
    paths = sorted(map(str, (tmp_path / "shards/train").glob("*.tar")))
    theirs = list(webdataset.WebDataset(paths, shardshuffle=False))
    assert [sample["__key__"] for sample in theirs] == [
        f"{'ab'[i % 2]}/{i:03d}" for i in [*range(0, 30, 2), *range(1, 30, 2)]
    ]
    assert data.train.labels is not None
    assert [int(sample["cls"]) for sample in theirs] == data.train.labels.tolist()
    assert all(torch.equal(pixels(sample["png"]), data.train.read(i)) for i, sample in enumerate(theirs))
    with webdataset.TarWriter(str(tmp_path / "theirs-000000.tar")) as writer:
        for i in range(5):
            writer.write({"__key__": f"{i:06d}", "png": picture(i), "cls": 4 - i, "json": {"caption": "words"}})
    found = shards.find(str(tmp_path), ["theirs-000000.tar"])
    assert found.labels is not None
    assert found.labels.tolist() == [4, 3, 2, 1, 0]
    assert all(torch.equal(found.read(i), pixels(picture(i))) for i in range(5))


def test_verify_names_what_differs(tmp_path: Path) -> None:
    packed(datasets.folder(datasets_options.Folder(root=str(folder(tmp_path / "images")))), tmp_path / "shards")

    def line() -> str:
        return packing.verify(tmp_path / "shards", lambda done, total: None)

    assert line().endswith("shards and 36 images are as their checksums say")
    victim = tmp_path / "shards/train/000002.tar"
    content = victim.read_bytes()
    found = shards.find(
        str(tmp_path / "shards"), [f"train/{path.name}" for path in sorted(victim.parent.glob("*.tar"))]
    )
    row = found.index.columns["shard"].tolist().index(2)
    at = int(found.index.columns["offset"][row]) + 3
    victim.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(UserError, match=r"^2 shards or images differ from their checksums; the first: .*000002\.tar$"):
        line()
    victim.unlink()
    with pytest.raises(UserError, match=r"differ from their checksums; the first: .*000002\.tar$"):
        line()
    victim.write_bytes(content[:-512])
    with pytest.raises(UserError, match=r"000002\.tar: has \d+ bytes, and its index says \d+: copy it again"):
        datasets.shards(datasets_options.Shards(root=str(tmp_path / "shards")))
    with pytest.raises(OptionError, match=r"holds no index\.safetensors"):
        packing.verify(tmp_path / "images", lambda done, total: None)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_object_store_is_read_image_by_image_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """workers have a file system of their own: here one that reads this machine's files, as if they were far."""
    packed(datasets.folder(datasets_options.Folder(root=str(folder(tmp_path / "images")))), tmp_path / "shards")
    local = datasets.shards(datasets_options.Shards(root=str(tmp_path / "shards")))
    address = f"file://{tmp_path}/shards" if workers else in_memory(tmp_path / "shards", "memory://bucket/packed")
    far = datasets.shards(datasets_options.Shards(root=address, cache=str(tmp_path / "copies")))
    assert far.train.fingerprint == local.train.fingerprint
    assert not list((tmp_path / "copies").rglob("*.tar"))
    asked: list[int] = []
    ranges = fsspec.AbstractFileSystem.cat_ranges

    def counted(self, paths, starts, ends, **options):  # type: ignore[no-untyped-def]
        asked.append(len(paths))
        return ranges(self, paths, starts, ends, **options)

    monkeypatch.setattr(fsspec.AbstractFileSystem, "cat_ranges", counted)

    def batches(data: Data) -> list[torch.Tensor]:
        transform = InceptionCrop(size=6)
        loader = Loader(
            source=data.train, transform=transform, seed=0, batch_size=10, order="bijection", workers=workers
        )
        return [batch.images for batch in loader.batches(0, 6)]

    assert all(map(torch.equal, batches(far), batches(local)))
    assert asked == ([] if workers else [10, 10, 10])  # one request for a batch, none in the second epoch
    again = datasets.shards(datasets_options.Shards(root=address, cache=str(tmp_path / "copies")))
    asked.clear()
    assert all(map(torch.equal, batches(again), batches(local)))
    assert asked == []


def test_a_store_that_fails_is_asked_again_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(datasets.folder(datasets_options.Folder(root=str(folder(tmp_path / "images")))), tmp_path / "shards")
    address = in_memory(tmp_path / "shards", "memory://bucket/failing")
    far = datasets.shards(datasets_options.Shards(root=address, cache=str(tmp_path / "copies")))
    assert isinstance(far.train, shards.Shards)
    monkeypatch.setattr(shards.time, "sleep", lambda seconds: None)  # type: ignore[attr-defined]
    left = [2]
    ranges = fsspec.AbstractFileSystem.cat_ranges

    def failing(self, *given, **options):  # type: ignore[no-untyped-def]
        left[0] -= 1
        if left[0] >= 0:
            raise OSError("no route\nto host")
        return ranges(self, *given, **options)

    monkeypatch.setattr(fsspec.AbstractFileSystem, "cat_ranges", failing)
    assert torch.equal(far.train.read(0), pixels(picture(0)))
    left[0] = 100
    with pytest.raises(
        UserError, match=f"^data.root={address}: cannot be read: no route to host; the same command goes"
    ):
        far.train.read(1)
    left[0] = 0
    system, top = fsspec.url_to_fs(address)
    path = f"{top}/train/000000.tar"
    content = bytearray(system.cat_file(path))
    row = 1
    content[int(far.train.index.columns["offset"][row]) + 20] ^= 1
    system.pipe_file(path, bytes(content))
    with pytest.raises(UserError, match="has another checksum there"):
        far.train.read(row)


def command(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        program("pack", *options),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, **environment},
    )


def test_the_command_makes_shards_that_a_run_resumes_on_bit_for_bit(tool, tmp_path: Path) -> None:
    folder(tmp_path / "images", 40)
    done = command(tmp_path, "data=./images", "output=packed", "shard_size=0.01")
    assert "packed/train: 40 images in " in done.stdout
    assert "next: data=shards data.root=packed" in done.stdout
    assert "images are as their checksums say" in command(tmp_path, "output=packed", "verify=true").stdout
    options = (*TINY[4:], "data=shards", "data.root=packed", "data.image_size=16", "encoder.patch_size=4")
    tool("pretrain", *options, "name=whole")
    kill_after(tmp_path, "step 3/6", *options, "name=killed", "workers=2")
    assert "goes on after step 2" in tool("pretrain", *options, "name=killed", "workers=1").stdout
    assert final(tmp_path / "outputs/killed") == final(tmp_path / "outputs/whole")
    manifest = json.loads(next((tmp_path / "outputs/whole").glob("step_*6/manifest.json")).read_text())
    assert manifest["order"] == "bijection"
    line = one_line(tool("pretrain", *options, "name=killed", "data.order=permutation", status=1))
    assert "data.order=permutation: the run in" in line


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("output=x",), "data"),
        (("output=x", "verify=true"), "output"),
        (("output=x/y", "data=synthetic"), "output"),
        (("output=x", "data=synthetic", "size=0"), "size"),
        (("output=x", "data=synthetic", "quality=101"), "quality"),
    ],
)
def test_a_wrong_option_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Failure, match=rf"^{name}=[^\n]*$") as caught:
        pack_tool.call(options)
    assert caught.value.status == 2


def test_a_wrong_option_is_told_before_torch_loads(tmp_path: Path, no_torch: str) -> None:
    done = command(tmp_path, "output=x", "data=synthetic", "workers=0", PYTHONPATH=no_torch)
    assert done.returncode == 2
    assert one_line(done) == "ssvit: workers=0: must be a whole number, 1 or more"
