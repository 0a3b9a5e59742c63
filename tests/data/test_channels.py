"""Images of any number of channels and any value type: read and measured exactly, trained on, and shown."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tifffile
import tiny
import torch
import yaml
from images import png_of
from PIL import Image

import ssvit
from ssvit.checkpoints import manifest
from ssvit.cli import find_command
from ssvit.data import normalization
from ssvit.data.sources import datasets, datasets_options, decode, folder, rasters
from ssvit.data.sources.base import Source, Unreadable
from ssvit.data.sources.decode import load
from ssvit.data.sources.decode_options import RGB, PixelFormat
from ssvit.errors import Failure, UserError
from ssvit.figures import contact_sheet
from ssvit.figures.display import PLAIN, Display
from ssvit.figures.pictures import Gallery

SIDE = 16
TRAIN = ("encoder.depth=2", "encoder.heads=2", "recipe.warmup=1", "recipe.precision=32-true", "probes=[]")
RUN = (
    *TRAIN, "preset=null", "target=pixels", "data.image_size=16", "encoder.width=16", "recipe.batch_size=8",
    "recipe.steps=6", "recipe.save_every=2", "recipe.evaluate_every=6", "recipe.log_every=1", "launch.accelerator=cpu",
)  # fmt: skip


def values(channels: int, dtype: str, number: int = 0, size: tuple[int, int] = (SIDE, SIDE + 3)) -> np.ndarray:
    """Return noise (c, h, w) over a part of the range of the dtype, a different part for each channel."""
    most = {"uint8": 255, "uint16": 4000, "int16": 3000, "float32": 7, "float64": 7}[dtype]
    noise = np.random.default_rng(number).random((channels, *size)) * np.linspace(0.5, 1, channels)[:, None, None]
    return ((noise - 0.3 * (dtype[0] in "if")) * most).astype(dtype)


def png(array: np.ndarray) -> bytes:
    """A PNG of (h, w, c) uint16, which Pillow cannot write for several channels."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array)
    height, width, channels = array.shape
    return png_of(height, width, rows, 16, {2: 4, 3: 2, 4: 6}[channels])


def write(path: Path, array: np.ndarray, way: str = "") -> str:
    """A file of (c, h, w) in one of the ways that there are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        stored = {"last": np.moveaxis(array, 0, -1), "plane": array[0], "fortran": np.asfortranarray(array)}.get(
            way, array
        )
        np.save(path, stored.astype(stored.dtype.newbyteorder(">")) if way == "big" else stored)
    elif path.suffix == ".tif":
        stored, planar = (np.moveaxis(array, 0, -1), "contig") if way in ("last", "lzw") else (array, "separate")
        options = {"photometric": "minisblack", "metadata": None} | ({"planarconfig": planar} if len(array) > 1 else {})
        if way == "pages":
            del options["planarconfig"]
        compression = {"lzw": "lzw", "deflate": "deflate"}.get(way)
        tifffile.imwrite(path, stored if len(array) > 1 else array[0], compression=compression, **options)
    elif len(array) > 1 and array.dtype == np.uint16:
        path.write_bytes(png(np.moveaxis(array, 0, -1)))
    else:
        Image.fromarray(array[0] if len(array) == 1 else np.moveaxis(array, 0, -1)).save(path)
    return str(path)


def labelled_set(root: Path, channels: int, dtype: str, suffix: str, count: int = 30) -> Path:
    """Images of three classes, which differ in the brightness of the first channel."""
    for number in range(count):
        array = values(channels, dtype, number)
        array[0] = array[0] // (1 + number % 3)
        write(root / "abc"[number % 3] / f"{number:03d}{suffix}", array)
    return root


def training_images(root: Path, **options: object) -> Source:
    return datasets.folder(datasets_options.Folder(root=str(root), **options)).train


def measured(source: Source, pixels: PixelFormat = RGB, workers: int = 1) -> tuple[dict, list[str]]:
    return normalization.measure(source, pixels, workers=workers, progress=lambda done, total: None)


def test_an_image_of_16_bits_among_many_of_8_is_named(tmp_path):
    for number in range(200):
        write(tmp_path / f"{number:03d}.png", values(1, "uint8", number))
    source = training_images(tmp_path)
    write(Path(source.name(3)), values(1, "uint16"))  # not among the images that are sampled for the number of bits
    with pytest.raises(UserError, match=f"{re.escape(source.name(3))}: .*data.range"):
        measured(source)


@pytest.mark.parametrize(
    ("channels", "dtype", "name", "way"),
    [
        (1, "uint16", "a.png", ""), (1, "uint8", "a.png", ""), (4, "uint8", "a.png", ""), (2, "uint8", "a.png", ""),
        (1, "uint16", "a.tif", ""), (1, "float32", "a.tif", ""), (4, "uint16", "a.tif", "last"),
        (4, "uint16", "a.tif", "lzw"), (13, "uint16", "a.tif", "deflate"), (5, "uint16", "a.tif", "pages"),
        (3, "uint8", "a.tif", "pages"), (6, "float32", "a.npy", "last"), (6, "float32", "a.npy", ""),
        (6, "float32", "a.npy", "fortran"), (16, "uint16", "a.npy", "big"), (1, "float64", "a.npy", "plane"),
        (2, "int16", "a.npy", ""), (5, "uint8", "a.npy", "last"), (3, "uint16", "a.png", ""),
        (4, "uint16", "a.png", ""), (2, "uint16", "a.png", ""),
    ],
)  # fmt: skip
def test_a_file_is_read_exactly(tmp_path, channels, dtype, name, way):
    array = values(channels, dtype)
    path = write(tmp_path / name, array, way)
    low = np.linspace(-1, 1, channels)
    high = low + np.linspace(2, 3000 if array.dtype.kind in "ui" else 5, channels)
    read = load(path, PixelFormat(channels=channels, range=[low.tolist(), high.tolist()]))
    start, end = (limits[:, None, None] for limits in (low, high))
    expected = ((array.astype(np.float64) - start) / (end - start)).clip(0, 1)
    assert (read.shape, read.dtype) == (array.shape, torch.float32)
    assert np.abs(read.numpy() - expected).max() < 1e-5
    assert (decode.values(decode.read_file(path), path).astype(np.float64) == array).all()
    whole = PixelFormat(channels=channels)
    if dtype == "uint8":
        if whole != RGB:
            assert load(path, whole).equal(torch.from_numpy(array))
    elif channels != 3:
        with pytest.raises(Unreadable, match=rf"a\.{name[2:]}: .*data\.range"):
            load(path, whole)
    else:  # read as a photograph
        assert (load(path).int() - torch.from_numpy(array // 257).int()).abs().max() <= 1


def test_jpegs_and_palettes_have_the_channels_that_they_show(tmp_path):
    smooth = np.tile(np.arange(0, 240, 10, dtype=np.uint8), (20, 1))
    Image.fromarray(smooth).save(tmp_path / "grey.jpg", quality=100)
    grey = load(str(tmp_path / "grey.jpg"), PixelFormat(channels=1))
    assert grey.shape == (1, 20, 24)
    assert (grey[0].int() - torch.from_numpy(smooth).int()).abs().max() <= 2
    Image.fromarray(smooth).convert("P").save(tmp_path / "palette.png")
    assert decode.values(decode.read_file(str(tmp_path / "palette.png")), "palette").shape == (3, 20, 24)
    Image.fromarray(smooth > 100).save(tmp_path / "bits.png")
    assert set(load(str(tmp_path / "bits.png"), PixelFormat(channels=1)).unique().tolist()) == {0, 255}


def hostile() -> dict[str, tuple[bytes, str]]:
    """Files, and a part of the error."""

    def npy(array: np.ndarray) -> bytes:
        file = io.BytesIO()
        np.save(file, array, allow_pickle=True)
        return file.getvalue()

    good, deep = npy(values(4, "float32")), png(values(3, "uint16").transpose(1, 2, 0))
    tiff = io.BytesIO()
    tifffile.imwrite(tiff, values(4, "uint16"), photometric="minisblack", planarconfig="separate")
    stack, axes = io.BytesIO(), {"axes": "TZYXS"}
    volume = np.zeros((2, 3, 8, 8, 4), np.uint16)
    tifffile.imwrite(stack, volume, photometric="minisblack", planarconfig="contig", metadata=axes)
    return {
        "objects.npy": (npy(np.array([{}, {}, {}, {}])), ""), "words.npy": (npy(np.array([["a"]])), "<U1"),
        "short.npy": (good[:-40], ""),
        "volume.npy": (npy(np.zeros((2, 3, 4, 5), np.float32)), "(2, 3, 4, 5)"),
        "empty.npy": (npy(np.zeros((4, 0, 5), np.float32)), ""),
        "nan.npy": (npy(np.full((4, 5, 5), np.nan, np.float32)), ""),
        "header.npy": (b"\x93NUMPY\x01\x00v\x00{" + b"(" * 117, ""),
        "huge.npy": (good[:10] + good[10:128].replace(b"(4, 16, 19)", b"(9,99999999)"[:11]) + good[128:], ""),
        "version.npy": (b"\x93NUMPY\x09\x00" + good[8:], "9"),
        "few.npy": (npy(values(3, "float32")), "data.channels=4"),
        "few.png": (deep[:-1], "data.channels=4"), "short.png": (deep[:-30], ""),
        "damaged.png": (deep[:60] + bytes(9) + deep[69:], ""),
        "huge.png": (deep[:16] + bytes([0, 1, 0, 0] * 2) + deep[24:], "17179869184"),
        "empty.png": (deep[:16] + bytes(8) + deep[24:], ""), "short.tif": (tiff.getvalue()[:-700], ""),
        "stack.tif": (stack.getvalue(), "TZYXS"), "none.tif": (b"II*\0" + bytes(40), ""),
        "grey.jpg": (b"\xff\xd8\xff" + bytes(30), ""),
    }  # fmt: skip


def test_an_unreadable_file_is_named_in_one_line(tmp_path):
    for name, (data, reason) in hostile().items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(Unreadable) as caught:
            load(str(tmp_path / name), PixelFormat(channels=4, range=[0, 1]))
        assert "\n" not in str(caught.value)
        path, _, line = str(caught.value).partition(": ")
        assert path == str(tmp_path / name)
        assert reason in line, name


@pytest.mark.parametrize(("name", "way"), [("a.npy", ""), ("a.npy", "last"), ("a.tif", ""), ("a.tif", "lzw")])
def test_bytes_of_three_channels_are_photographs_in_any_file_and_others_need_options(tmp_path, name, way):
    colors = values(3, "uint8")
    assert load(write(tmp_path / name, colors, way)).equal(torch.from_numpy(colors))
    for channels, dtype, reason in ((5, "uint8", "5"), (3, "uint16", "uint16"), (4, "float32", "4")):
        with pytest.raises(Unreadable, match=rf": .*\b{reason}\b"):
            load(write(tmp_path / f"{dtype}-{name}", values(channels, dtype), way))


@pytest.mark.parametrize("suffix", [".npy", ".tif", ".png"])
def test_their_sizes_are_known_to_preset_auto(tmp_path, suffix):
    """preset=auto estimates a folder and shards from the headers alone."""
    root = labelled_set(tmp_path / "set", 3, "uint16", suffix, 6)
    find_command("pack").call([f"data={root}", f"output={tmp_path}/packed", "data.held_out=0.01"])
    for options in (datasets_options.Folder(root=str(root)), datasets_options.Shards(root=f"{tmp_path}/packed")):
        sample = options.sample(6)
        assert abs(sample.images - 6) <= 1
        for opened in sample.files:
            with opened() as file:
                assert min(rasters.image_size(file)) == SIDE


def test_a_library_that_is_not_installed_is_named(tmp_path, monkeypatch):
    for name, library in (("a.png", "imagecodecs"), ("a.tif", "tifffile")):
        path = write(tmp_path / name, values(4, "uint16"))
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(Unreadable, match=rf"{library}.*pip install .*{library}"):
            decode.values(decode.read_file(path), path)


def test_arrays_are_images_only_where_there_are_no_others(tmp_path):
    for name in "ab":
        write(tmp_path / "photos" / name / "1.png", values(3, "uint8"))
    before = folder.list_images(str(tmp_path / "photos"))
    np.save(tmp_path / "photos/labels.npy", np.arange(2))
    np.save(tmp_path / "photos/a/features.npy", np.arange(2))
    assert folder.list_images(str(tmp_path / "photos")) == before
    assert [name for _, name in before] == ["a", "b"]
    for part in ("train", "val"):
        write(tmp_path / "arrays" / part / "x" / "1.npy", values(4, "uint8"))
    data = datasets.folder(datasets_options.Folder(root=str(tmp_path / "arrays"), channels=4))
    assert (len(data.train), data.classes, len(data.validation_or_test)) == (1, ("x",), 1)
    assert data.train.read(0).equal(torch.from_numpy(values(4, "uint8")))


def test_normalization_is_exact(tmp_path):
    """Statistics of images of several sizes, with an offset at which large sums lose digits, are exact."""
    arrays = {f"{i:02d}.npy": values(3, "float64", i, (5 + i, 7)) + 1e8 for i in range(20)}
    for name, array in arrays.items():
        write(tmp_path / name, array)
    write(tmp_path / "nan.npy", np.full((3, 4, 4), np.nan))
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    source = training_images(tmp_path, held_out=0.01)
    names = [Path(source.name(i)).name for i in range(len(source))]
    pixels = np.concatenate([arrays[name].reshape(3, -1) for name in names if name in arrays], 1)
    options, lines = measured(source, workers=3)
    low, high = (np.array(end) for end in options["range"])
    assert np.allclose([low, high], [pixels.min(1), pixels.max(1)], rtol=1e-8)
    assert np.allclose(options["mean"], (pixels.mean(1) - low) / (high - low), atol=1e-8)
    assert np.allclose(options["std"], pixels.std(1) / (high - low), rtol=1e-7)
    unreadable = [place for place, name in enumerate(names) if name not in arrays]
    assert lines[1].startswith(f"{len(unreadable)} ")
    assert f"{source.name(unreadable[0])}: " in lines[1]
    limits = PixelFormat(range=[1e8, 1e8 + 2])
    of_range, _ = measured(training_images(tmp_path, held_out=0.01, range=limits.range), limits)
    assert np.allclose(of_range["mean"], (pixels - 1e8).clip(0, 2).mean(1) / 2, atol=1e-6)


def test_nans_never_reach_a_run(tmp_path):
    """The command that measures and the run that trains name the file."""
    for i in range(12):
        array = values(4, "float32", i)
        array[1, 3:5] = np.nan if i % 2 else array[1, 3:5]
        write(tmp_path / f"set/{i:02d}.tif", array)
    line = r"set/\d\d\.tif: "
    source = training_images(tmp_path / "set", channels=4)
    assert re.search(line, "".join(measured(source)[1]))
    only = source.take(torch.tensor([i for i in range(len(source)) if int(Path(source.name(i)).stem) % 2]))
    with pytest.raises(UserError, match=line):
        measured(only)
    statistics = ("data.channels=4", "data.range=[0,7]", "data.mean=0.3", "data.std=0.2")
    with pytest.raises(Failure, match=line):
        find_command("pretrain").call([f"data={tmp_path}/set", *statistics, f"outputs={tmp_path}", "workers=0", *RUN])


def test_photographs_are_measured_as_they_are_read(tmp_path):
    """Grey images become RGB in a data set of colour images; images of one channel stay grey."""
    for i in range(6):
        write(tmp_path / "mixed" / f"{i}.png", values(1 if i % 2 else 3, "uint8", i))
        write(tmp_path / "grey" / f"{i}.png", values(1, "uint8", i))
        write(tmp_path / "other" / f"{i}.npy", values(4 + (i == 5), "uint8", i))
    for name, channels in (("mixed", None), ("grey", 1)):
        source = training_images(tmp_path / name, held_out=0.1)
        options, _ = measured(source, workers=2)
        assert (options.get("channels"), "range" in options) == (channels, False)
        pixels = torch.cat([load(source.name(i)).double().flatten(1) for i in range(len(source))], 1) / 255
        count = len(options["mean"])
        assert np.allclose(options["mean"], pixels.mean(1)[:count], atol=1e-8)
        assert np.allclose(options["std"], pixels.std(1, correction=0)[:count], atol=1e-8)
    with pytest.raises(UserError, match=r"5\.npy: .*\b5\b"):
        measured(training_images(tmp_path / "other", held_out=0.01, seed=3))


def test_a_constant_channel_is_reported(tmp_path):
    array = values(3, "uint16")
    array[1] = 7
    for i in range(3):
        write(tmp_path / f"{i}.tif", array)
    options, lines = measured(training_images(tmp_path))
    assert lines[-1].endswith(" 2")
    PixelFormat(channels=3, range=options["range"])
    assert (options["std"][1], options["mean"][1]) == (1, 0)


def test_pictures_show_three_of_many_channels():
    images = torch.rand(2, 6, 4, 5)
    mean, std = [0.1 * i for i in range(1, 7)], [0.05] * 6
    display = Display.of_pixels(PixelFormat(channels=6, range=[0, 1]), mean=mean, std=std, shown=[3, 2, 5])
    shown = display(images)
    for place, band in enumerate((3, 2, 5)):
        expected = ((images[:, band] - (mean[band] - 0.1)) / 0.2).clamp(0, 1)
        assert torch.allclose(shown[:, place], expected, atol=1e-5)
    assert torch.equal(display.rgb(images), images[:, [3, 2, 5]])
    colors = torch.rand(2, 3, 4, 5)
    assert torch.equal(display(colors), colors)
    bytes_alone = Display.of_pixels(PixelFormat(channels=1, range=None), mean=0.5, std=0.1, shown=())
    grey = torch.randint(256, (1, 4, 5), dtype=torch.uint8)
    assert torch.allclose(bytes_alone(grey), (grey / 255).expand(3, 4, 5))
    one = Display.of_pixels(PixelFormat(channels=1, range=[0, 9]), mean=0.5, std=0.1, shown=())
    assert torch.allclose(one(torch.full((1, 2, 2), 0.6)), torch.tensor(0.75))
    other = Display.of_pixels(PixelFormat(channels=6, range=[0, 1]), mean=mean, std=std, shown=[0, 1, 4])
    assert torch.equal(other(images)[:, 0], ((images[:, 0] / 0.2).clamp(0, 1)))
    assert torch.allclose(PLAIN(images), images.mean(1, keepdim=True).expand(-1, 3, -1, -1))


@pytest.fixture(scope="module")
def bands(tmp_path_factory) -> Path:
    """A folder with TIFF files of 5 channels, their statistics, and a finished run."""
    folder = tmp_path_factory.mktemp("bands")
    root = labelled_set(folder / "set", 5, "uint16", ".tif")
    find_command("normalization").call([f"data={root}", f"output={folder}/bands.yaml"])
    find_command("pretrain").call(options(folder))
    return folder


def options(folder: Path) -> list[str]:
    """Options of the run."""
    data = (f"data={folder}/set", f"data.normalization={folder}/bands.yaml", "data.shown=[3,2,1]")
    return [*data, f"outputs={folder}/outputs", "name=bands", "workers=1", *RUN]


def newest(folder: Path) -> Path:
    return manifest.complete(folder / "outputs/bands")[-1]


def test_a_run_has_the_measured_statistics_and_resumes_bit_for_bit(bands, capsys):
    statistics = yaml.safe_load((bands / "bands.yaml").read_text())
    assert list(statistics) == ["channels", "range", "mean", "std"]
    last, facts = newest(bands), manifest.read_manifest(newest(bands))
    assert (facts["encoder"]["channels"], facts["encoder"]["mean"]) == (5, statistics["mean"])
    assert facts["range"] == statistics["range"]
    weights = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    shutil.rmtree(last)
    find_command("pretrain").call(options(bands))
    assert weights == {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    assert weights
    mosaic = np.asarray(Image.open(bands / "outputs/bands/mosaic.png").convert("RGB")).astype(int)
    assert (np.ptp(mosaic, axis=-1) > 20).mean() > 0.1  # coloured by `data.shown`, and not the mean of all channels
    with pytest.raises(Failure, match=r"data\.range"):
        find_command("pretrain").call([*options(bands), "data.range=[0,4000]"])
    capsys.readouterr()
    find_command("normalization").call([f"data={bands}/set"])
    assert f"data.std={json.dumps(statistics['std'], separators=(',', ':'))}" in capsys.readouterr().out


def test_files_and_arrays_have_the_same_features(bands, tmp_path):
    """Run, exported weights and `embed` have the same features; a picture with other channels is an error."""
    files = sorted((bands / "set/a").glob("*.tif"))[:3]
    arrays = [np.moveaxis(tifffile.imread(file), 0, -1) for file in files]
    encoder = ssvit.load(newest(bands), precision=32)
    features = encoder.features(files)
    pixels = encoder.prepare(files[0])
    assert (pixels.dtype, pixels.shape, pixels.amax() <= 1) == (torch.float32, (1, 5, 16, 16), True)
    assert encoder.features(arrays).equal(features)
    assert encoder.features([torch.from_numpy(array.astype(np.int32)).movedim(-1, 0) for array in arrays]).equal(
        features
    )
    find_command("export").call([f"checkpoint={newest(bands)}", "format=safetensors", f"output={tmp_path}/exported"])
    assert "to [0, 1]" in (tmp_path / "exported/README.md").read_text()
    weights = tiny.loaded(tmp_path / "exported/model.safetensors").eval()
    with torch.no_grad():
        assert torch.allclose(weights.represent(encoder.prepare(files)), features, atol=1e-6)
    options = [f"checkpoint={newest(bands)}", f"data={bands}/set/a", "precision=32"]
    find_command("embed").call([*options, f"output={tmp_path}/f.npz"])
    written = np.load(tmp_path / "f.npz")
    rows = [list(written["names"]).index(str(file)) for file in files]
    assert np.allclose(written["features"][rows], features.numpy(), atol=1e-5)
    other = write(tmp_path / "other.tif", values(4, "uint16"))
    for picture in (other, values(4, "uint16").transpose(1, 2, 0)):
        with pytest.raises(UserError, match=r"\b4\b.*data\.channels=5"):
            encoder.features(picture)


def test_a_run_is_fine_tuned_and_evaluated(bands):
    """Commands take images and pixel format from the pre-training run."""
    small = [f"recipe.{name}" for name in ("steps=4", "batch_size=8", "warmup=1", "evaluate_every=4", "save_every=4")]
    start = (f"checkpoint={newest(bands)}", f"outputs={bands}/outputs")
    run = find_command("finetune").call([*start, "name=tuned", "figures=none", "check_frozen=false", *small])
    assert manifest.read_manifest(manifest.complete(run)[-1])["range"] == manifest.read_manifest(newest(bands))["range"]
    file = next((bands / "set/b").glob("*.tif"))
    (from_file,), (from_array,) = (
        ssvit.load_classifier(run).predict(picture) for picture in (file, np.moveaxis(tifffile.imread(file), 0, -1))
    )
    assert from_file == from_array
    assert set(from_file.probabilities) == set("abc")
    measured = (f"checkpoint={newest(bands)}", f"outputs={bands}/outputs", "probes=[knn]", "launch.accelerator=cpu")
    find_command("evaluate").call([*measured, "figures=none"])
    assert (bands / "outputs/bands/evaluation/report.json").is_file()


@pytest.mark.parametrize(("options", "shown"), [([], [0, 1, 2]), (["data.shown=[4,0,0]"], [4, 0, 0])])
def test_sheets_of_similar_pictures_show_the_first_channels(bands, tmp_path, monkeypatch, options, shown):
    """The contact sheet shows the channels of the run, or of the data set that the query names."""
    facts = manifest.read_manifest(newest(bands))["encoder"]
    seen = []
    monkeypatch.setattr(contact_sheet, "contact_sheet", lambda rows, kind: seen.append(rows[0][0].image) or Gallery([]))
    file = str(next((bands / "set/a").glob("*.tif")))
    of_set = [f"data={bands}/set", f"data.normalization={bands}/bands.yaml", *options] if options else []
    common = [f"checkpoint={newest(bands)}", f"store={tmp_path}/store", "workers=1", *of_set]
    find_command("retrieve").call(["action=index", *common, str(bands / "set")])
    find_command("retrieve").call(["action=query", *common, f"sheet={tmp_path}/sheet.png", "k=2", file])
    pixels = load(file, PixelFormat(channels=5, range=manifest.read_manifest(newest(bands))["range"]))
    for place, band in enumerate(shown):
        mean, std = facts["mean"][band], facts["std"][band]
        expected = ((pixels[band] - mean) / (4 * std) + 0.5).clamp(0, 1)
        assert torch.allclose(seen[0][place], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        ("mae", ["objective.decoder.width=16", "objective.decoder.depth=1"]),
        ("simmim", []),
        ("dino", ["objective.prototypes=16", "augment@data.augment=multi_crop_small"]),
    ],
)
def test_every_kind_of_method_takes_many_channels(bands, tmp_path, objective, options):
    """Objectives train on images of five channels, without augmentations that are defined for photographs only."""
    if objective == "dino":
        options = [*options, *(f"data.augment.{name}" for name in ("jitter=0", "grayscale=0", "blur=[0.5,0.5,0.5]"))]
    data = [f"data={bands}/set", f"data.normalization={bands}/bands.yaml", "workers=0", f"outputs={tmp_path}"]
    small = [
        "encoder.width=48", "recipe.steps=2", "recipe.batch_size=4", "recipe.evaluate_every=1", "recipe.save_every=2",
    ]  # fmt: skip
    run = find_command("pretrain").call([*data, f"objective={objective}", *TRAIN, *small, *options])
    weights = tiny.loaded(manifest.complete(run)[-1]).state_dict()
    assert weights["patch.weight"].shape[1] % 5 == 0
    assert all(weight.isfinite().all() for weight in weights.values())
    assert Image.open(next(run.glob("*.png"))).size[0] > 100
