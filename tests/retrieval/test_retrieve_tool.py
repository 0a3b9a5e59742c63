"""ssvit retrieve as a user runs it: a store of pictures, added to and asked, and mistakes in one line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import prefork
import pytest
import torch
from command import TINY, one_line
from composing import composed
from PIL import Image

from ssvit.checkpoints import manifest, storage
from ssvit.cli import retrieve as retrieve_tool
from ssvit.config.command_line import CommandLine
from ssvit.data.augment.crop import CenterCrop
from ssvit.data.decode import load
from ssvit.data.sources.base import Data
from ssvit.data.sources.memory import Memory
from ssvit.evaluation import neighbours
from ssvit.loading import encoder as loading
from ssvit.loading import encoder_options as loading_options
from ssvit.loading.finding import open_checkpoint
from ssvit.models import vit_options
from ssvit.models.vit import ViT
from ssvit.options import OptionError, UserError
from ssvit.retrieval import describer, gallery, options
from ssvit.retrieval.store import Store

RUN = "masked_patch_synthetic"


def paint(path: Path, seed: int, size: tuple[int, int] = (20, 16)) -> None:
    """A picture of its own, of (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(path)


def album(folder: Path, *, first: int, count: int, classes: tuple[str, ...] = ("ant", "bee")) -> Path:
    for number in range(count):
        paint(folder / classes[number % len(classes)] / f"{number}.png", first + number, (20 + number, 16))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a tiny run, an album of 12 and a damaged file, and the store that the tool has made of it."""
    folder = tmp_path_factory.mktemp("made")
    done = prefork.run("pretrain", "outputs=outputs", *TINY, folder=folder)
    assert done.returncode == 0, done.stderr
    (album(folder / "album", first=0, count=12) / "bee" / "bad.jpg").write_text("no image")
    done = prefork.run("retrieve", "outputs=outputs", "action=index", "store=store", "standardize=false", "album",
                       folder=folder)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture
def work(made, tmp_path):
    """A copy to work on; the store's pictures stay where they were."""
    for name in ("outputs", "store"):
        shutil.copytree(made[0] / name, tmp_path / name)
    return tmp_path


def described(folder: Path, paths: list[str], *, unit: bool = True) -> np.ndarray:
    """The features as one would write them down, a picture at a time, in float64."""
    encoder = loading.load_encoder(
        loading_options.LoadEncoder(path=folder / "outputs" / RUN / "step_00000006")
    ).double()
    rows = []
    for path in paths:
        image = CenterCrop(size=16)([load(path)])
        with torch.no_grad():
            *_, tokens = encoder.layers(image.double() / 255)
            rows.append(encoder.norm(tokens)[0, 1:].mean(0).numpy())
    rows = np.stack(rows)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True) if unit else rows


def test_a_store_holds_the_features_of_the_pictures_that_can_be_read(made):
    folder, done = made
    assert f"{folder}/album/bee/bad.jpg: no image" in done.stdout
    assert "store: holds 12 pictures of 2 classes" in done.stdout
    assert "read 13 pictures, " in done.stdout
    assert "a second; 1 could not be read and stayed out" in done.stdout
    store = Store.open(folder / "store")
    assert store.names == sorted(str(path) for path in (folder / "album").rglob("*.png"))
    assert store.classes == [Path(name).parent.name for name in store.names]
    assert np.allclose(store.features.numpy(), described(folder, store.names, unit=False), atol=1e-4)
    seal = manifest.read(folder / "outputs" / RUN / "step_00000006")["seal"]
    assert store.encoder == f"{seal[:16]} layer2_patch_mean"


def test_a_store_of_standardised_features(made, work, tool):
    album = f"{made[0]}/album"
    done = tool("retrieve", "action=index", "store=standard", album, "batch_size=5")  # of a masked model
    assert "standardised" in done.stdout
    names = Store.open(work / "standard").names
    mean, deviation = (of(described(work, names, unit=False), axis=0) for of in (np.mean, np.std))
    known = str(made[0] / "album" / "bee" / "5.png")
    tool("retrieve", "action=query", "store=standard", known, "k=3", "output=found.json")
    scaled = (described(work, names, unit=False) - mean) / deviation
    scaled /= np.linalg.norm(scaled, axis=1, keepdims=True)
    similar = scaled @ scaled[names.index(known)]
    order = [place for place in np.argsort(-similar) if names[place] != known][:3]
    (found,) = json.loads((work / "found.json").read_text())
    assert [one["image"] for one in found["neighbours"]] == [names[place] for place in order]
    assert np.allclose([one["similarity"] for one in found["neighbours"]], similar[order], atol=1e-4)


@pytest.mark.parametrize(
    ("objective", "needs"),
    [("mae", True), ("simmim", True), ("latent", True), ("masked_patch_decoder", True), ("contrastive_tuning", True),
     ("simclr", False), ("dino", False), ("ibot", False), ("supervised", False), ("of_somebody_else", False)],
)  # fmt: skip
def test_the_objective_of_a_run_declares_whether_features_need_to_be_standardised(work, objective, needs):
    checkpoint, line = open_checkpoint(work / "outputs" / RUN), CommandLine([])
    assert describer.needs_standardizing(checkpoint, line)
    config = work / "outputs" / RUN / "config.yaml"
    config.write_text(config.read_text().replace("objective: masked_patch\n", f"objective: {objective}\n"))
    assert describer.needs_standardizing(checkpoint, line) is needs
    config.unlink()
    assert not describer.needs_standardizing(checkpoint, line)


def test_too_few_pictures_are_not_standardised_unless_that_is_chosen(work, tool):
    album(work / "few", first=0, count=4)
    for store, chosen in ("auto", []), ("chosen", ["standardize=true"]):
        tool("retrieve", "action=index", f"store={store}", "few", *chosen)
        assert Store.open(work / store).standardize is bool(chosen)


def test_only_new_pictures_are_added(made, work, tool):
    album(work / "more", first=50, count=3, classes=("cat",))
    held = (made[0] / "store" / "manifest.json").read_bytes()
    done = tool("retrieve", "action=add", "store=store", "more", f"{made[0]}/album/ant", f"{made[0]}/album/ant/0.png")
    assert "store: 3 pictures added, 6 were there already; holds 15 pictures of 3 classes" in done.stdout
    assert "read 3 pictures" in done.stdout
    store = Store.open(work / "store")
    assert store.names[12:] == [str(work / "more" / "cat" / f"{number}.png") for number in range(3)]
    assert store.classes[12:] == ["cat", "cat", "cat"]
    assert np.allclose(store.features.numpy(), described(work, store.names, unit=False), atol=1e-4)
    assert (made[0] / "store" / "manifest.json").read_bytes() == held


def test_a_query_is_answered_in_words_as_json_and_as_a_sheet(made, work, tool):
    album(work / "asked", first=100, count=4, classes=("ant", "bee", "cat"))
    shutil.copy(made[0] / "album" / "bee" / "3.png", work / "asked" / "bee" / "copy.png")
    (work / "asked" / "bee" / "bad.png").write_text("no image")
    known = str(made[0] / "album" / "bee" / "5.png")
    done = tool("retrieve", "action=query", "store=store", "asked", known, "k=6", "sheet=sheet.png",
                "output=found.json", "index=ivf", "index.nlist=3", "index.nprobe=3")  # fmt: skip
    found = json.loads((work / "found.json").read_text())
    paths = [one["image"] for one in found]
    assert paths == [*sorted(str(path) for path in (work / "asked").rglob("*.png") if path.stem != "bad"), known]
    assert [one["class"] for one in found] == ["ant", "ant", "bee", "bee", "cat", None]
    names = Store.open(work / "store").names
    for one, row in zip(found, described(work, paths) @ described(work, names).T, strict=True):
        order = sorted((i for i in range(12) if names[i] != one["image"]), key=lambda i: -row[i])[:6]
        assert [neighbour["image"] for neighbour in one["neighbours"]] == [names[i] for i in order]
        assert np.allclose([neighbour["similarity"] for neighbour in one["neighbours"]], row[order], atol=1e-5)
        first = one["neighbours"][0]
        assert first["class"] == Path(first["image"]).parent.name
        assert first["relative_distance"] == pytest.approx((1 - max(row[order])) / (1 - np.sort(row)[5]), abs=1e-3)
        nearest = f"{one['image']}: {first['image']} ({first['class']}), {100 * first['relative_distance']:.1f} %"
        assert nearest in done.stdout
    assert found[3]["neighbours"][0]["image"].endswith("/bee/3.png")
    assert "asked/bee/bad.png: no image" in done.stdout
    assert "100.00 % of the neighbours that the exact index finds" in done.stdout
    right = [[n["class"] == one["class"] for n in one["neighbours"]] for one in found[:4]]
    assert "4 queries of a class that the store has" in done.stdout
    for k in (1, 5, 6):
        assert f"recall@{k} {100 * sum(any(row[:k]) for row in right) / 4:.2f} %" in " ".join(done.stdout.split())
        assert f"precision@{k} {100 * sum(sum(row[:k]) for row in right) / 4 / k:.2f} %" in " ".join(
            done.stdout.split()
        )
    assert "\nmap  " in done.stdout
    with Image.open(work / "sheet.png") as image:
        assert image.format == "PNG"
        assert min(image.size) > 900  # six rows


def test_a_store_is_pooled_as_the_checkpoint_was_trained_and_asked_as_it_was_made(tmp_path, capsys):
    encoder = ViT(vit_options.ViT(image_size=16, patch_size=4, width=16, depth=2, heads=2))
    state = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
    path = storage.save(tmp_path, 3, {"model": state}, {"encoder": encoder.arguments})
    pictures = album(tmp_path / "album", first=0, count=4)

    def retrieve(*options):
        asked = (f"checkpoint={path}", "workers=1", "k=2", *options, str(pictures))
        retrieve_tool.run(composed(*asked, tool="retrieve").config)
        return capsys.readouterr().out

    for name, asked, made in (("new", "null", "class_token"), ("old", "patch_mean", "patch_mean")):
        store = f"store={tmp_path}/{name}"
        retrieve("action=index", store, f"features.pooling={asked}")
        assert Store.open(tmp_path / name).encoder.endswith(f" layer2_{made}")
        assert "recall@1" in retrieve("action=query", store)
    with pytest.raises(UserError, match=r"layer2_patch_mean, not with .* layer2_class_token"):
        retrieve("action=query", f"store={tmp_path}/old", "features.pooling=class_token")
    assert options.encoder_of(tmp_path / "old").endswith(" layer2_patch_mean")
    assert options.encoder_of(tmp_path) == ""


def evaluated(work: Path, best: str, step: int = 6, **facts: object) -> Path:
    """A report of an evaluation of the checkpoint of a step, whose probe chose some features."""
    file = work / "outputs" / RUN / "evaluation" / "report.json"
    file.parent.mkdir(exist_ok=True)
    seal = manifest.read(work / "outputs" / RUN / f"step_{step:08}")["seal"]
    patches = {"measure": "segmentation", "best": "layer2_patches"}
    measured = [patches, {"measure": "knn", "best": best}]
    file.write_text(json.dumps({"facts": {"checksum": seal, **facts}, "measured": measured}))
    return file


def test_a_store_has_the_layer_that_the_evaluation_chose_and_a_query_that_of_the_store(made, work, tool):
    pictures = f"{made[0]}/album"
    report = evaluated(work, "layer1_patch_mean")
    done = tool("retrieve", "action=index", "store=chosen", pictures)
    assert f"features: layer 1 of 2, patch_mean (chosen by {report})" in done.stdout
    assert Store.open(work / "chosen").encoder.endswith(" layer1_patch_mean")
    evaluated(work, "layer2_patch_mean")
    assert "layer 1 of 2" in tool("retrieve", "action=query", "store=chosen", "k=2", pictures).stdout
    album(work / "more", first=50, count=3)
    assert "3 pictures added" in tool("retrieve", "action=add", "store=chosen", "more").stdout
    last = tool("retrieve", "action=index", "store=last", "features.layer=last", pictures)
    assert "features: layer 2 of 2, patch_mean\n" in last.stdout
    line = one_line(tool("retrieve", "action=query", "store=chosen", "features.layer=2", pictures, status=1))
    assert "layer1_patch_mean, not with" in line


def said_of_features(work, monkeypatch, capsys, *options) -> str:
    monkeypatch.chdir(work)
    config = composed("output=out.npz", *options, tool="embed").config
    describer.check(config)
    config.line.announce()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("features: ")]
    return line


@pytest.mark.parametrize(
    ("best", "step", "options", "features"),
    [
        ("layer1_patch_mean", 6, [], "1 of 2, patch_mean"),
        ("layer1_patch_mean", 6, ["features.layer=last"], "2 of 2, patch_mean"),
        ("layer1_patch_mean", 6, ["features.layer=2"], "2 of 2, patch_mean"),
        ("layer1_patch_mean", 6, ["features.norm=before"], "2 of 2, patch_mean"),
        ("layer1_patch_mean_before_norm", 6, [], "2 of 2, patch_mean"),
        ("layer1_patch_mean_before_norm", 6, ["features.norm=before"], "1 of 2, patch_mean"),
        ("layer1_class_token", 6, ["features.pooling=patch_mean"], "2 of 2, patch_mean"),
        ("layer1_class_token", 6, [], "1 of 2, class_token"),
        ("layer1_patch_mean", 4, [], "2 of 2, patch_mean"),
        ("layer1_patch_mean", 4, [f"checkpoint=outputs/{RUN}/step_00000004"], "1 of 2, patch_mean"),
        ("pixels", 6, [], "2 of 2, patch_mean"),
        (7, 6, [], "2 of 2, patch_mean"),
    ],
)
def test_only_a_choice_among_the_same_features_of_the_same_checkpoint_counts(
    work, monkeypatch, capsys, best, step, options, features
):
    evaluated(work, best, step)
    line = said_of_features(work, monkeypatch, capsys, *options)
    assert line.startswith(f"features: layer {features}")
    assert ("report.json" in line) is (not any("layer" in option for option in options))


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"facts": 3}'])
def test_without_a_report_it_is_the_last_layer(work, monkeypatch, capsys, content):
    report = evaluated(work, "layer1_patch_mean")
    report.unlink() if content is None else report.write_text(content)
    assert "features: layer 2 of 2, patch_mean (the last: " in said_of_features(work, monkeypatch, capsys)


def test_what_is_wrong_with_a_store_is_told_in_one_line(made, work, tool):
    pictures = f"{made[0]}/album"
    shard = work / "store" / "part_00000000.safetensors"
    before = f"checkpoint=outputs/{RUN}/step_00000004"
    seals = [manifest.read(work / "outputs" / RUN / f"step_0000000{step}")["seal"][:16] for step in (6, 4)]
    line = one_line(tool("retrieve", "action=add", "store=store", before, pictures, status=1))
    assert f"made with the encoder {seals[0]} layer2_patch_mean, not with {seals[1]} layer2_patch_mean" in line
    shard.write_bytes(shard.read_bytes()[:-1])
    line = one_line(tool("retrieve", "action=query", "store=store", pictures, status=1))
    assert line == f"ssvit: {shard.relative_to(work)}: is damaged (its sha256 is not the manifest's)"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["action=find", "store=s", "."], "action=find: must be one of index, add, query"),
        (["action=query", "store=s"], "images=: name pictures, or folders of them"),
        (["action=query", "store=s", "nothing.png"], "images=nothing.png: no such file or folder"),
        (["action=query", "store=s", "trap"], "images=trap: holds no image"),
        (["action=add", "store=none", "one.png"], "store=none: no such folder: action=index makes a store"),
        (["action=query", "."], "store: has no default and must be given"),
        (["action=index", "store=s", "data=cifar10"], "data.root: has no default and must be given"),
        (["action=index", "store=s", "data=synthetic", "split=all"], "split=all: must be one of train, validation, te"),
        (["action=query", "store=s", "one.png", "k=0"], "k=0: must be a whole number"),
        (["action=query", "store=s", "one.png", "index=tree"], "index=tree: must be one of flat, hnsw, ivf"),
        (["action=query", "store=s", "one.png", "index=ivf", "index.links=3"], "index.links: there is no such option"),
        (["action=query", "store=s", "one.png", "sheet=no/where.png"], "sheet=no/where.png: there is no such folder"),
        (
            ["action=query", "store=s", "one.png", "features.layer=3"],
            "features.layer=3: must be at most 2, the encoder's layers",
        ),
        (["action=query", "store=s", "one.png", "features.layer=all"], "features.layer=all: must be one"),
        (["action=query", "store=s", "one.png", "checkpoint=none"], "checkpoint=none: no such folder"),
    ],
)
def test_a_mistake_is_told_in_one_line_before_torch_loads(work, tool, no_torch, options, told):
    paint(work / "one.png", 1)
    (work / "s").mkdir()
    line = one_line(tool("retrieve", *options, status=2, PYTHONPATH=no_torch))
    assert line.startswith(f"ssvit: {told}")


def test_a_data_set_is_stored_and_asked_as_pictures_are(work, tool):
    own = ["data=synthetic", "data.images=40", "data.held_out_images=12"]
    made = tool("retrieve", "outputs=outputs", "action=index", "store=set", *own)
    assert "set: holds 40 pictures of 10 classes" in made.stdout
    asked = ["action=query", "store=set", "k=3", "output=out.json", "sheet=sheet.png"]
    told = tool("retrieve", "outputs=outputs", *asked, *own, "split=held_out").stdout
    answers = json.loads((work / "out.json").read_text())
    assert [one["image"] for one in answers] == [f"synthetic/test/{place}" for place in range(12)]
    names = {one["image"] for answer in answers for one in answer["neighbours"]}
    assert names <= {f"synthetic/train/{place}" for place in range(40)}
    assert "precision@3" in told
    # An image of the set itself is no neighbour of its own, whichever way it is asked for.
    tool("retrieve", "outputs=outputs", *asked, *own)
    for place, answer in enumerate(json.loads((work / "out.json").read_text())):
        assert f"synthetic/train/{place}" not in [one["image"] for one in answer["neighbours"]]


def test_a_set_in_memory_is_opened_by_name_and_any_other_name_is_a_file(tmp_path):
    images = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8)
    held = Memory(images, [0, 1, 0, 1, 1], ("ant", "bee"))
    data = Data(held, held.take(torch.tensor([2])), held.take(torch.tensor([3])), ("ant", "bee"))
    train, opened = gallery.of_data_set("own", data, "train")
    assert train == {f"own/train/{place}": ("ant", "bee")[label] for place, label in enumerate(held.labels)}
    assert gallery.of_data_set("own", data, "validation")[0] == {"own/validation/0": "ant"}
    assert gallery.of_data_set("own", data, "test")[0] == {"own/test/0": "bee"}
    assert gallery.of_data_set("own", data, "held_out")[0] == {"own/test/0": "bee"}
    with pytest.raises(OptionError, match="split=test: must be one of train, validation, held_out"):
        gallery.of_data_set("own", replace(data, test=None), "test")
    assert torch.equal(opened("own/validation/0"), images[2])
    assert torch.equal(opened("own/test/0"), images[3])
    paint(tmp_path / "one.png", 1)
    assert torch.equal(opened(str(tmp_path / "one.png")), load(str(tmp_path / "one.png")))


class Mean:
    """An extractor that needs no model: the mean colour."""

    identity = "mean colour"

    def __call__(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean": images.float().mean((2, 3))}


def describer_of_colours(**options) -> gallery.Describer:
    return gallery.Describer(Mean(), CenterCrop(size=16), **options)


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 1), (5, 3), (64, 4)])
def test_describing_keeps_the_order_for_any_batch_and_number_of_threads(tmp_path, batch_size, workers):
    paths = options.pictures([album(tmp_path / "album", first=0, count=11)])
    (tmp_path / "bad.png").write_text("no image")
    asked = [*list(paths)[:6], str(tmp_path / "bad.png"), *list(paths)[6:]]
    describe = describer_of_colours(batch_size=batch_size, workers=workers)
    described = dict(pair for read, vectors in describe(asked) for pair in zip(read, vectors, strict=True))
    assert list(described) == list(paths)
    for path, vector in described.items():
        assert torch.allclose(vector, CenterCrop(size=16)([load(path)])[0].float().mean((1, 2)))


def test_a_file_given_twice_counts_once_and_keeps_its_class(tmp_path, monkeypatch):
    album(tmp_path / "album", first=0, count=2)
    monkeypatch.chdir(tmp_path)
    ant, bee = (str(tmp_path / "album" / name) for name in ("ant/0.png", "bee/1.png"))
    assert options.pictures([ant, "album"]) == {ant: "ant", bee: "bee"}
    assert options.pictures(["album", "album/bee"]) == {ant: "ant", bee: "bee"}
    paint(tmp_path / "album" / "loose.png", 7)
    assert set(options.pictures(["album"]).values()) == {None}


def test_nothing_is_read_for_a_store_that_cannot_be_made_or_asked(tmp_path):
    pictures = options.pictures([album(tmp_path / "album", first=0, count=4)])
    store = str(tmp_path / "store")
    gallery.index(store, pictures, describer_of_colours())
    idle = describer_of_colours()
    with pytest.raises(UserError, match="holds something already"):
        gallery.index(store, pictures, idle)
    with pytest.raises(UserError, match=r"album: no readable manifest\.json .* so it is no store"):
        gallery.query(str(tmp_path / "album"), pictures, idle, neighbours.Flat(), 1)
    with pytest.raises(OptionError, match="at most 3"):
        gallery.query(store, pictures, idle, neighbours.Flat(), 4)
    with pytest.raises(OptionError, match=r"index\.nlist=5: must be at most 4"):
        gallery.query(store, pictures, idle, neighbours.IVF(nlist=5), 3)
    assert "0 pictures added, 4 were there already" in gallery.add(store, pictures, idle)
    assert idle.opened == 0
    with pytest.raises(UserError, match="none of the 1 pictures can be read"):
        gallery.query(store, {str(tmp_path): None}, idle, neighbours.Flat(), 1)


def test_broken_files_do_not_stop_what_is_added_again(tmp_path):
    album(tmp_path / "album", first=0, count=4)
    for name in ("broken", "torn"):
        (tmp_path / "album" / "ant" / f"{name}.png").write_text("no image")
    pictures, store = options.pictures([tmp_path / "album"]), str(tmp_path / "store")
    gallery.index(store, {path: pictures[path] for path in list(pictures)[:1]}, describer_of_colours())
    for added, known in ((3, 1), (0, 4)):
        describe = describer_of_colours()
        said = f"{added} pictures added, {known} were there already; holds 4 pictures of 2 classes"
        assert gallery.add(store, pictures, describe) == f"{store}: {said}"
        assert "2 could not be read" in describe.report
    broken = {path: name for path, name in pictures.items() if Path(path).stem in ("broken", "torn")}
    with pytest.raises(UserError, match="none of the 2 pictures can be read"):
        gallery.add(store, broken, describer_of_colours())


def test_a_picture_that_is_gone_is_still_a_neighbour(tmp_path):
    pictures = options.pictures([album(tmp_path / "album", first=0, count=4)])
    describe = describer_of_colours()
    gallery.index(str(tmp_path / "store"), pictures, describe)
    first, *others = pictures
    for path in others:
        Path(path).unlink()
    answer = gallery.query(str(tmp_path / "store"), {first: "ant"}, describe, neighbours.Flat(), 3)
    assert sorted(one["image"] for one in answer.records[0]["neighbours"]) == sorted(others)
    (tmp_path / "sheet.png").write_bytes(answer.sheet().png())
    assert (tmp_path / "sheet.png").stat().st_size > 0


def test_classes_of_one_picture_each_leave_nothing_to_measure(tmp_path):
    pictures = options.pictures([album(tmp_path / "album", first=0, count=2)])
    describe = describer_of_colours()
    gallery.index(str(tmp_path / "store"), pictures, describe)
    answer = gallery.query(str(tmp_path / "store"), pictures, describe, neighbours.Flat(), 1)
    assert "nothing to measure" in answer.report(ranking=True)
