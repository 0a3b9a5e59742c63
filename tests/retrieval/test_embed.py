"""Features of pictures in a file: names, classes and numbers in each format, and what an interrupted command left."""

import json
import os
import socket

import numpy as np
import pytest
import torch
from command import TINY, one_line
from PIL import Image
from pyarrow import parquet
from safetensors import safe_open

import ssvit
from ssvit.data.sources.base import Unreadable
from ssvit.options import UserError
from ssvit.retrieval import embedding, gallery
from ssvit.retrieval.options import EMBEDDINGS


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for place in range(10):
        pixels = np.random.default_rng(place).integers(0, 256, (20, 24, 3), dtype=np.uint8)
        path = folder / ("train" if place < 7 else "test") / "ab"[place % 2] / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    (folder / "train" / "a" / "broken.png").write_bytes(b"no picture")
    (folder / "unsorted").mkdir()
    Image.new("RGB", (20, 24)).save(folder / "unsorted" / "10.png")
    return folder


def read(path):
    if path.suffix == ".npz":
        found = np.load(path)
        return found["names"].tolist(), found["classes"].tolist(), found["features"], found["splits"].tolist()
    if path.suffix == ".parquet":
        table = parquet.read_table(path)
        names, classes, splits = (table[name].to_pylist() for name in ("name", "class", "split"))
        return names, classes, np.array(table["features"].to_pylist(), "f4"), splits
    with safe_open(path, "np") as found:
        about = found.metadata()
        names, classes, splits = (json.loads(about[name]) for name in ("names", "classes", "splits"))
        return names, classes, found.get_tensor("features"), splits


def test_a_folder_becomes_a_file_of_features(tool, tmp_path, photos):
    tool("pretrain", *TINY)
    names = sorted(str(path) for path in photos.rglob("[0-9].png"))
    expected = ssvit.load(tmp_path / "outputs" / "masked_patch_synthetic").features(names).numpy()
    for suffix in EMBEDDINGS:
        done = tool("embed", f"data={photos}", f"output=f{suffix}", "batch_size=3")
        for counted in ("10 pictures", "7 train", "3 test", "16 numbers", "1 could not be read", "left out 1 "):
            assert counted in done.stdout.splitlines()[-1]
        assert "broken.png" in done.stdout
        found, classes, features, splits = read(tmp_path / f"f{suffix}")
        assert sorted(found) == names
        assert classes == [name.split("/")[-2] for name in found]
        assert splits == [name.split("/")[-3] for name in found]
        order = [names.index(name) for name in found]
        np.testing.assert_allclose(features, expected[order], rtol=1e-5, atol=1e-6)
    assert not list(tmp_path.glob("*.parts"))
    line = one_line(tool("embed", f"data={photos}", "output=f.npz", status=2))
    assert "output=f.npz: is there already; overwrite=true replaces it" in line
    assert "must end in .npz" in one_line(tool("embed", f"data={photos}", "output=f.csv", status=2))
    assert "name pictures" in one_line(tool("embed", "output=g.npz", status=2))


def test_the_layer_is_the_one_that_the_last_evaluation_chose(tool, tmp_path, photos):
    tool("pretrain", *TINY)
    tool("evaluate", "probes=[few_shot_paper]", "features.layer=1", "baselines=false", "duplicates=false")
    earlier = "checkpoint=outputs/masked_patch_synthetic/step_00000004"
    for layer, options in (1, []), (2, [earlier]), (2, ["features.layer=last"]):
        tool("embed", f"data={photos}", "output=features.safetensors", "overwrite=true", *options)
        with safe_open(tmp_path / "features.safetensors", "np") as found:
            assert f" layer{layer}_patch_mean" in found.metadata()["encoder"]


def test_a_data_set_is_written_with_its_splits_and_what_is_left_out_is_counted(tool, tmp_path, photos):
    tool("pretrain", *TINY)
    rows = [f"{place}.png,{split}" for place, split in enumerate(["train", "val", "test", "train"])]
    (tmp_path / "t.csv").write_text("\n".join(["path,split", *rows]) + "\n")
    for file in photos.rglob("[0-3].png"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for output, options, left_out in (("f", (), 0), ("g", ("split=test",), 3), ("h", ("data.test=null",), 1)):
        done = tool("embed", f"data={tmp_path}/t.csv", f"output={output}.npz", *options)
        assert ("left out" in done.stdout) == bool(left_out)
        assert f"left out {left_out} " in done.stdout or not left_out
    names, _, _, splits = read(tmp_path / "f.npz")
    found = dict(zip((name[-5:-4] for name in names), splits, strict=True))
    assert found == {"0": "train", "3": "train", "1": "validation", "2": "test"}
    assert read(tmp_path / "g.npz")[3] == ["test"]


class Number:
    """An extractor whose features are a picture's number and one."""

    identity = "number"

    def __call__(self, images):
        return {"number": torch.stack([images.flatten(), torch.ones(len(images))], 1)}


class Pictures:
    """Opens pictures that are their own number, and fails at a number of calls."""

    def __init__(self, fails_at: int = -1, failure: type[BaseException] = KeyboardInterrupt) -> None:
        self.opened, self.fails_at, self.failure = [], fails_at, failure

    def __call__(self, name):
        if len(self.opened) == self.fails_at:
            raise self.failure
        self.opened.append(name)
        if name == "bad":
            raise Unreadable(name, "no picture")
        return torch.tensor([[float(name)]])


def embed(path, names, pictures, transform=torch.stack):
    describe = gallery.Describer(Number(), transform, batch_size=1, workers=1, load=pictures)
    return embedding.embed({"": dict.fromkeys(names)}, describe, path)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, UserError])  # the latter of an object store without an answer
def test_what_was_read_is_not_read_again(tmp_path, monkeypatch, failure):
    monkeypatch.setattr(gallery, "PART", 3)
    names, path = [str(number) for number in range(10)], tmp_path / "f.npz"
    with pytest.raises(failure):
        embed(path, names, Pictures(fails_at=8, failure=failure))
    assert not path.exists()
    names = ["9", "bad", *names[1:]]  # other pictures of the same encoder
    again = Pictures()
    assert "1 could not be read" in embed(path, names[1:], again)
    assert again.opened == ["bad", "6", "7", "8", "9"]
    found, _, features, _ = read(path)
    assert found == names[2:]
    assert features[:, 0].tolist() == list(range(1, 10))
    assert os.listdir(tmp_path) == ["f.npz"]


def test_parts_of_another_encoder_are_thrown_away(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "PART", 3)
    names, path = [str(number) for number in range(6)], tmp_path / "f.safetensors"
    with pytest.raises(KeyboardInterrupt):
        embed(path, names, Pictures(fails_at=5))
    again = Pictures()
    embed(path, names, again, transform=lambda images: torch.stack(images))
    assert again.opened == read(path)[0] == names


def test_nothing_is_written_if_nothing_can_be_read(tmp_path):
    with pytest.raises(UserError, match="none of the 1 pictures"):
        embed(tmp_path / "g.npz", ["bad"], Pictures())
    assert not os.listdir(tmp_path)


def test_a_second_command_for_the_same_output_names_the_process_that_writes_it(tmp_path):
    path, messages = tmp_path / "f.npz", []

    def pictures(name):
        with pytest.raises(UserError) as refused:
            embed(path, ["1"], Pictures())
        messages.append(str(refused.value))
        return Pictures()(name)

    embed(path, ["1", "2"], pictures)
    assert f"{path}.parts: process {os.getpid()} on {socket.gethostname()} " in messages[0]
    assert read(path)[0] == ["1", "2"]


def test_a_folder_of_the_user_s_is_not_thrown_away(tmp_path):
    kept = tmp_path / "f.npz.parts" / "mine"
    kept.parent.mkdir()
    kept.write_text("precious")
    with pytest.raises(UserError, match=r"f\.npz\.parts: holds something already"):
        embed(tmp_path / "f.npz", ["1"], Pictures())
    assert kept.read_text() == "precious"
