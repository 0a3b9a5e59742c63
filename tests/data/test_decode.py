"""Every format decodes to its pixels, and a damaged file raises Unreadable."""

import io
import os
import pickle
import resource
import struct
import subprocess
import sys
import zlib
from functools import partial
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile
import torch
from command import LIMIT
from images import png_of
from PIL import Image, ImageOps, features

from ssvit.data.sources import decode
from ssvit.data.sources.base import Unreadable
from ssvit.data.sources.decode import load, load_mask, read_file, upright_size, values
from ssvit.data.sources.decode_options import PixelFormat
from ssvit.data.sources.files import Files
from ssvit.errors import OptionError, UserError

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (24, 40), dtype=np.uint8)
RGB = RNG.integers(0, 256, (24, 40, 3), dtype=np.uint8)
ALPHA = RNG.integers(0, 256, (24, 40, 1), dtype=np.uint8)


def smooth(channels: int) -> np.ndarray:
    """An image that JPEG keeps well: (24, 40, channels)."""
    y, x = np.mgrid[0:24, 0:40]
    return np.stack([(40 * c + 3 * x + 2 * y) % 200 for c in range(channels)], axis=2).astype(np.uint8)


WIDE = RNG.integers(0, 65536, (24, 40), dtype=np.uint16)
COLOURS = RNG.integers(1, 256, (256, 3), dtype=np.uint8)
PALETTE = Image.frombytes("P", (40, 24), GREY.tobytes())
PALETTE.putpalette(COLOURS.tobytes())
OVER_BLACK = ALPHA / 255.0
KINDS = ("png", "tiff")


def loaded(image: Image.Image, path: Path, **options: object) -> np.ndarray:
    image.save(path, **options)
    pixels = load(str(path))
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (3, image.height, image.width)
    return pixels.permute(1, 2, 0).numpy()


def threefold(grey: np.ndarray) -> np.ndarray:
    return np.repeat(grey[:, :, None], 3, axis=2)


@pytest.mark.parametrize(
    ("name", "image", "options", "expected", "levels"),
    [
        *((f"a.{suffix}", Image.fromarray(RGB), {}, RGB, 0) for suffix in ("png", "bmp", "tiff", "ppm")),
        ("a.webp", Image.fromarray(RGB), {"lossless": True}, RGB, 0),
        ("a.png", Image.fromarray(GREY), {}, threefold(GREY), 0),
        ("a.png", Image.fromarray(GREY > 127), {}, threefold((GREY > 127) * np.uint8(255)), 0),
        ("a.png", PALETTE, {}, COLOURS[GREY], 0),
        ("a.png", PALETTE, {"transparency": 7}, np.where((GREY == 7)[:, :, None], 0, COLOURS[GREY]), 0),  # is black
        ("a.png", Image.fromarray(np.concatenate((RGB, ALPHA), 2), "RGBA"), {}, RGB * OVER_BLACK, 1),
        ("a.png", Image.fromarray(np.dstack((GREY, ALPHA)), "LA"), {}, threefold(GREY) * OVER_BLACK, 1),
        *((f"a.{suffix}", Image.fromarray(WIDE), {}, threefold(np.rint(WIDE / 257.0)), 0) for suffix in KINDS),
    ],
)  # fmt: skip
def test_lossless_files_have_the_pixels_that_were_saved(tmp_path, name, image, options, expected, levels):
    assert np.abs(loaded(image, tmp_path / name, **options) - np.asarray(expected, float)).max() <= levels
    (tmp_path / name).rename(tmp_path / "b.jpg")  # the suffix does not decide
    assert (load(str(tmp_path / "b.jpg")) - torch.tensor(expected).movedim(2, 0)).abs().max() <= levels


@pytest.mark.parametrize(
    ("background", "colour"),
    [(None, 0), ("white", 255), ("#0F8", (0, 255, 136)), ([0.2, 0, 1], (51, 0, 255)), (0.6, 153)],
)
def test_transparent_pixels_are_composited_onto_the_background(tmp_path, background, colour):
    rgba, share = np.concatenate((RGB, ALPHA), 2), ALPHA / 255
    expected = RGB * share + np.array(colour) * (1 - share)
    opacity = np.where(GREY == 7, 0, 255)
    of_palette = np.where((GREY == 7)[:, :, None], np.array(colour), COLOURS[GREY])
    for suffix, options in (("png", {}), ("tiff", {}), ("webp", {"lossless": True, "exact": True})):
        Image.fromarray(rgba).save(tmp_path / f"colours.{suffix}", **options)
    PALETTE.save(tmp_path / "palette.png", transparency=7)
    for path in sorted(tmp_path.iterdir()):
        reference, alpha = (of_palette, opacity) if path.stem == "palette" else (expected, ALPHA[:, :, 0])
        image = load(str(path), PixelFormat(background=background)).movedim(0, 2).numpy()
        assert np.abs(image - reference).max() <= 1, path.name
        found = decode.extrema(decode.read_file(str(path)), "", PixelFormat(background=background).background)
        both = np.dstack([image, alpha]).reshape(-1, 4)
        np.testing.assert_array_equal(found, np.stack([both.min(0), both.max(0)], axis=1))
        luminance = load(str(path), PixelFormat(channels=1, background=background))[0].numpy()
        assert np.abs(luminance - reference @ [0.299, 0.587, 0.114]).max() <= 2, path.name


def test_tiffs_of_a_palette_and_with_white_as_zero_have_the_values_of_pillow(tmp_path):
    numbers = np.arange(12, dtype=np.uint8).reshape(3, 4)
    indexed = Image.fromarray(numbers, "P")
    indexed.putpalette([value for entry in range(256) for value in (entry, 255 - entry, entry // 2)])
    indexed.save(tmp_path / "palette.tif")
    tifffile.imwrite(tmp_path / "inverted.tif", 20 * numbers, photometric="miniswhite", metadata=None)
    for name, mode in (("palette", "RGB"), ("inverted", "L")):
        data = read_file(str(tmp_path / f"{name}.tif"))
        expected = np.array(Image.open(tmp_path / f"{name}.tif").convert(mode))
        np.testing.assert_array_equal(values(data, name), np.moveaxis(np.atleast_3d(expected), 2, 0))


def test_the_size_in_the_header_of_a_jpeg_is_that_of_its_pixels(tmp_path):
    xmp = (
        b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
    )
    Image.new("RGB", (40, 10)).save(tmp_path / "a.jpg", xmp=xmp)
    assert upright_size(str(tmp_path / "a.jpg")) == tuple(load(str(tmp_path / "a.jpg")).shape[1:])


def test_a_fourth_band_of_a_tiff_is_alpha_only_if_it_is_declared(tmp_path):
    path = tmp_path / "a.tiff"
    Image.fromarray(np.concatenate((RGB, ALPHA), 2)).save(path)
    declared = path.read_bytes()
    at = declared.rindex(struct.pack("<HHI", 338, 3, 1))  # the tag ExtraSamples becomes a private tag
    path.write_bytes(declared[:at] + struct.pack("<H", 65000) + declared[at + 2 :])
    for options in ({}, {"background": "white"}):
        np.testing.assert_array_equal(load(str(path), PixelFormat(**options)).movedim(0, 2), RGB)
    np.testing.assert_array_equal(load(str(path), PixelFormat(channels=4))[3], ALPHA[:, :, 0])


@pytest.mark.parametrize("value", ["whte", "#12", [255, 255, 255], [0.5, 0.5], [], True, {"r": 1}, -0.1])
def test_a_background_that_is_no_colour_is_an_error(value):
    with pytest.raises(OptionError) as caught:
        PixelFormat(background=value)
    assert caught.value.name == "background"


@pytest.mark.parametrize("options", [{"channels": 4}, {"range": [0, 255]}])
def test_only_photographs_have_a_background(options):
    assert PixelFormat(background="black", **options) == PixelFormat(**options)  # the default
    with pytest.raises(OptionError, match="background"):
        PixelFormat(background="white", **options)


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg(tmp_path, mode, channels, progressive):
    pixels = smooth(channels)
    got = loaded(Image.fromarray(pixels.squeeze(), mode), tmp_path / "a.jpg", quality=95, progressive=progressive)
    assert np.abs(got.astype(int) - np.broadcast_to(pixels, got.shape)).mean() < 4
    with Image.open(tmp_path / "a.jpg") as image:
        assert np.abs(got.astype(int) - np.asarray(image.convert("RGB"))).max() <= 2


def test_cmyk_jpeg(tmp_path):
    inks = smooth(4)
    got = loaded(Image.fromarray(inks, "CMYK"), tmp_path / "a.jpg", quality=98)
    assert np.abs(got - (255.0 - inks[:, :, :3]) * (255.0 - inks[:, :, 3:]) / 255.0).mean() < 4


def encoded(kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(smooth(3)).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "WEBP"])
def test_truncated_files_are_unreadable(tmp_path, kind):
    data, path = encoded(kind), tmp_path / "a.img"
    for length in (0, 3, 20, len(data) // 2):
        path.write_bytes(data[:length])
        with pytest.raises(Unreadable) as caught:
            load(str(path))
        assert caught.value.path == str(path)
        assert caught.value.reason
        assert "\n" not in str(caught.value)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def jpeg_of_size(height: int, width: int) -> bytes:
    data = encoded("JPEG")
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


@pytest.mark.parametrize("make", [partial(png_of, rows=b""), jpeg_of_size])
def test_a_bomb_is_refused_by_its_header(tmp_path, make, monkeypatch):
    (tmp_path / "bomb").write_bytes(make(60000, 50000))

    def decoded(*args: object, **options: object) -> None:
        raise AssertionError("the pixels of a bomb were decoded")

    monkeypatch.setattr(torch.ops.image, "decode_jpeg", decoded)
    monkeypatch.setattr(Image.Image, "load", decoded)
    with pytest.raises(Unreadable, match=r"3000000000|50000x60000"):
        load(str(tmp_path / "bomb"))


def test_files_that_are_no_images_are_unreadable(tmp_path):
    (tmp_path / "text.jpg").write_text("not an image")
    os.mkfifo(tmp_path / "pipe")  # nobody writes into it
    for name, target in (("null", "/dev/null"), ("dangling", "nowhere"), ("loop", "loop")):
        (tmp_path / name).symlink_to(target)
    for path in ("text.jpg", "absent.jpg", ".", "pipe", "null", "dangling", "loop", "x" * 5000, "a\0b"):
        with pytest.raises(Unreadable) as caught:
            load(str(tmp_path / path))
        assert caught.value.path == str(tmp_path / path)
        assert caught.value.reason


def test_a_name_is_printed_without_what_a_terminal_obeys(tmp_path):
    path = tmp_path / "\x1b[2Jred\n.png"
    path.write_text("")
    with pytest.raises(Unreadable) as caught:
        load(str(path))
    assert caught.value.path == str(path)
    assert str(caught.value).startswith(rf"{tmp_path}/\x1b[2Jred\n.png: ")
    assert str(caught.value).isprintable()


def test_too_many_open_files_is_not_an_unreadable_image(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded("PNG"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(UserError, match=r"a\.png: ") as caught:
            load(str(tmp_path / "a.png"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not isinstance(caught.value, Unreadable)


MUTANTS = """
import random, sys
import torch
from ssvit.data.sources.decode import load
from ssvit.data.sources.base import Unreadable

torch.set_num_threads(1)
target, sources = sys.argv[1], [open(path, "rb").read() for path in sys.argv[2:]]
rng, counts = random.Random(1), [0, 0]
for i in range(1000):
    mutant = bytearray(sources[i % 2])
    for _ in range(rng.choice((1, 2, 8))):
        bit = rng.randrange(16, 8 * len(mutant))
        mutant[bit // 8] ^= 1 << bit % 8
    open(target, "wb").write(mutant)
    try:
        image = load(target)
        assert image.dtype == torch.uint8 and image.ndim == 3 and image.shape[0] == 3
        counts[0] += 1
    except Unreadable:
        counts[1] += 1
print(*counts)
"""


def test_a_thousand_mutants_do_not_crash_the_process(tmp_path):
    for kind in ("JPEG", "PNG"):
        (tmp_path / kind).write_bytes(encoded(kind))
    command = [sys.executable, "-c", MUTANTS, *(str(tmp_path / name) for name in ("mutant", "JPEG", "PNG"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    fine, unreadable = map(int, done.stdout.split())
    assert fine + unreadable == 1000
    assert unreadable > 100


def test_masks_are_the_numbers_in_the_file(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 256, (5, 7), dtype=np.uint8)
    numbers[0, 0] = 255
    palette = Image.fromarray(numbers, "P")
    palette.putpalette(list(range(255, -1, -1)) * 3)
    palette.save(tmp_path / "palette.png")
    Image.fromarray(numbers).save(tmp_path / "grey.png")
    for name in ("palette", "grey"):
        np.testing.assert_array_equal(load_mask(str(tmp_path / f"{name}.png")).numpy(), numbers)
    few = Image.fromarray(numbers % 4, "P")
    few.putpalette([0, 0, 0, 9, 9, 9, 8, 8, 8, 7, 7, 7])
    few.save(tmp_path / "few.png", bits=2)
    np.testing.assert_array_equal(load_mask(str(tmp_path / "few.png")).numpy(), numbers % 4)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_images_and_masks_are_oriented_by_their_exif(tmp_path, orientation, mode):
    source = Image.fromarray(smooth(3)).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = PixelFormat() if mode == "RGB" else PixelFormat(channels=1)
    for suffix in ("jpg", "png", "webp", "tiff", *(["avif"] if features.check("avif") else [])):
        path = tmp_path / f"a.{suffix}"
        source.save(path, exif=exif, **({"lossless": True} if suffix == "webp" else {}))
        with Image.open(io.BytesIO(path.read_bytes())) as image:  # by its path, Pillow maps a grey TIFF unrotated
            expected = np.atleast_3d(np.asarray(ImageOps.exif_transpose(image).convert(mode), int))
        data = np.fromfile(path, np.uint8)
        assert np.abs(load(str(path), pixels).movedim(0, 2).numpy() - expected).max() <= 2
        stored = np.moveaxis(decode.values(data, str(path)), 0, 2)
        assert np.abs(stored[:, :, : expected.shape[2]] - expected).max() <= 2
        if (mode, suffix) == ("L", "png"):
            np.testing.assert_array_equal(load_mask(str(path)).numpy(), expected[:, :, 0])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_16_bit_files_of_several_channels_are_oriented(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    flat = Image.fromarray(GREY)
    flat.save(tmp_path / "reference.png", exif=exif)
    with Image.open(tmp_path / "reference.png") as image:
        grey = np.asarray(ImageOps.exif_transpose(image), np.uint16)
    wide = np.stack([GREY.astype(np.uint16) * factor for factor in (1, 2, 3)], axis=2)
    expected = np.stack([grey * np.uint16(factor) for factor in (1, 2, 3)])
    tags = [(274, "H", 1, orientation, True)]
    tifffile.imwrite(tmp_path / "a.tiff", wide, photometric="rgb", extratags=tags)
    png, block = imagecodecs.png_encode(wide), exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(block)) + b"eXIf" + block + struct.pack(">I", zlib.crc32(b"eXIf" + block))
    (tmp_path / "a.png").write_bytes(png[:33] + chunk + png[33:])
    for name in ("a.tiff", "a.png"):
        data = np.fromfile(tmp_path / name, np.uint8)
        np.testing.assert_array_equal(decode.values(data, name), expected)
        image = load(str(tmp_path / name), PixelFormat(channels=3, range=(0, 1000)))
        np.testing.assert_allclose(image.numpy(), expected / 1000, atol=1e-6)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tiff", "npy"])
def test_a_mask_of_another_size_or_of_the_unrotated_image_is_an_error(tmp_path, suffix, monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = 6
    if suffix == "npy":  # no orientation: the array is upright
        np.save(tmp_path / "a.npy", smooth(3).swapaxes(0, 1))
    else:
        Image.fromarray(smooth(3)).save(tmp_path / f"a.{suffix}", exif=exif)
    for name, shape in (("upright", (40, 24)), ("stored", (24, 40)), ("other", (5, 7))):
        Image.fromarray(np.ones(shape, np.uint8)).save(tmp_path / f"{name}.png")
    masks = [str(tmp_path / f"{name}.png") for name in ("upright", "other", "stored")]
    files = Files([str(tmp_path / f"a.{suffix}")] * 3, masks=masks)
    monkeypatch.setattr(torch.ops.image, "decode_jpeg", None)  # the header suffices
    assert files.mask(0).shape == (40, 24)
    for index in (1, 2):
        with pytest.raises(Unreadable) as caught:
            files.mask(index)
        assert caught.value.path == masks[index]


def test_headers_state_whether_values_have_8_bits(tmp_path):
    for name, image in {"a.jpg": RGB, "b.png": RGB, "c.tiff": RGB, "d.png": GREY > 127, "e.webp": RGB}.items():
        Image.fromarray(image).save(tmp_path / name)
    PALETTE.save(tmp_path / "f.png")
    Image.fromarray(WIDE).save(tmp_path / "g.png")
    (tmp_path / "h.png").write_bytes(imagecodecs.png_encode(np.stack([WIDE] * 3, axis=2)))
    tifffile.imwrite(tmp_path / "i.tiff", np.stack([WIDE] * 3, axis=2), photometric="rgb")
    tifffile.imwrite(tmp_path / "j.tiff", np.stack([WIDE] * 3, axis=2), photometric="rgb", compression="zlib")
    tifffile.imwrite(tmp_path / "k.tiff", GREY.astype(np.float32))
    np.save(tmp_path / "l.npy", WIDE)
    for path in sorted(tmp_path.iterdir()):
        data = decode.read_file(str(path))
        image = decode.header(io.BytesIO(data))
        if image is not None:
            assert decode.is_8_bit(image) == (decode.values(data, "").dtype == np.uint8), path.name
        else:
            assert path.suffix == ".npy"


def test_files_that_are_no_masks_are_named(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "colours.png")
    Image.new("I;16", (4, 4)).save(tmp_path / "wide.png")
    Image.new("L", (4, 4)).save(tmp_path / "grey.jpg")
    Image.new("1", (4, 4)).save(tmp_path / "bits.png")
    (tmp_path / "empty.png").touch()
    for name in ("colours.png", "wide.png", "grey.jpg", "bits.png", "empty.png"):
        with pytest.raises(Unreadable, match=f"{name}: "):
            load_mask(str(tmp_path / name))
    with pytest.raises(Unreadable, match=r"none\.png: "):
        load_mask(str(tmp_path / "none.png"))
