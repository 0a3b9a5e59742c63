"""`ssvit embed` writes features with names and classes to a file, and resumes an interrupted command."""

import io
import os
import re

import datasets as hub
import numpy as np
import pytest
import tiny
import torch
from command import TINY, one_line
from composing import composed, untrained
from images import picture, put, put_tar
from PIL import Image

import ssvit
from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources.base import Source, Unreadable
from ssvit.data.sources.decode import load
from ssvit.errors import Failure, UserError
from ssvit.retrieval import feature_table, gallery
from ssvit.retrieval import options as retrieval_options
from ssvit.retrieval import pictures as pictures_module
from ssvit.retrieval.pictures import Describer, PictureSet


@pytest.fixture
def photos(tmp_path):
    """A folder of pictures, next to a run of a tiny model without its training."""
    untrained(tmp_path / "outputs" / "masked_patch_shapes", *TINY)
    for place in range(10):
        path = tmp_path / "photos" / ("train" if place < 7 else "test") / "ab"[place % 2] / f"{place}.png"
        put(path, picture(place, size=(20, 24)))
    put(tmp_path / "photos" / "train" / "a" / "broken.png", b"no picture")
    put(tmp_path / "photos" / "unsorted" / "10.png", picture(10, size=(20, 24)))
    return tmp_path / "photos"


def test_a_folder_becomes_a_file_of_features(tool, tmp_path, photos):
    names = sorted(str(path) for path in photos.rglob("[0-9].png"))
    expected = ssvit.load(tmp_path / "outputs" / "masked_patch_shapes").features(names).numpy()
    done = tool("embed", f"data={photos}", "output=f.npz", "batch_size=3")
    assert re.search(r"\b10 .*\b7 train\b.*\b3 test\b.*\b16 .*\b1 ", done.stdout)
    assert "broken.png" in done.stdout
    file = np.load(tmp_path / "f.npz")
    found = file["names"].tolist()
    assert sorted(found) == names
    assert file["classes"].tolist() == [name.split("/")[-2] for name in found]
    assert file["splits"].tolist() == [name.split("/")[-3] for name in found]
    np.testing.assert_allclose(file["features"], expected[[names.index(name) for name in found]], rtol=1e-5, atol=1e-6)
    assert " layer2_patch_mean" in str(file["encoder"])
    assert not list(tmp_path.glob("*.parts"))
    line = one_line(tool("embed", f"data={photos}", "output=f.npz", status=2))
    assert line.startswith("ssvit: output=f.npz: ")


def test_a_table_is_written_with_its_splits(tool, tmp_path, photos):
    rows = [f"{place}.png,{'ab'[place % 2]},{split}" for place, split in enumerate(["train", "val", "test", "train"])]
    (tmp_path / "t.csv").write_text("\n".join(["path,label,split", *rows, "0.png,b,test"]) + "\n")
    for file in photos.rglob("[0-3].png"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    test = [("2", "a", "test"), ("0", "b", "test")]  # the table has a row for each split of picture 0
    every = [("0", "a", "train"), ("3", "b", "train"), ("1", "b", "validation"), *test]
    for output, options, expected in (("f", (), every), ("g", ("split=test",), test)):
        tool("embed", f"data={tmp_path}/t.csv", f"output={output}.npz", *options)
        found = np.load(tmp_path / f"{output}.npz")
        numbers = [name[-5:-4] for name in found["names"]]
        assert [*zip(numbers, found["classes"], found["splits"], strict=True)] == expected
        assert len({tuple(row) for row in found["features"].tolist()}) == len({*numbers})


def test_a_parquet_table_has_a_row_for_each_patch(tool, tmp_path, photos):
    table = pytest.importorskip("pyarrow.parquet")
    names = sorted(str(path) for path in photos.rglob("[0-9].png"))
    encoder = tiny.loaded(tmp_path / "outputs" / "masked_patch_shapes" / "step_00000006")
    options = (f"data={photos}", "precision=32", "features.pooling=patches")
    tool("embed", *options, "output=f.parquet")
    found = table.read_table(tmp_path / "f.parquet")
    assert b" layer2_patches" in found.schema.metadata[b"encoder"]
    assert found.schema.field("vector").type.list_size == 16
    rows = {name: [] for name in names}
    for row in found.to_pylist():
        rows[row["path"]].append(row)
        assert (row["label"], row["split"]) == (row["path"].split("/")[-2], row["path"].split("/")[-3])
    for name, patches in rows.items():
        with torch.no_grad():
            image = CenterCrop(size=16).build()([load(name)])
            *_, tokens = encoder.layers(image / 255)
            maps = encoder.pooled(encoder.norm(tokens), "patches", image)[0]
        assert [(row["row"], row["column"]) for row in patches] == [*np.ndindex(maps.shape[:2])]
        for row in patches:
            assert (row["right"] - row["left"], row["bottom"] - row["top"]) == encoder.patch_size[::-1]
            assert (row["top"], row["left"]) == tuple(np.multiply((row["row"], row["column"]), encoder.patch_size))
            np.testing.assert_allclose(row["vector"], maps[row["row"], row["column"]], rtol=1e-4, atol=1e-5)
    assert not list(tmp_path.glob("*.parts"))
    assert one_line(tool("embed", *options, "output=g.npz", status=2)).startswith("ssvit: output=g.npz: ")
    assert not (tmp_path / "g.npz").exists()


def test_names_that_parquet_cannot_store_are_an_error_before_the_first_feature(tool, tmp_path, photos):
    pytest.importorskip("pyarrow")
    (next(photos.rglob("0.png"))).rename(photos / os.fsdecode(b"\xff.png"))
    assert "\\udcff.png: " in tool("embed", str(photos), "output=f.parquet", status=1).stderr
    assert not [*tmp_path.glob("f.parquet*")]


def test_a_parquet_table_of_pictures_equals_the_arrays(tool, tmp_path, photos):
    pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    for output in ("f.npz", "f.parquet"):
        tool("embed", str(photos / "unsorted"), str(photos / "test"), f"output={output}")
    arrays, table = np.load(tmp_path / "f.npz"), pandas.read_parquet(tmp_path / "f.parquet")
    assert [*table] == ["path", "split", "label", "vector"]
    assert table["path"].tolist() == arrays["names"].tolist()
    assert table["label"].fillna("").tolist() == arrays["classes"].tolist()
    assert table["split"].isna().all()
    np.testing.assert_array_equal(np.stack(table["vector"]), arrays["features"])


def test_row_groups_hold_the_patches_in_order(monkeypatch):
    pytest.importorskip("pyarrow")
    from pyarrow.parquet import ParquetFile

    monkeypatch.setattr(feature_table, "_ROWS", 12)
    features = torch.arange(5 * 2 * 3 * 4.0).view(5, 2, 3, 4)
    table = feature_table.FeatureTable([*"abcde"], [""] * 5, [""] * 5, features, "e")
    file = ParquetFile(io.BytesIO(table.parquet((8, 9))))
    assert file.num_row_groups == 3
    table = file.read()
    assert table["path"].to_pylist() == [name for name in "abcde" for _ in range(6)]
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist()), features.view(-1, 4))
    last = table.slice(29).to_pylist()[0]
    assert [last[side] for side in ("left", "top", "right", "bottom")] == [6, 4, 9, 8]


def test_a_table_needs_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval_options, "find_spec", lambda name: None)
    with pytest.raises(Failure, match=r"^output=\S+f\.parquet: "):
        composed(f"output={tmp_path}/f.parquet", tool="embed")


def test_rows_of_a_set_without_splits_have_its_order_and_names_that_lead_to_the_image(tool, tmp_path, photos):
    files = sorted(photos.rglob("[0-9].png"), key=lambda path: int(path.stem) * 7 % 10)
    expected = ssvit.load(tmp_path / "outputs" / "masked_patch_shapes").features([*map(str, files)]).numpy()
    (photos / "t.csv").write_text("\n".join(["path", *(str(file.relative_to(photos)) for file in files)]) + "\n")
    members = {f"./{file.parent.name}/{file.stem}.0.png": file.read_bytes() for file in files}
    put_tar(tmp_path / "shards" / "0.tar", members)
    images = [{"bytes": file.read_bytes(), "path": None} for file in files]
    hub.Dataset.from_dict({"image": images}, features=hub.Features({"image": hub.Image()})).save_to_disk(
        str(tmp_path / "hub")
    )
    names = {
        f"data={photos}/t.csv": [*map(str, files)],
        f"data={tmp_path}/shards": [f"{tmp_path}/shards/0.tar/{member}" for member in members],
        f"data=huggingface data.root={tmp_path}/hub": [f"{tmp_path}/hub/{row}" for row in range(10)],
    }
    for data, rows in names.items():
        tool("embed", *data.split(), "output=f.npz", "overwrite=true")
        file = np.load(tmp_path / "f.npz")
        assert file["names"].tolist() == rows
        np.testing.assert_allclose(file["features"], expected, rtol=1e-5, atol=1e-6)


class Number:
    """An extractor whose features are a picture's number and one."""

    identity = "number"

    def __call__(self, images):
        return {"number": torch.stack([images.flatten(), torch.ones(len(images))], 1)}


class Numbers(Source):
    """Pictures that are their number, and fail at the call with a number."""

    def __init__(self, names, fails_at: int = -1, failure: type[BaseException] = KeyboardInterrupt) -> None:
        self.names, self.read_names, self.fails_at, self.failure = names, [], fails_at, failure

    def __len__(self):
        return len(self.names)

    def read(self, index):
        if len(self.read_names) == self.fails_at:
            raise self.failure
        self.read_names.append(name := self.names[index])
        if name == "bad":
            raise Unreadable(name, "no picture")
        return torch.tensor([[float(name)]])


def stacked(images, slots=None, seed=None):
    return torch.stack(list(images))


def embed(path, source, transform=stacked):
    describe = Describer(Number(), transform, batch_size=1)
    sets = {"": PictureSet(source, source.names, [None] * len(source.names))}
    return gallery.embed(sets, describe, path, image_size=(1, 1))[0]


def in_file(path) -> list[str]:
    return np.load(path)["names"].tolist()


@pytest.mark.parametrize("failure", [KeyboardInterrupt, UserError])  # the latter if too many files are open
def test_pictures_that_were_read_are_not_read_again(tmp_path, monkeypatch, failure):
    monkeypatch.setattr(pictures_module, "PART", 3)
    names, path = [str(number) for number in range(10)], tmp_path / "f.npz"
    with pytest.raises(failure):
        embed(path, Numbers(names, 8, failure))
    assert not path.exists()
    again = Numbers(["bad", *names[1:]])  # other pictures of the same encoder
    assert "1 could not be read" in embed(path, again)[0]
    assert again.read_names == ["bad", "6", "7", "8", "9"]
    assert in_file(path) == names[1:]
    assert np.load(path)["features"][:, 0].tolist() == list(range(1, 10))
    assert os.listdir(tmp_path) == ["f.npz"]


def test_an_interruption_loses_the_pictures_of_at_most_a_part_and_of_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures_module, "PART_SECONDS", 0)
    names, path = [str(number) for number in range(10)], tmp_path / "f.npz"
    with pytest.raises(KeyboardInterrupt):
        embed(path, Numbers(names, 8))
    again = Numbers(names)
    embed(path, again)
    assert again.read_names == ["8", "9"]
    assert np.load(path)["features"][:, 0].tolist() == list(range(10))


def test_damaged_parts_are_computed_again(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures_module, "PART", 3)
    names, path = [str(number) for number in range(8)], tmp_path / "f.npz"
    with pytest.raises(KeyboardInterrupt):
        embed(path, Numbers(names, 7))
    last = max((tmp_path / "f.npz.parts").glob("part_*"))
    last.write_bytes(last.read_bytes()[:20])
    embed(path, Numbers(names))
    assert np.load(path)["features"][:, 0].tolist() == list(range(8))


def test_parts_of_another_encoder_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures_module, "PART", 3)
    names, path = [str(number) for number in range(6)], tmp_path / "f.npz"
    with pytest.raises(KeyboardInterrupt):
        embed(path, Numbers(names, 5))
    again = Numbers(names)
    embed(path, again, transform=lambda *arguments: stacked(*arguments))
    assert again.read_names == in_file(path) == names


def test_nothing_is_written_if_nothing_can_be_read(tmp_path):
    with pytest.raises(UserError, match=r"\b1\b"):
        embed(tmp_path / "g.npz", Numbers(["bad"]))
    assert not os.listdir(tmp_path)


def test_a_folder_with_other_files_is_not_deleted(tmp_path):
    kept = tmp_path / "f.npz.parts" / "mine"
    kept.parent.mkdir()
    kept.write_text("precious")
    with pytest.raises(UserError, match=r"f\.npz\.parts: "):
        embed(tmp_path / "f.npz", Numbers(["1"]))
    assert kept.read_text() == "precious"


def test_windows_of_large_pictures_are_rows(tool, tmp_path, photos):
    tool("embed", str(photos / "unsorted"), "window=[20,16]", "overlap=4", "precision=32", "output=f.npz")
    file, path = np.load(tmp_path / "f.npz"), str(photos / "unsorted" / "10.png")
    assert file["names"].tolist() == [path, path]
    assert file["windows"].tolist() == [[0, 0, 16, 20], [8, 0, 24, 20]]  # of a picture of 24 x 20 pixels
    encoder = ssvit.load(tmp_path / "outputs" / "masked_patch_shapes", precision="32")
    for (left, top, right, bottom), row in zip(file["windows"], file["features"], strict=True):
        part = torch.stack([load(path)[:, top:bottom, left:right]])
        np.testing.assert_allclose(row, encoder.features(part)[0].numpy(), rtol=1e-5, atol=1e-6)


def test_a_table_has_thumbnails_of_pictures_and_patches(tool, tmp_path, photos):
    table = pytest.importorskip("pyarrow.parquet")
    for pooling, sides, count in (("patch_mean", (10, 10), 1), ("patches", (4, 4), 16)):
        options = (f"features.pooling={pooling}", "thumbnail=10", f"output={pooling}.parquet")
        tool("embed", str(photos / "unsorted"), *options)
        rows = table.read_table(tmp_path / f"{pooling}.parquet").to_pylist()
        assert len(rows) == count
        shown = CenterCrop(size=16).build()([load(rows[0]["path"])])[0]
        for row in rows:
            (jpeg,) = (value for value in row.values() if isinstance(value, bytes | dict))
            content = jpeg["bytes"] if isinstance(jpeg, dict) else jpeg
            with Image.open(io.BytesIO(content)) as picture_of_row:
                assert (picture_of_row.format, picture_of_row.size) == ("JPEG", sides)
                mean = np.asarray(picture_of_row).mean((0, 1))
            area = shown[:, row["top"] : row["bottom"], row["left"] : row["right"]] if count > 1 else shown
            np.testing.assert_allclose(mean, area.float().mean((1, 2)), atol=12)
    tool("embed", str(photos / "unsorted"), "thumbnail=10", "output=f.npz", status=2)
