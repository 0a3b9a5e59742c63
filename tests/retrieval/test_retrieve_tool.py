"""`ssvit retrieve` as a user runs it: a store of pictures is extended and queried, and mistakes are one line."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import prefork
import pytest
import tiny
import torch
from command import TINY, one_line
from composing import composed, extraction, untrained
from images import picture, put
from PIL import Image

from ssvit.checkpoints import manifest, storage
from ssvit.cli import retrieve as retrieve_tool
from ssvit.config.command_line import CommandLine
from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources.base import Data
from ssvit.data.sources.decode import load
from ssvit.data.sources.decode_options import RGB
from ssvit.data.sources.memory import Memory
from ssvit.data.windows import parsed_name
from ssvit.data.windows_options import Windowed
from ssvit.errors import OptionError, UserError
from ssvit.evaluation import options as neighbours_options
from ssvit.evaluation.statistics import of_accuracy
from ssvit.figures.display import PLAIN
from ssvit.models.vit_options import ViT
from ssvit.retrieval import gallery, options
from ssvit.retrieval.extraction import Extraction
from ssvit.retrieval.options import PART_FILES, encoder_of
from ssvit.retrieval.pictures import Describer, Opener, PictureSet
from ssvit.retrieval.store import Store

RUN = "masked_patch_shapes"


def paint(path: Path, seed: int, size: tuple[int, int] = (20, 16)) -> None:
    """A picture of noise, of (width, height)."""
    put(path, picture(seed, size=size[::-1]))


def album(folder: Path, *, first: int, count: int, classes: tuple[str, ...] = ("ant", "bee")) -> Path:
    for number in range(count):
        paint(folder / classes[number % len(classes)] / f"{number}.png", first + number, (20 + number, 16))
    return folder


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    """A folder with a tiny run, an album of 12 pictures and a damaged file, and their store; and the console output."""
    folder = tmp_path_factory.mktemp("indexed")
    (album(folder / "album", first=0, count=12) / "bee" / "bad.jpg").write_text("no image")
    for command in (["pretrain", *TINY], ["retrieve", "action=index", "store=store", "precision=32", "album"]):
        done = prefork.run(command[0], "outputs=outputs", *command[1:], folder=folder)
        assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture
def work(indexed, tmp_path):
    """A copy of the run and of the store, whose pictures remain in the first folder."""
    for name in ("outputs", "store"):
        shutil.copytree(indexed[0] / name, tmp_path / name)
    return tmp_path


def opened(folder: Path) -> Store:
    return Store.open(folder, encoder_of(folder))


def features(folder: Path, paths: list[str], layer: int = 2) -> np.ndarray:
    """The features of a reference: one picture at a time, in float64."""
    encoder = tiny.loaded(folder / "outputs" / RUN / "step_00000006")
    rows = []
    for path in paths:
        with torch.no_grad():
            *_, tokens = encoder.double().layers(CenterCrop(size=16).build()([load(path)]).double() / 255)
            rows.append(encoder.norm(tokens)[0, 1:].mean(0).numpy())
    return np.stack(rows)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_a_store_has_the_features_of_readable_pictures_and_is_extended_by_new_ones(indexed, work, tool):
    folder, told = indexed
    assert f"{folder}/album/bee/bad.jpg: " in told
    assert re.search(r"^store: 12 .* 0 .* 1 ", told, re.MULTILINE)
    (first,) = (work / "store").glob(PART_FILES)
    before = first.read_bytes()
    album(work / "more", first=50, count=3, classes=("cat",))
    known = f"{folder}/album/ant"
    told = tool("retrieve", "action=index", "store=store", "more", known, f"{known}/0.png", "workers=2").stdout
    assert re.search(r"^store: 3 .* 6 .* 0 ", told, re.MULTILINE)
    store = opened(work / "store")
    added = [str(work / "more" / "cat" / f"{number}.png") for number in range(3)]
    assert store.names == [*sorted(map(str, (folder / "album").rglob("*.png"))), *added]
    assert store.classes == [Path(name).parent.name for name in store.names]
    np.testing.assert_allclose(store.features.numpy(), features(work, store.names), atol=1e-4)
    seal = manifest.read_manifest(folder / "outputs" / RUN / "step_00000006")["seal"]
    assert store.encoder == f"{seal[:16]} layer2_patch_mean"
    assert first.read_bytes() == before


def test_an_updated_store_has_features_of_the_current_files_and_none_of_removed_ones(indexed, work, tool):
    pictures = album(work / "own", first=0, count=4)
    tool("retrieve", "action=index", "store=own_store", "precision=32", "own")
    paint(pictures / "ant" / "0.png", 90)  # of the same size in pixels
    shutil.copy(pictures / "bee" / "1.png", pictures / "bee" / "3.png")
    (pictures / "ant" / "2.png").unlink()
    told = tool("retrieve", "action=index", "store=own_store", "own").stdout
    assert re.search(r"^own_store: 0 .* 2 ", told, re.MULTILINE)
    tool("retrieve", "action=remove", "store=own_store", "own/ant/2.png")
    store = opened(work / "own_store")
    assert sorted(store.names) == sorted(map(str, pictures.rglob("*.png")))
    assert Path(store.checkpoint).is_dir()  # later commands use it
    np.testing.assert_allclose(store.features.numpy(), features(work, store.names), atol=1e-4)
    line = one_line(tool("retrieve", "action=remove", "store=own_store", "own/bee", "own/ant/2.png", status=2))
    assert line.startswith("ssvit: images=own/ant/2.png: ")
    tool("retrieve", "action=remove", "store=own_store", "own/bee", str(pictures / "bee"), "./own/bee/")
    assert opened(work / "own_store").names == [str(pictures / "ant" / "0.png")]


def test_a_truncated_part_of_a_store_is_named_by_every_action(indexed, work, tool):
    tool("retrieve", "action=index", "store=store", str(album(work / "more", first=50, count=3)))
    last = max((work / "store").glob(PART_FILES))
    last.write_bytes(last.read_bytes()[:100])
    shutil.rmtree(work / "outputs")  # the checkpoint is not what is wrong
    before = sorted((work / "store").iterdir())
    for action in ("index", "query", "remove"):
        line = one_line(tool("retrieve", f"action={action}", "store=store", "more", status=1))
        assert line.startswith(f"ssvit: store/{last.name}: ")
    line = one_line(tool("embed", "anomaly=store", "more", "output=f.npz", status=1))
    assert line.startswith(f"ssvit: store/{last.name}: ")
    assert sorted((work / "store").iterdir()) == before


def test_a_changed_picture_keeps_no_window_of_its_earlier_content(work, tool):
    paint(work / "own" / "a.png", 0, (40, 24))
    paint(work / "own" / "b.png", 1, (40, 24))
    index = ("retrieve", "action=index", "store=windows", "own", "precision=32")

    def entries(name):
        return {stored.partition("#xywh=")[2] for stored in opened(work / "windows").names if name in stored}

    tool(*index, "window=[24,16]")
    tool(*index)  # also the complete pictures
    both = {"", "0,0,16,24", "12,0,16,24", "24,0,16,24"}
    assert entries("a.png") == entries("b.png") == both
    (work / "own" / "a.png").write_bytes(b"no image")
    tool(*index, "window=[24,16]")
    assert entries("a.png") == both  # of a file that cannot be read, the earlier features remain
    paint(work / "own" / "a.png", 2, (28, 24))
    tool(*index, "window=[24,16]")
    assert entries("a.png") == {"0,0,16,24", "12,0,16,24"}
    assert entries("b.png") == both
    paint(work / "own" / "a.png", 3, (20, 24))
    tool(*index)
    assert entries("a.png") == {""}
    assert len(opened(work / "windows")) == 5


def test_a_store_has_features_of_one_precision(work, tool):
    """That of the store is the default; another one is an error and changes nothing."""
    before = {part.name: part.read_bytes() for part in (work / "store").glob(PART_FILES)}
    album(work / "more", first=50, count=3, classes=("cat",))
    assert "precision: 32\n" in tool("retrieve", "action=query", "store=store", "more").stdout
    for action in ("index", "query"):
        tool("retrieve", f"action={action}", "store=store", "precision=bf16", "more", status=1)
    assert before == {part.name: part.read_bytes() for part in (work / "store").glob(PART_FILES)}
    tool("retrieve", "action=index", "store=halves", "precision=bf16", "more")
    assert " bf16 " in opened(work / "halves").encoder
    assert "precision: bf16\n" in tool("retrieve", "action=query", "store=halves", "k=1", "more").stdout


def test_a_query_uses_the_encoder_of_the_store_and_the_folder_of_its_class(work, tool):
    album(work / "queries", first=100, count=4)
    tool("retrieve", "action=query", "store=store", "queries", "output=out.json")
    before = json.loads((work / "out.json").read_text())
    untrained(work / "outputs" / "newer", *TINY, seed=1)
    tool("retrieve", "action=query", "store=store", "queries/ant", "output=out.json")
    for record, same in zip(json.loads((work / "out.json").read_text()), before[:2], strict=True):  # of other batches
        of_both = zip(record.pop("neighbours"), same.pop("neighbours"), strict=True)
        assert record == same
        assert all(neighbour == pytest.approx(other) for neighbour, other in of_both)


@pytest.mark.parametrize("standardize", [True, False])
def test_a_query_returns_the_nearest_pictures_as_lines_json_and_a_sheet(indexed, work, tool, standardize):
    album(work / "queries", first=100, count=4, classes=("ant", "bee", "cat"))
    shutil.copy(indexed[0] / "album" / "bee" / "3.png", work / "queries" / "bee" / "copy.png")
    (work / "queries" / "bee" / "bad.png").write_text("no image")
    known = str(indexed[0] / "album" / "bee" / "5.png")
    index = ("index=ivf", "index.nlist=3", "index.nprobe=3", "standardize=false")
    told = tool("retrieve", "action=query", "store=store", "queries", known, "k=6", "sheet=sheet.png",
                "output=out.json", *(() if standardize else index)).stdout  # fmt: skip
    records = json.loads((work / "out.json").read_text())
    paths = [record["image"] for record in records]
    assert paths == [*sorted(str(path) for path in (work / "queries").rglob("*.png") if path.stem != "bad"), known]
    assert [record["class"] for record in records] == ["ant", "ant", "bee", "bee", "cat", "bee"]
    names = opened(work / "store").names
    stored, asked = features(work, names), features(work, paths)
    if standardize:  # the default of a masked model
        mean, deviation = stored.mean(0), stored.std(0)
        stored, asked = (stored - mean) / deviation, (asked - mean) / deviation
    for record, row in zip(records, unit(asked) @ unit(stored).T, strict=True):
        order = sorted((i for i in range(12) if names[i] != record["image"]), key=lambda i: -row[i])[:6]
        assert [neighbour["image"] for neighbour in record["neighbours"]] == [names[i] for i in order]
        cosines = [neighbour["similarity"] for neighbour in record["neighbours"]]
        np.testing.assert_allclose(cosines, row[order], atol=2e-4)
        nearest = record["neighbours"][0]
        assert nearest["class"] == Path(nearest["image"]).parent.name
        assert nearest["relative_distance"] == pytest.approx((1 - row[order[0]]) / (1 - np.sort(row)[5]), abs=1e-3)
        assert f"{record['image']}: {nearest['image']} " in told
    assert records[3]["neighbours"][0]["image"].endswith("/bee/3.png")
    assert "queries/bee/bad.png: " in told
    correct = [record["neighbours"][0]["class"] == record["class"] for record in records if record["class"] != "cat"]
    assert f": {100 * sum(correct) / 5:.1f} % of 5 " in told
    assert f" {100 * (4 * 6 / 12 + 5 / 11) / 5:.1f} %" in told
    with Image.open(work / "sheet.png") as image:
        assert min(image.size) > 900  # six rows


@pytest.mark.parametrize(
    ("objective", "needs"),
    [("mae", True), ("simmim", True), ("latent", True), ("masked_patch_decoder", True), ("contrastive_tuning", True),
     ("simclr", False), ("dino", False), ("ibot", False), ("diet", False), ("supervised", False),
     ("of_somebody_else", False)],
)  # fmt: skip
def test_the_objective_of_a_run_declares_whether_features_need_to_be_standardised(work, monkeypatch, objective, needs):
    monkeypatch.chdir(work)
    extraction, line = extracted(), CommandLine([])
    assert extraction.needs_standardizing(line)
    config = work / "outputs" / RUN / "config.yaml"
    config.write_text(config.read_text().replace("objective: masked_patch\n", f"objective: {objective}\n"))
    assert extraction.needs_standardizing(line) is needs
    config.unlink()
    assert not extraction.needs_standardizing(line)


def test_the_pooling_is_that_of_the_training_or_of_the_store(tmp_path):
    encoder = ViT(image_size=16, patch_size=4, width=16, depth=2, heads=2).build()
    state = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
    path = storage.save(tmp_path, 3, {"model": state}, {"encoder": encoder.arguments})
    pictures = album(tmp_path / "album", first=0, count=4)

    def retrieve(*options):
        command = (f"checkpoint={path}", "k=2", *options, str(pictures))
        retrieve_tool.run(composed(*command, tool="retrieve").config)

    for name, pooling, expected in (("new", "null", "class_token"), ("old", "patch_mean", "patch_mean")):
        retrieve("action=index", f"store={tmp_path}/{name}", f"features.pooling={pooling}")
        assert encoder_of(tmp_path / name).endswith(f" layer2_{expected}")
        retrieve("action=query", f"store={tmp_path}/{name}")
    with pytest.raises(UserError, match=r"layer2_patch_mean.* layer2_class_token"):
        retrieve("action=query", f"store={tmp_path}/old", "features.pooling=class_token")


def evaluated(work: Path, best: object, step: int = 6) -> Path:
    """A report of an evaluation of the checkpoint of a step, in which a probe chose some features."""
    file = work / "outputs" / RUN / "evaluation" / "report.json"
    file.parent.mkdir(exist_ok=True)
    seal = manifest.read_manifest(work / "outputs" / RUN / f"step_{step:08}")["seal"]
    measured = [{"measure": "segmentation", "best": "layer2_patches"}, {"measure": "knn", "best": best}]
    file.write_text(json.dumps({"metadata": {"checksum": seal}, "measured": measured}))
    return file


def extracted(*options: str, store: Path | None = None) -> Extraction:
    return extraction("output=out.npz", *options, store=store and str(store))


@pytest.mark.parametrize(
    ("best", "step", "options", "spec"),
    [
        ("layer1_patch_mean", 6, [], "layer1_patch_mean"),
        ("layer1_patch_mean", 6, ["features.layer=last"], "layer2_patch_mean"),
        ("layer1_patch_mean", 6, ["features.layer=2"], "layer2_patch_mean"),
        ("layer1_patch_mean", 6, ["features.norm=before"], "layer2_patch_mean_before_norm"),
        ("layer1_patch_mean_before_norm", 6, [], "layer2_patch_mean"),
        ("layer1_patch_mean_before_norm", 6, ["features.norm=before"], "layer1_patch_mean_before_norm"),
        ("layer1_class_token", 6, ["features.pooling=patch_mean"], "layer2_patch_mean"),
        ("layer1_class_token", 6, [], "layer1_class_token"),
        ("layer1_patch_mean", 4, [], "layer2_patch_mean"),
        ("layer1_patch_mean", 4, [f"checkpoint=outputs/{RUN}/step_00000004"], "layer1_patch_mean"),
        ("pixels", 6, [], "layer2_patch_mean"),
        (7, 6, [], "layer2_patch_mean"),
    ],
)
def test_the_layer_is_that_of_an_evaluation_of_the_same_checkpoint_and_features(
    work, monkeypatch, best, step, options, spec
):
    monkeypatch.chdir(work)
    evaluated(work, best, step)
    assert extracted(*options).spec.name == spec
    assert extracted(*options, store=work / "store").spec.layer == (
        2 if step == 6 else int(spec[5])  # the layer of the store, if it is of the same checkpoint
    )


def test_the_norm_is_that_of_the_store(indexed, work, tool):
    tool("retrieve", "action=index", "store=before", "features.norm=before", f"{indexed[0]}/album")
    tool("retrieve", "action=query", "store=before", "k=1", f"{indexed[0]}/album")


def test_the_layer_is_that_of_the_evaluation_on_the_data_set(work, monkeypatch):
    monkeypatch.chdir(work)
    own = evaluated(work, "layer2_patch_mean")
    other = evaluated(work, "layer1_patch_mean").rename(put(own.parent / "pictures" / "report.json"))
    images = f"data={put(work / 'pictures' / 'a.png', picture(0)).parent}"
    assert extracted().spec.layer == 1  # there is no other report
    evaluated(work, "layer2_patch_mean")
    assert extracted().spec.layer == 2
    assert extracted(images).spec.layer == 1
    other.unlink()
    assert extracted(images).spec.layer == 2
    own.unlink()


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"metadata": 3}'])
def test_without_a_readable_report_the_layer_is_the_last(work, monkeypatch, content):
    monkeypatch.chdir(work)
    report = evaluated(work, "layer1_patch_mean")
    report.unlink() if content is None else report.write_text(content)
    assert extracted().spec.layer == 2


def test_a_data_set_is_stored_and_queried_like_pictures(work, tool):
    data = ["data=shapes", "data.images=40", "data.held_out_images=12"]
    tool("retrieve", "action=index", "store=set", *data)
    command = ["retrieve", "action=query", "store=set", "k=3", "output=out.json", "sheet=sheet.png", *data]
    for split, part, count in (("held_out", "test", 12), ("train", "train", 40)):
        tool(*command, f"split={split}")
        records = json.loads((work / "out.json").read_text())
        assert [record["image"] for record in records] == [f"shapes/{part}/{row}" for row in range(count)]
        for record in records:
            names = {neighbour["image"] for neighbour in record["neighbours"]}
            assert names <= {f"shapes/train/{row}" for row in range(40)} - {record["image"]}
    paint(work / "own.png", 1)
    query = ("retrieve", "action=query", "store=set", "k=3", "sheet=own_sheet.png", "own.png")
    assert re.search(r"^own_sheet\.png: 3 .*shapes/train/", tool(*query).stdout, re.MULTILINE)  # cannot be opened
    assert "own_sheet.png: " not in tool(*query, *data).stdout


def test_pictures_of_a_set_in_memory_are_opened_by_name_and_any_other_name_is_a_file(tmp_path):
    images = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8)
    train = Memory(images, [0, 1, 0, 1, 1], ("ant", "bee"))
    data = Data(train, train.take(torch.tensor([2])), train.take(torch.tensor([3])), ("ant", "bee"))
    for split, part, classes in (
        ("train", "train", ["ant", "bee", "ant", "bee", "bee"]), ("validation", "validation", ["ant"]),
        ("test", "test", ["bee"]), ("held_out", "test", ["bee"]),
    ):  # fmt: skip
        pictures = PictureSet.of_split(data, split, "set")
        assert pictures.names == [f"set/{part}/{row}" for row in range(len(classes))]
        assert pictures.classes == classes
        for row, name in enumerate(pictures.names):
            assert torch.equal(Opener(RGB, [pictures])(name), pictures.source.read(row))
    with pytest.raises(OptionError, match="split=test: "):
        PictureSet.of_split(replace(data, test=None), "test", "set")
    paint(tmp_path / "one.png", 1)
    for sets in ((), (pictures,)):
        assert torch.equal(Opener(RGB, sets)(str(tmp_path / "one.png")), load(str(tmp_path / "one.png")))


class Mean:
    """An extractor that needs no model: the mean colour."""

    identity = "mean colour"

    def __call__(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean": images.float().mean((2, 3))}


def colours(**options) -> Describer:
    return Describer(Mean(), CenterCrop(size=16).build(), **options)


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 0), (5, 2), (64, 0)])
def test_features_are_in_the_order_of_the_pictures_for_any_batch_size(tmp_path, batch_size, workers):
    paths = list(options.pictures([album(tmp_path / "album", first=0, count=11)]))
    (tmp_path / "bad.png").write_text("no image")
    pictures = PictureSet.of_files(dict.fromkeys([*paths[:6], str(tmp_path / "bad.png"), *paths[6:]]))
    describe = colours(batch_size=batch_size, workers=workers)
    ((rows, values),) = describe(pictures, [11, *range(11)])
    assert [pictures.names[row] for row in rows] == [paths[10], *paths[:10]]
    assert describe.unreadable == 1
    expected = [CenterCrop(size=16).build()([load(pictures.names[row])])[0].float().mean((1, 2)) for row in rows]
    torch.testing.assert_close(values, torch.stack(expected))


def test_a_picture_is_listed_once_and_its_class_is_its_folder(tmp_path, monkeypatch):
    album(tmp_path / "album", first=0, count=2)
    monkeypatch.chdir(tmp_path)
    ant, bee = (str(tmp_path / "album" / name) for name in ("ant/0.png", "bee/1.png"))
    assert options.pictures([ant, "album"]) == {ant: "ant", bee: "bee"}
    assert options.pictures(["album", "album/bee"]) == {ant: "ant", bee: "bee"}
    (tmp_path / "link").symlink_to("album")
    (tmp_path / "one.png").symlink_to(bee)
    assert options.pictures(["album", "link", "one.png"]) == {ant: "ant", bee: "bee"}
    linked = {str(tmp_path / "link" / "ant" / "0.png"): "ant", str(tmp_path / "one.png"): "bee"}
    assert options.pictures(["one.png", "link", "album"]) == linked
    paint(tmp_path / "album" / "loose.png", 7)
    assert set(options.pictures(["album"]).values()) == {None}


def pictures_of(folder: Path, count: int) -> PictureSet:
    return PictureSet.of_files(options.pictures([album(folder / "album", first=0, count=count)]))


def test_a_changed_class_is_stored_without_new_features(tmp_path, monkeypatch):
    pictures, folder = pictures_of(tmp_path, 4), str(tmp_path / "store")
    gallery.index(folder, pictures, colours())
    before = opened(tmp_path / "store")
    monkeypatch.delattr(Mean, "__call__")
    changed = replace(pictures, classes=["cat", None, "cat", pictures.classes[3]])
    first, _ = gallery.index(folder, changed, colours())
    assert re.findall(r"\d+", first.removeprefix(folder)) == ["0", "2", "2", "0"]
    store = opened(tmp_path / "store")
    rows = [store.row_of[name] for name in pictures.names]
    assert [store.classes[row] for row in rows] == ["cat", pictures.classes[1], "cat", pictures.classes[3]]
    assert torch.equal(store.features[rows], before.features[[before.row_of[name] for name in pictures.names]])
    assert [store.contents[row] for row in rows] == before.contents


def test_a_picture_is_not_its_own_neighbour_through_a_link(tmp_path):
    pictures = pictures_of(tmp_path, 4)
    (tmp_path / "link").symlink_to("album")
    linked = PictureSet.of_files(options.pictures([tmp_path / "link"]))
    gallery.index(str(tmp_path / "store"), linked, colours())
    store = opened(tmp_path / "store")
    assert store.names == linked.names
    for record in gallery.query(store, pictures, colours(), None, k=3):
        own = record["image"].replace("/album/", "/link/")
        assert {neighbour["image"] for neighbour in record["neighbours"]} == {*linked.names} - {own}
    with pytest.raises(OptionError, match=r"^k=4: .*\b3\b"):
        gallery.query(store, pictures, colours(), None, k=4)


class Patches(Mean):
    """The mean colours of the patches."""

    def __call__(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"patches": torch.nn.functional.avg_pool2d(images.float(), 4).movedim(1, -1)}


def test_windows_of_one_picture_are_no_neighbours_and_count_as_one(tmp_path):
    """The nearest other picture of each is of the other class; a random one is of the same class in 1 of 3 cases."""
    colors = {"ant/0": (255, 10, 0), "bee/1": (255, 0, 10), "ant/2": (0, 255, 10), "bee/3": (10, 255, 0)}
    for place, (name, color) in enumerate(colors.items()):
        path = put(tmp_path / f"{name}.png")
        Image.new("RGB", (16 * (3 if place else 4), 16), color).save(path)
    whole = PictureSet.of_files(options.pictures([tmp_path]))
    pictures = whole.windows(Windowed(window=(16, 16)))
    for name, extractor, position in (("store", Mean(), None), ("patches", Patches(), (28, 3))):
        describe = Describer(extractor, CenterCrop(size=16).build())
        gallery.index(str(tmp_path / name), pictures, describe)
        store = opened(tmp_path / name)
        assert len(store) == 13
        for queries in (pictures, whole):
            records = gallery.query(store, queries, describe, None, k=9, patch=position)
            assert len(records) == (4 if position else len(queries.names))
            for record in records:
                found = [parsed_name(neighbour["image"])[0] for neighbour in record["neighbours"]]
                assert len(found) == 9
                assert parsed_name(record["image"])[0] not in found
            if position is None:
                line = gallery.report(records, store)[-1]
                low, high = (100 * bound for bound in of_accuracy(0, 4))
                assert re.findall(r"[\d.]+ ?%|\b\d+ que|[\d.]+ to [\d.]+", line) == [
                    "0.0 %", "4 que", "95 %", f"{low:.1f} to {high:.1f}", "33.3 %",
                ]  # fmt: skip
        with pytest.raises(OptionError, match=r"^k=10: .*\b9\b"):
            gallery.query(store, pictures, describe, None, k=10, patch=position)


def test_no_picture_is_read_for_an_impossible_query(tmp_path):
    pictures, folder = pictures_of(tmp_path, 4), str(tmp_path / "store")
    gallery.index(folder, pictures, colours())
    store = opened(tmp_path / "store")
    idle = colours(batch_size=0)  # an error if it is used
    with pytest.raises(OptionError, match=r"^k=4: .*\b3\b"):
        gallery.query(store, pictures, idle, neighbours_options.Flat(), k=4)
    with pytest.raises(OptionError, match=r"^index\.nlist=5: .*\b4\b"):
        gallery.query(store, pictures, idle, neighbours_options.IVF(nlist=5), k=3)
    gone = PictureSet.of_files({str(tmp_path): None})
    with pytest.raises(UserError, match=r"\b1\b"):
        gallery.query(store, gone, colours(), neighbours_options.Flat(), k=1)


def test_pictures_with_equal_features_cannot_be_standardised(tmp_path):
    pictures = pictures_of(tmp_path, 1)
    gallery.index(str(tmp_path / "store"), pictures, colours())
    with pytest.raises(UserError, match="standardize=false"):
        gallery.query(opened(tmp_path / "store"), PictureSet.of_files({"x": None}), colours(),
                      neighbours_options.Flat(), k=1, standardize=True)  # fmt: skip


def test_unreadable_files_do_not_prevent_the_addition_of_others(tmp_path):
    for name in ("broken", "torn"):
        (album(tmp_path / "album", first=0, count=4) / "ant" / f"{name}.png").write_text("no image")
    files, store = options.pictures([tmp_path / "album"]), str(tmp_path / "store")
    gallery.index(store, PictureSet.of_files(dict(list(files.items())[:1])), colours())
    for added, present in ((3, 1), (0, 4)):
        first, _ = gallery.index(store, PictureSet.of_files(files), colours())
        assert first.startswith(f"{store}: ")
        assert re.findall(r"\d+", first.removeprefix(store)) == [str(added), str(present), "2"]
    broken = {path: name for path, name in files.items() if Path(path).stem in ("broken", "torn")}
    with pytest.raises(UserError, match=r"\b2\b"):
        gallery.index(store, PictureSet.of_files(broken), colours())


def test_a_sheet_shows_neighbours_whose_files_are_gone_and_reduces_large_pictures(tmp_path):
    pictures = pictures_of(tmp_path, 4)
    gallery.index(str(tmp_path / "store"), pictures, colours())
    first, *others = pictures.names
    for path in others:
        Path(path).unlink()
    paint(Path(first), 0, (1000, 700))
    one = PictureSet.of_files({first: "ant"})
    records = gallery.query(opened(tmp_path / "store"), one, colours(), neighbours_options.Flat(), k=3)
    assert sorted(neighbour["image"] for neighbour in records[0]["neighbours"]) == sorted(others)
    sheet = gallery.sheet(records, Opener(RGB), PLAIN, CenterCrop(size=16).build())
    assert [picture.image.shape[1:] for picture in sheet.rows[0]] == [(238, 340), *[(1, 1)] * 3]
    assert sheet.png()
    for size, reduced in (((400, 1), (1, 340)), ((1, 400), (340, 1))):
        paint(Path(first), 0, size)
        sheet = gallery.sheet(records, Opener(RGB), PLAIN, CenterCrop(size=16).build())
        assert sheet.rows[0][0].image.shape[1:] == reduced
        assert sheet.png()


def test_a_window_outside_of_a_picture_that_has_become_smaller_is_grey(tmp_path):
    paint(tmp_path / "a.png", 0, (40, 40))
    opener = Opener(RGB)
    window = f"{tmp_path / 'a.png'}#xywh=24,24,16,16"
    assert opener(window).shape == (3, 16, 16)
    paint(tmp_path / "a.png", 0, (32, 20))
    again = Opener(RGB)
    assert again(window).shape[1:] == (1, 1)
    assert window in again.report("sheet.png")[0]


def test_classes_of_one_picture_each_have_no_metrics(tmp_path):
    pictures = pictures_of(tmp_path, 2)
    gallery.index(str(tmp_path / "store"), pictures, colours())
    store = opened(tmp_path / "store")
    records = gallery.query(store, pictures, colours(), neighbours_options.Flat(), k=1)
    assert not any("baseline" in line for line in gallery.report(records, store))


def test_the_most_similar_patches_are_those_of_a_plain_loop(indexed, work, tool, monkeypatch):
    folder = indexed[0]
    tool("retrieve", "action=index", "store=patches", "precision=32", "features.pooling=patches", f"{folder}/album")
    store = opened(work / "patches")
    query, cell = f"{folder}/album/ant/4.png", (1, 2)
    # The pictures are 16 pixels high; the crop removes the same number of columns left and right of the centre.
    width = Image.open(query).width
    x, y = (width - 16) // 2 + 4 * cell[1] + 1, 4 * cell[0] + 1
    options = ("action=query", "store=patches", "standardize=false", "k=3", "output=n.json", "sheet=s.png")
    tool("retrieve", *options, f"patch={x},{y}", query)
    (record,) = json.loads((work / "n.json").read_text())
    vector = store.features[store.row_of[query]][cell].numpy()
    best = []
    for name, patches in zip(store.names, store.features.numpy(), strict=True):
        cosines = {place: float(unit(patches[place][None])[0] @ unit(vector[None])[0]) for place in np.ndindex(4, 4)}
        if name != query:
            best.append((max(cosines.values()), name, [*max(cosines, key=cosines.get)]))
    found = [(row["similarity"], row["image"], row["patch"]) for row in record["neighbours"]]
    for (cosine, *place), (expected, *expected_place) in zip(found, sorted(best, reverse=True)[:3], strict=True):
        assert (cosine, place) == (pytest.approx(expected, abs=1e-5), expected_place)
    assert record["patch"] == [*cell]
    assert record["cosines"][cell[0]][cell[1]] == pytest.approx(1, abs=1e-5)
    with Image.open(work / "s.png") as sheet:
        assert min(sheet.size) > 100
    (row,) = gallery.sheet([record], load, PLAIN, CenterCrop(size=16).build()).rows
    assert {picture.color for picture in row[1:]} == {None}  # the class of a picture is not that of its patches
    assert "ssvit: patch=" in tool("retrieve", *options, f"patch={width},0", query, status=2).stderr
    for wrong in (("store=store", f"patch={x},{y}"), ("store=patches", "index=hnsw", f"patch={x},{y}")):
        tool("retrieve", "action=query", *wrong, query, status=2 if len(wrong) == 3 else 1)


def test_parts_of_a_store_have_limited_bytes(work, monkeypatch):
    extract = extraction(f"outputs={work}/outputs", "precision=32", "output=f.npz")
    album(work / "more", first=50, count=7)
    pictures = PictureSet.of_files(dict.fromkeys(map(str, (work / "more").rglob("*.png"))))
    (whole,) = extract.describer()(pictures, range(7))
    monkeypatch.setattr("ssvit.retrieval.pictures.PART_BYTES", 3 * whole[1][0].nbytes)
    parts = [*extract.describer()(pictures, range(7))]
    assert [rows for rows, _ in parts] == [[0, 1, 2], [3, 4, 5], [6]]
    assert torch.equal(torch.cat([features for _, features in parts]), whole[1])
