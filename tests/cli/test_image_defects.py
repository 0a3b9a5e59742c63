"""ssvit try stages=images finds injected defects; kept.csv has the other images with their classes and splits."""

import csv
import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from command import error_of
from images import put
from PIL import Image, ImageFilter

import ssvit
from ssvit.cli import find_command
from ssvit.data.sources import datasets
from ssvit.data.sources.datasets_options import Csv, Folder


def scene(number, side=48):
    """Rectangles of random colours with noise: edges and details, as a photograph has."""
    random = np.random.default_rng(number)
    pixels = np.tile(random.integers(60, 200, 3), (side, side, 1)).astype(float)
    for top, left in random.integers(0, side - 8, (8, 2)):
        pixels[top : top + random.integers(4, 24), left : left + random.integers(4, 24)] = random.integers(0, 255, 3)
    return Image.fromarray((pixels + random.normal(0, 8, pixels.shape)).clip(0, 255).astype(np.uint8))


def saved(image, path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


@pytest.fixture
def check(tmp_path):
    """A function that checks a folder, and returns the result and the reasons and the originals by path."""

    def run(folder, **options):
        result = ssvit.try_images(folder, stages="images", outputs=tmp_path / "outputs", verbose=False, **options)
        rows = list(csv.DictReader(io.StringIO((result.folder / "found.csv").read_text())))
        return result, {row["path"]: row["reason"] for row in rows}, {row["path"]: row["copy_of"] for row in rows}

    return run


def images_of(data):
    """The class, split and place of each image by its path."""
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    return {
        source.name(row): (split, source.classes[source.labels[row]] if source.labels is not None else None)
        for split, source in parts.items()
        if source is not None
        for row in range(len(source))
    }


def faulty(root):
    """A folder with three splits and two classes, and the reason of each injected defect by path."""
    for split, count in (("train", 40), ("val", 6), ("test", 6)):
        for number in range(2 * count):
            saved(scene(len(split) * 1000 + number), root / split / ("a", "b")[number % 2] / f"{number}.png")
    train, noise = root / "train" / "a", scene(7)
    truncated = saved(scene(1), root / "train" / "b" / "truncated.png")
    truncated.write_bytes(truncated.read_bytes()[:400])
    reasons = {
        truncated: "unreadable",
        put(train / "text.jpg", b"no image"): "unreadable",
        saved(scene(2).resize((3, 3)), root / "test" / "a" / "small.png"): "tiny",
        saved(Image.new("RGB", (48, 48), "red"), train / "red.png"): "blank",
        saved(Image.new("RGB", (48, 48)), train / "black.png"): "blank",
    }
    for number, radius in enumerate((1.5, 2, 3)):
        blurred = scene(50 + number).filter(ImageFilter.GaussianBlur(radius))
        reasons[saved(blurred, train / f"blurred_{number}.png")] = "blurred"
    copies = {train / "0_copy.png": train / "0.png", train / "of_test.png": root / "test" / "b" / "1.png"}
    for copy, original in copies.items():
        shutil.copy(original, copy)
        reasons[copy] = "duplicate"
    crop = Image.open(root / "val" / "a" / "2.png").crop((1, 1, 47, 48)).resize((48, 48))
    reasons[saved(crop, train / "cropped.jpg", quality=85)] = "near-duplicate"
    copies[train / "cropped.jpg"] = root / "val" / "a" / "2.png"
    saved(noise, root / "train" / "rare" / "only.png")
    return {str(path): reason for path, reason in reasons.items()}, {str(copy): str(of) for copy, of in copies.items()}


def test_injected_defects_are_found_and_left_out(check, tmp_path):
    root = tmp_path / "photos"
    reasons, copies = faulty(root)
    before = sorted(root.rglob("*.*"))
    result, found, originals = check(root)
    assert found == reasons
    assert {path: original for path, original in originals.items() if original} == copies
    assert sorted(root.rglob("*.*")) == before
    page = result.page.read_text()
    assert all(path in page for path in reasons)
    assert "rare (1)" in page
    assert {"tiny", "blank", "blurred", "duplicate", "near-duplicate"} <= result.figures.keys()
    kept = images_of(datasets.csv(Csv(table=str(result.folder / "kept.csv"))))
    everything = images_of(datasets.folder(Folder(root=str(root))))
    assert kept == {path: image for path, image in everything.items() if path not in reasons}


def test_if_all_training_images_are_test_images_there_is_no_table(check, tmp_path):
    for number in range(8):
        saved(scene(number), tmp_path / "photos" / "train" / "ab"[number % 2] / f"{number}.png")
    shutil.copytree(tmp_path / "photos" / "train", tmp_path / "photos" / "test")
    result, found, _ = check(tmp_path / "photos")
    assert len(found) == 8
    assert not (result.folder / "kept.csv").exists()


def test_names_that_a_table_cannot_have_are_not_written(check, tmp_path):
    for number in range(8):
        saved(scene(number), tmp_path / "photos" / ("a", "b ")[number % 2] / f"{number}.png")
    result, _, _ = check(tmp_path / "photos")
    assert not (result.folder / "kept.csv").exists()


def test_the_held_out_images_of_a_folder_without_splits_are_kept(check, tmp_path):
    root = tmp_path / "photos"
    for number in range(30):
        saved(scene(number), root / f"{number:02}.png")
    shutil.copy(root / "00.png", root / "30.png")
    result, found, _ = check(root)
    assert len(found) == 1
    table = result.folder / "kept.csv"
    assert "label" not in table.read_text().splitlines()[0]
    data = datasets.folder(Folder(root=str(root)))
    expected = {path: image for path, image in images_of(data).items() if path not in found}
    assert images_of(datasets.csv(Csv(table=str(table)))) == expected
    again, _, _ = check("csv", **{"data.table": table, "name": "again"})
    assert images_of(datasets.csv(Csv(table=str(again.folder / "kept.csv")))) == expected


def test_a_table_of_several_classes_keeps_them_and_its_options(check, tmp_path):
    rows = ["file,species,fold"]
    for number in range(24):
        saved(scene(number), tmp_path / "files" / f"{number}.png")
        rows.append(f"files/{number}.png,{('cat', 'dog', 'cat;dog')[number % 3]},{number % 4 == 3:d}")
    put(tmp_path / "files" / "4.png", b"no image")
    options = {"path": "file", "label": "species", "separator": ";", "split": "fold", "train": 0, "test": 1}
    put(tmp_path / "t.csv", "\n".join(rows).encode())
    typed = {f"data.{name}": value for name, value in options.items()} | {"data.image_size": 32}
    result, found, _ = check("csv", **{"data.table": tmp_path / "t.csv"}, **typed)
    assert [*found.values()] == ["unreadable"]
    before = datasets.csv(Csv(table=str(tmp_path / "t.csv"), **{**options, "train": "0", "test": "1"})).train
    kept = datasets.csv(Csv(table=str(result.folder / "kept.csv"), separator=";")).train
    assert kept.classes == before.classes
    assert len(kept) == len(before) - 1
    by_path = {before.name(row): before.labels[row] for row in range(len(before))}
    assert all(torch.equal(kept.labels[row], by_path[kept.name(row)]) for row in range(len(kept)))
    assert "data.image_size=32" in result.metrics["next"]
    assert "data.path" not in result.metrics["next"]


def test_masks_are_kept(check, tmp_path):
    for number in range(12):
        saved(scene(number), tmp_path / "photos" / f"{number}.png")
        saved(Image.new("L", (48, 48), number % 2), tmp_path / "masks" / f"{number}.png")
    result, _, _ = check(tmp_path / "photos", **{"data.masks": tmp_path / "masks", "data.mask_classes": 2})
    train = datasets.csv(Csv(table=str(result.folder / "kept.csv"), mask_classes=2)).train
    classes = [train.mask(row).unique().tolist() for row in range(len(train))]
    assert classes == [[int(Path(train.name(row)).stem) % 2] for row in range(len(train))]


def test_images_that_a_table_cannot_list_are_checked(check, tmp_path):
    for number in range(12):
        saved(scene(number), tmp_path / "photos" / f"{number}.png")
    saved(Image.new("RGB", (48, 48)), tmp_path / "photos" / "black.png")
    find_command("pack").call([f"data={tmp_path}/photos", f"output={tmp_path}/shards"])
    result, found, _ = check("shards", **{"data.root": tmp_path / "shards"})
    assert [*found.values()] == ["blank"]
    assert not (result.folder / "kept.csv").exists()
    assert "kept.csv" in result.metrics["verdict"]


def test_a_set_without_a_readable_image_is_one_line(tmp_path):
    for number in range(4):
        put(tmp_path / "photos" / f"{number}.jpg", b"no image")
    photos = tmp_path / "photos"
    assert str(photos) in str(error_of(ssvit.try_images, photos, stages="images", outputs=tmp_path / "outputs"))
