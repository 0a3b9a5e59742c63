"""The image size of embed, retrieve and load: that of the images, of the store or of an option."""

import shutil

import numpy as np
import pytest
import tiny
import torch
from command import TINY, one_line
from composing import composed, extraction, untrained
from images import picture, put
from peers import HEADS, of_timm
from safetensors.torch import save_file

import ssvit
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources.decode import load
from ssvit.errors import OptionError
from ssvit.loading.options import usual_size
from ssvit.retrieval.extraction import Extraction
from ssvit.retrieval.options import encoder_of
from ssvit.retrieval.store import Store, writing

TRAINED, PATCH = 96, 8
FOREIGN = ("checkpoint=weights", f"encoder.heads={HEADS}")


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with foreign weights, trained at 96 pixels in patches of 8, and pictures whose median side is 75."""
    (tmp_path / "weights").mkdir()
    save_file(of_timm(img_size=TRAINED).state_dict(), tmp_path / "weights" / "model.safetensors")
    for number in range(6):
        size = (75 + number // 5, 80 + number)
        put(tmp_path / "photos" / "ab"[number % 2] / f"{number}.png", picture(number, size=size))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def extracted(*options: str, store: str | None = None) -> Extraction:
    return extraction("output=f.npz", *FOREIGN, *options, store=store)


def features(names: list[str], size: int) -> np.ndarray:
    """The features of a reference: one picture at a time, in float64."""
    encoder = tiny.loaded("weights", heads=HEADS, image_size=size).double()
    with torch.no_grad():
        images = [CenterCrop(size=size).build()([load(name)]).double() / 255 for name in names]
        return torch.cat([encoder.represent(image) for image in images]).numpy()


@pytest.mark.parametrize(("side", "size"), [(20, 56), (75, 72), (300, 96)])
def test_it_is_the_same_for_images_and_data_sets_as_for_an_evaluation(work, side, size):
    for number in range(5):
        put(work / "set" / f"{number}.png", picture(number, size=(side, side + 3 * number)))
    evaluated = composed(*FOREIGN, "data=./set", tool="evaluate").data.image_size
    for images in (["data=./set"], ["set"], ["data=./photos", "set"], [f"set/{number}.png" for number in range(5)]):
        assert extracted(*images).image_size == (size, size) == (evaluated, evaluated)


def test_it_is_the_same_as_for_an_evaluation_of_images_that_are_not_files(work):
    evaluated = composed(*FOREIGN, "data=shapes", tool="evaluate").data.image_size
    assert extracted("data=shapes").image_size == (evaluated, evaluated)


@pytest.mark.parametrize("name", ["image_size", "data.image_size"])
@pytest.mark.parametrize(("value", "size"), [("64", (64, 64)), ("[48,80]", (48, 80))])
def test_an_option_sets_it(work, name, value, size):
    assert extracted(f"{name}={value}", "photos").image_size == size


def test_the_features_are_computed_at_this_size_and_record_it(work, tool):
    for options, size in (((), 72), (("image_size=56",), 56), ((f"image_size={TRAINED}",), TRAINED)):
        tool("embed", *FOREIGN, "data=./photos", "output=f.npz", "precision=32", "overwrite=true", *options)
        file = np.load("f.npz")
        names = file["names"].tolist()
        assert len(names) == 6
        np.testing.assert_allclose(file["features"], features(names, size), rtol=1e-4, atol=1e-5)
        loaded = ssvit.load("weights", heads=HEADS, image_size=size, precision=32)
        np.testing.assert_allclose(file["features"], loaded.features(names).numpy(), rtol=1e-5, atol=1e-6)
        assert (f" {size}x{size} " in str(file["encoder"])) == (size != TRAINED)
        assert f"size=({size}, {size})" in str(file["encoder"])


def test_queries_have_the_size_of_the_store(work, tool):
    tool("retrieve", "action=index", "store=store", *FOREIGN, "photos")
    store = encoder_of("store")
    assert " 72x72 " in store
    put(work / "small.png", picture(9, size=(20, 20)))
    shutil.copy("photos/a/0.png", "copy.png")
    query = ("retrieve", "action=query", "store=store", *FOREIGN, "k=1")
    assert "copy.png: " in tool(*query, "copy.png", "small.png").stdout
    assert "copy.png: " in tool(*query, "copy.png", "image_size=72").stdout
    tool("retrieve", "action=index", "store=store", *FOREIGN, "small.png")
    assert encoder_of("store") == store
    assert "small.png" in Store.open("store", store).names[-1]
    for action in ("index", "query"):
        for size in ("64", "[72,80]", str(TRAINED)):
            options = (f"action={action}", "store=store", *FOREIGN, f"image_size={size}", "copy.png")
            line = one_line(tool("retrieve", *options, status=2))
            assert line.startswith(f"ssvit: image_size={size}: ")


def test_queries_have_the_fit_of_the_store(work, tool):
    tool("retrieve", "action=index", "store=store", *FOREIGN, "data=./photos", "data.fit=squash")
    assert '"fit":"squash"' in encoder_of("store")
    assert extracted("photos", store="store").transform.fit == "squash"
    shutil.copy("photos/a/0.png", "copy.png")
    query = ("retrieve", "action=query", "store=store", *FOREIGN, "k=1")
    assert "copy.png: " in (printed := tool(*query, "copy.png").stdout)
    assert " 0.0 % of the median distance" in printed
    other = ("action=index", "store=store", *FOREIGN, "data=./photos", "data.fit=pad")
    assert tool("retrieve", *other, status=1).stderr.startswith("ssvit: store: ")


def test_a_store_without_a_size_has_the_size_of_the_training(work):
    identity = f"{extracted('photos').checkpoint.checksum[:16]} layer2_patch_mean"
    with writing(work / "store"):
        Store("store", identity).add(["one"], [None], torch.ones(1, 48))
    assert extracted("photos", store="store").image_size == (TRAINED, TRAINED)


def test_a_size_that_the_patches_do_not_divide_is_an_error_before_torch_loads(work, tool, no_torch):
    for size in ("50", "[64,50]"):
        done = tool("embed", *FOREIGN, "photos", "output=f.npz", f"image_size={size}", status=2, PYTHONPATH=no_torch)
        assert one_line(done).startswith(f"ssvit: image_size={size}: ")


def test_a_run_has_the_size_of_its_training_or_of_the_option(tool, tmp_path):
    untrained(tmp_path / "outputs" / "run", *TINY)
    put(tmp_path / "one.png", picture(1, size=(50, 60)))
    for options, size in (([], 16), (["image_size=32"], 32)):
        tool("embed", *options, "output=f.npz", "overwrite=true", "one.png")
        file = np.load(tmp_path / "f.npz")
        loaded = ssvit.load("newest", outputs=tmp_path / "outputs", image_size=size)
        np.testing.assert_allclose(file["features"], loaded.features(tmp_path / "one.png"), rtol=1e-5, atol=1e-6)
        assert (" 32x32 " in str(file["encoder"])) == (size == 32)


@pytest.mark.parametrize(
    ("trained", "patch", "size"),
    [(518, 14, 224), (384, 16, 224), (224, 16, 224), (96, 8, 96), ([384, 192], 16, (224, 192)), (32, [8, 4], 32)],
)
def test_without_images_it_is_that_of_the_training_or_224(tmp_path, trained, patch, size):
    arguments = {"image_size": trained, "patch_size": patch}
    assert usual_size(Checkpoint(tmp_path, {"encoder": arguments}, foreign=dict)) == size
    assert usual_size(Checkpoint(tmp_path, {"encoder": arguments})) is None


def test_loaded_weights_of_another_project_have_this_size_or_that_of_the_argument(work):
    save_file(of_timm(img_size=240).state_dict(), work / "weights" / "model.safetensors")
    for size, expected in ((None, (224, 224)), (240, (240, 240)), ((40, 64), (40, 64))):
        encoder = ssvit.load("weights", heads=HEADS, image_size=size)
        assert encoder.module.image_size == expected
        assert encoder.prepare(np.zeros((50, 70, 3), np.uint8)).shape[2:] == expected
    with pytest.raises(OptionError, match=r"^image_size=50: "):
        ssvit.load("weights", heads=HEADS, image_size=50)
