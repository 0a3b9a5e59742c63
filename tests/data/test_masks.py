"""Masks: their formats and layouts, their views in training batches, and mistakes in one line."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from command import error_of
from PIL import Image

from ssvit.data.augment import geometry
from ssvit.data.augment.options import InceptionCrop, ShiftCrop
from ssvit.data.batch import Batch
from ssvit.data.loader import Loader
from ssvit.data.sources.base import Unreadable, count_pixels
from ssvit.data.sources.datasets_options import Csv, Folder, Voc
from ssvit.data.sources.decode import load_mask
from ssvit.data.sources.decode_options import MaskFormat
from ssvit.data.sources.memory import Memory
from ssvit.errors import UserError

COLORS = {"road": (128, 64, 128), "car": (0, 0, 142), "sky": (70, 130, 180)}
SIDE = 12


def numbers(seed: int = 0, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 3, (height, width)).astype(np.uint8)


def save(path: Path, array: np.ndarray, mode: str | None = None) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(array)
    if mode == "P":
        image.putpalette([part for color in COLORS.values() for part in color])
    image.save(path)
    return str(path)


def picture(seed: int = 0, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def test_values_palettes_and_colours_give_the_same_classes(tmp_path):
    truth = numbers()
    colored = np.array([*COLORS.values()], np.uint8)[truth]
    files = {
        "grey": save(tmp_path / "grey.png", truth),
        "palette": save(tmp_path / "palette.png", truth, "P"),
        "colors": save(tmp_path / "colors.png", colored),
        "far": save(tmp_path / "far.png", np.array([0, 255, 7], np.uint8)[truth]),
        "from_one": save(tmp_path / "from_one.png", truth + 1),
    }
    by_color = MaskFormat(mask_classes={name: list(color) for name, color in COLORS.items()})
    formats = {
        "grey": MaskFormat(mask_classes=list(COLORS)),
        "palette": MaskFormat(mask_classes=3),
        "colors": by_color,
        "far": MaskFormat(mask_classes={"road": 0, "car": 255, "sky": 7}),
        "from_one": MaskFormat(mask_classes=list(COLORS), mask_ignored=[0, 255]),
    }
    for name, path in files.items():
        np.testing.assert_array_equal(load_mask(path, formats[name]).numpy(), truth)
    np.testing.assert_array_equal(load_mask(files["palette"], by_color).numpy(), truth)
    ignored = load_mask(files["grey"], MaskFormat(mask_classes={"road": 0, "sky": 2}, mask_ignored=[1])).numpy()
    np.testing.assert_array_equal(ignored, np.array([0, 255, 1])[truth])
    unnamed = load_mask(files["grey"], MaskFormat(mask_ignored=[0])).numpy()
    np.testing.assert_array_equal(unnamed, np.array([255, 1, 2])[truth])
    of_colors = by_color.changed(mask_classes={"road": COLORS["road"]} | {"car": COLORS["car"]})
    with pytest.raises(Unreadable, match=r"\[70, 130, 180\]"):
        load_mask(files["colors"], of_colors)
    without_sky = of_colors.changed(mask_ignored=[COLORS["sky"]])
    np.testing.assert_array_equal(load_mask(files["colors"], without_sky).numpy(), np.array([0, 1, 255])[truth])
    for name, classes in (("from_one", formats["grey"]), ("colors", formats["grey"])):
        assert files[name] in str(error_of(load_mask, files[name], classes))


@pytest.mark.parametrize(
    "classes", [1, 256, ["a"], ["a", "a"], {"a": 1, "b": 1}, {"a": 1, "b": [0, 0, 0]}, {"a": [0, 0], "b": [1, 1]}]
)
def test_classes_that_are_not_distinct_are_named(classes):
    assert error_of(MaskFormat, mask_classes=classes).name == "mask_classes"


def test_an_ignored_colour_requires_classes_of_colours():
    assert error_of(MaskFormat, mask_ignored=[[0, 0, 0]]).name == "mask_ignored"


def folders(root: Path, *names: str, suffix: str = ".png") -> None:
    for seed, name in enumerate(names):
        save(root / "images" / f"{name}{suffix}", picture(seed))
        save(root / "masks" / f"{name}.png", numbers(seed))


def options(root: Path, **others) -> Folder:
    return Folder(**{"root": f"{root}/images", "masks": f"{root}/masks", "mask_classes": ["a", "b", "c"]} | others)


def test_a_folder_a_table_and_the_layouts_of_voc_and_ade20k(tmp_path):
    folders(tmp_path, "training/a", "training/b", "validation/c")  # as ADE20K
    data = options(tmp_path).build()
    assert data.train.mask_classes == data.validation.mask_classes == ("a", "b", "c")
    assert [data.train.mask(i).numpy().tolist() for i in (0, 1)] == [numbers(i).tolist() for i in (0, 1)]
    assert data.validation.mask(0).numpy().tolist() == numbers(2).tolist()
    truth = np.concatenate([numbers(0), numbers(1)])
    assert count_pixels(data.train)[:3].tolist() == np.bincount(truth.flatten()).tolist()
    taken = data.train.take(torch.tensor([1]))
    assert taken.mask_classes == ("a", "b", "c")
    assert taken.mask(0).numpy().tolist() == numbers(1).tolist()

    names = [(f"images/{name}.png", f"masks/{name}.png") for name in ("training/a", "training/b", "validation/c")]
    with open(tmp_path / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "mask", "split"), *((*both, both[0].split("/")[1]) for both in names)])
    table = Csv(table=str(tmp_path / "table.csv"), mask_classes=3)
    assert table.masked
    assert table.build().train.mask(1).numpy().tolist() == numbers(1).tolist()
    assert not table.changed(mask=None).masked

    voc = tmp_path / "VOC2012"
    for seed, name in enumerate(("x", "y")):
        save(voc / "JPEGImages" / f"{name}.jpg", picture(seed))
        save(
            voc / "SegmentationClass" / f"{name}.png", np.where(numbers(seed) == 2, 255, numbers(seed)).astype(np.uint8)
        )
        (lists := voc / "ImageSets" / "Segmentation").mkdir(parents=True, exist_ok=True)
        (lists / f"{('train', 'val')[seed]}.txt").write_text(f"{name}\n")
    data = Voc(root=str(voc)).build()
    assert len(data.train) == len(data.validation) == 1
    assert len(data.train.mask_classes) == 21
    assert data.validation.mask(0).numpy().tolist() == np.where(numbers(1) == 2, 255, numbers(1)).tolist()
    for content in (b"\n", b"caf\xe9\n", b"y z\n"):
        (lists / "val.txt").write_bytes(content)
        assert "val.txt: " in str(error_of(Voc(root=str(voc)).build))


def test_masks_that_cannot_be_used_are_named(tmp_path):
    folders(tmp_path, "a", "b")
    (tmp_path / "masks" / "b.png").unlink()
    assert "b.png" in str(error_of(options(tmp_path).build))
    save(tmp_path / "masks" / "b.png", numbers(1, SIDE, SIDE + 1))
    train = options(tmp_path, held_out=0.4).build().undivided
    assert f"{SIDE + 1}x{SIDE}" in str(error_of(train.mask, 1))
    save(tmp_path / "masks" / "b.png", numbers(1) + 1)
    assert "the value 3" in str(error_of(train.mask, 1))
    batches = Loader(source=train, transform=InceptionCrop(size=8).build(), seed=0, batch_size=2, masks=True)
    with pytest.raises(UserError, match=r"b\.png") as caught:
        list(batches.batches(0, 4))
    assert "\n" not in str(caught.value)


def plain(mask: torch.Tensor, matrix: torch.Tensor, size: tuple[int, int]) -> list[list[int]]:
    """The mask of a view by loops: the pixel that contains the position of the middle of each of its pixels."""
    (a, b, c), (d, e, f) = matrix.tolist()
    rows = []
    for y in range(size[0]):
        row = []
        for x in range(size[1]):
            column, line = (int(np.floor(p * (x + 0.5) + q * (y + 0.5) + r)) for p, q, r in ((a, b, c), (d, e, f)))
            inside = 0 <= line < mask.shape[0] and 0 <= column < mask.shape[1]
            row.append(int(mask[line, column]) if inside else 255)
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    "crop",
    [
        InceptionCrop(size=(9, 11), vertical_flip=0.5, rotation=40, erasing=1.0),
        InceptionCrop(size=10, quarter_turns=True, randaugment=2),
        ShiftCrop(size=14, padding=3),
    ],
)
def test_masks_move_with_their_images(crop):
    """By loops over pixels; and masks that are painted into the images show the same pixels."""
    masks = torch.from_numpy(np.stack([np.kron(numbers(seed, 3, 4), np.ones((6, 6))) for seed in range(24)]))
    masks, slots, transform = masks.to(torch.uint8), torch.arange(24) + 5, crop.build()
    sides = torch.tensor([[18, 24]]).expand(24, 2)
    maps = transform.geometry(sides, slots, 3)
    views = geometry.warped(masks, maps, transform.size)
    assert views.tolist() == [plain(mask, matrix, transform.size) for mask, matrix in zip(masks, maps, strict=True)]
    images = (masks * 100)[:, None].expand(-1, 3, -1, -1)
    batch = Batch({"image": images}, None, slots, {"masks": masks}).augmented(transform, 3)
    views = views.where(transform.valid_pixels(slots, 3), 255)
    assert batch.targets["masks"].equal(views)
    if crop.erasing or crop.randaugment:  # which change colours
        return
    painted = batch.images[:, 0]
    known = views != 255
    exact = known & (painted % 100 == 0)  # other pixels are mixtures of two classes
    assert exact.double().mean() > 0.4
    assert (painted[exact] // 100).equal(views[exact])


def test_batches_of_files_and_of_memory_have_the_same_masks(tmp_path):
    folders(tmp_path, *"abcdef")
    files = options(tmp_path).build().undivided
    images = torch.stack([files.read(i) for i in range(6)])
    masks = torch.stack([files.mask(i) for i in range(6)])
    memory = Memory(images, masks=masks, mask_classes=("a", "b", "c"))
    crop = InceptionCrop(size=8).build()
    one, other = (
        [batch.targets["masks"] for batch in
         Loader(source=source, transform=crop, seed=1, batch_size=3, masks=True).batches(0, 4)]
        for source in (files, memory)
    )  # fmt: skip
    assert torch.cat(one).equal(torch.cat(other))
    assert len(torch.cat(one).flatten(1).unique(dim=0)) > 6
