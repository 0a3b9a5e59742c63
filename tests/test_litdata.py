"""data=litdata: chunks that LitData wrote are read in place, in order, and packed; what is not plain is refused."""

import io
import struct
from pathlib import Path

import chunked
import pytest
import torch
from PIL import Image

from ssvit.data import datasets
from ssvit.data.augment.crop import InceptionCrop
from ssvit.data.chunks import Chunks
from ssvit.data.datasets_options import LitData
from ssvit.data.loader import Loader
from ssvit.data.packing import pack
from ssvit.data.packing_options import Pack
from ssvit.options import OptionError, UserError


@pytest.fixture(autouse=True)
def no_index_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def picture(i: int) -> Image.Image:
    return Image.new("RGB", (20, 16 + i), (i, 2 * i, 200))


def png(i: int) -> bytes:
    file = io.BytesIO()
    picture(i).save(file, "PNG")
    return file.getvalue()


def number(i: int) -> bytes:
    return struct.pack("<q", i)


def items(*places: int) -> list[tuple[bytes, bytes]]:
    return [(png(i), number(i % 3)) for i in places]


IN_TUPLE = {"0": "image:png", "1": "int"}


def shown(source) -> list[int]:
    return [int(source.read(i)[0, 0, 0]) for i in range(len(source))]


def test_splits_labels_and_pixels_are_those_that_were_written(tmp_path: Path) -> None:
    chunked.write(tmp_path / "train", items(*range(9)), IN_TUPLE)
    chunked.write(tmp_path / "val", items(10, 11), IN_TUPLE)
    data = datasets.lit_data(root=str(tmp_path))
    assert shown(data.train) == list(range(9))
    assert shown(data.validation) == [10, 11]
    assert data.classes == ("0", "1", "2")
    assert data.train.labels.tolist() == [i % 3 for i in range(9)]
    assert data.validation.labels.tolist() == [1, 2]
    assert data.train.read(4).shape == (3, 20, 20)
    part = data.train.take(torch.tensor([7, 2]))
    assert isinstance(part, Chunks)
    assert (shown(part), part.labels.tolist()) == ([7, 2], [1, 2])
    assert len({data.train.fingerprint, part.fingerprint, data.validation.fingerprint}) == 3
    alone = datasets.lit_data(root=str(tmp_path / "train"), label=None, held_out=0.2)
    assert (len(alone.train), len(alone.watched), alone.train.labels) == (7, 2, None)
    known = LitData(root=str(tmp_path))
    assert (known.labelled, known.validated, known.count(100), known.count(5)) == (True, True, 9, 5)


def test_items_of_names_have_their_label_by_a_usual_name(tmp_path: Path) -> None:
    rows = [(number(i), png(i), b"cat" if i % 2 else b"dog") for i in range(6)]
    chunked.write(tmp_path, rows, {"index": "int", "picture": "file:png", "class": "str"})
    data = datasets.lit_data(root=str(tmp_path), held_out=0.2)
    names = [data.classes[label] for label in data.train.labels]
    assert names == ["cat" if i % 2 else "dog" for i in shown(data.train)]
    numbers = datasets.lit_data(root=str(tmp_path), held_out=0.2, label="index")
    assert [int(numbers.classes[label]) for label in numbers.train.labels] == shown(numbers.train)


def test_pixels_are_read_and_packed_as_png(tmp_path: Path) -> None:
    rows = []
    for i in range(5):
        image = picture(i)
        rows.append((struct.pack("<3I", *image.size, 3) + b"RGB" + image.tobytes(), number(i)))
    chunked.write(tmp_path / "lit", rows, {"0": "pil", "1": "int"})
    data = datasets.lit_data(root=str(tmp_path / "lit"), held_out=0.2)
    output = tmp_path / "shards"
    own = Pack(output=str(output), size=None, quality=90, shard_size=1, workers=1, verify=False, overwrite=False)
    pack(data, output, own, lambda done, total: None)
    packed = datasets.shards(root=str(output))
    assert shown(packed.train) == shown(data.train)
    assert packed.train.labels.equal(data.train.labels)
    for i in range(len(data.train)):
        assert packed.train.read(i).equal(data.train.read(i))


def test_batches_are_the_same_with_workers(tmp_path: Path) -> None:
    chunked.write(tmp_path, items(*range(12)), IN_TUPLE)
    source = datasets.lit_data(root=str(tmp_path), held_out=0.1).train
    crop = InceptionCrop(size=8)
    batches = [
        list(Loader(source=source, transform=crop, seed=0, batch_size=5, workers=workers).batches(0, 3))
        for workers in (0, 1)
    ]
    for one, other in zip(*batches, strict=True):
        assert one.images.equal(other.images)
        assert one.labels.equal(other.labels)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"compression": "zstd"}, "compression=zstd: write it again without, to be read"),
        ({"encryption": {"algorithm": "fernet"}}, "encryption="),
        ({"item_loader": "TokensLoader"}, "item_loader=TokensLoader"),
        ({"data_spec": "[]"}, "is no index of LitData, or a damaged one"),
    ],
)
def test_what_is_not_plain_is_refused(tmp_path: Path, config: dict, words: str) -> None:
    chunked.write(tmp_path, items(0, 1), IN_TUPLE, **config)
    with pytest.raises(UserError, match=words):
        datasets.lit_data(root=str(tmp_path))


def test_wrong_options_and_damaged_chunks_are_told(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"root=.*: has no index\.json, which LitData writes"):
        datasets.lit_data(root=str(tmp_path))
    with pytest.raises(OptionError, match="must be a folder that LitData wrote"):
        datasets.lit_data(root="s3://bucket/set")
    chunked.write(tmp_path, items(0, 1, 2), IN_TUPLE)
    for option, words in (("image", "leaf of images: .* has 0 .image:png., 1 .int."), ("label", "leaf of whole")):
        with pytest.raises(OptionError, match=f"{option}=7: must be a {words}"):
            datasets.lit_data(root=str(tmp_path), **{option: "7"})
    with pytest.raises(OptionError, match=r"validation=.*holdout: has no index"):
        datasets.lit_data(root=str(tmp_path), validation="holdout")
    path = tmp_path / "chunk-0-0.bin"
    whole = path.read_bytes()
    for damaged, words in (
        (whole[:-9], "ends before its last item"),
        (whole[:10], "has 3 items, and the index says 3|is no chunk that can be read"),
        (b"LDFZ01\0\0" + whole, "its items are compressed"),
        (struct.pack("<5I", 3, 24, 24, 24, 24) + b"ARROW1" + bytes(99), "rows of an Arrow table"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=words):
            datasets.lit_data(root=str(tmp_path))
    path.unlink()
    with pytest.raises(UserError, match=r"chunk-0-0\.bin: cannot be read: No such file"):
        datasets.lit_data(root=str(tmp_path))


def test_a_set_that_litdata_wrote_is_read(tmp_path: Path) -> None:
    cache = pytest.importorskip("litdata.streaming.cache")
    for kind in ("jpeg", "pil"):
        folder = tmp_path / kind
        folder.mkdir()
        written = cache.Cache(str(folder), chunk_size=4)
        for i in range(10):
            picture(20 * i).save(tmp_path / f"{i}.jpg", quality=95)
            image = Image.open(tmp_path / f"{i}.jpg") if kind == "jpeg" else picture(20 * i)
            written[i] = {"index": i, "image": image, "class": i % 3}
        written.done()
        written.merge()
        data = datasets.lit_data(root=str(folder), held_out=0.2)
        read = torch.tensor(shown(data.train)) / 20
        assert (read - read.round()).abs().max() < 0.2
        numbers = read.round().long()
        assert numbers.equal(numbers.sort().values)
        assert [int(data.classes[label]) for label in data.train.labels] == (numbers % 3).tolist()
        if kind == "jpeg":
            assert bytes(data.train.file(0)) == (tmp_path / f"{int(numbers[0])}.jpg").read_bytes()
