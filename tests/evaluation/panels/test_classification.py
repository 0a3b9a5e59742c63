"""Accuracy of a classifier: its numbers against plain loops, however they are spread; words, tables and pictures."""

import csv
import io
import json
import math
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image
from ranks import child, together
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    log_loss,
    precision_recall_fscore_support,
    recall_score,
    top_k_accuracy_score,
)
from tiny import Table

from ssvit.data.augment.crop import CenterCrop
from ssvit.data.sources.files import Files
from ssvit.data.sources.memory import Memory
from ssvit.evaluation.panels import classification_options
from ssvit.evaluation.panels.base import with_metrics
from ssvit.evaluation.panels.classification import Classification
from ssvit.options import UserError

WNIDS = [f"n{number:08d}" for number in range(1000)]


def tagged(count: int, side: int = 4) -> torch.Tensor:
    """Images (count, 3, side, side) whose pixels tell their number."""
    number = torch.arange(count)
    return (
        torch.stack((number % 256, number // 256, number * 0), 1)
        .to(torch.uint8)[:, :, None, None]
        .repeat(1, 1, side, side)
    )


def names(k: int) -> list[str]:
    return [f"class {number}" for number in range(k)]


def case(count: int, k: int, seed: int = 0) -> tuple[Table, Memory]:
    """A model that is right about half of the time, and images of a few classes often, of others never."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(count, generator=generator).square() * (k - 0.5)).long()
    logits = torch.randn(count, k, generator=generator)
    logits[torch.arange(count), labels] += 1.5
    return Table(logits, names(k)), Memory(tagged(count), labels, names(k))


def evaluation(source, side: int = 4, part: str = "test", **options) -> Classification:
    chosen = classification_options.Classification(**{"batch_size": 16} | options)
    return Classification(chosen, source=source, transform=CenterCrop(size=side), part=part)


def by_scikit_learn(logits: torch.Tensor, labels: torch.Tensor) -> tuple[dict[str, float], list[list[int]]]:
    """The numbers and the confusion matrix."""
    k, guess = logits.shape[1], logits.argmax(1)
    there = labels.unique()
    metrics = {
        "accuracy": accuracy_score(labels, guess),
        "loss": log_loss(labels, logits.double().softmax(1), labels=range(k)),
        "accuracy_per_class": recall_score(labels, guess, labels=there, average="macro"),
        "macro_f1": f1_score(labels, guess, average="macro"),
        "accuracy_constant": labels.bincount().max().item() / len(labels),
        "images": len(labels),
    }
    if k > 5:
        metrics["accuracy_top5"] = top_k_accuracy_score(labels, logits, k=5, labels=range(k))
    return metrics, confusion_matrix(labels, guess, labels=range(k)).tolist()


@torch.no_grad()
@pytest.mark.parametrize(("count", "k"), [(1, 2), (50, 2), (90, 5), (200, 6), (333, 40)])
def test_numbers_are_those_of_scikit_learn(count, k):
    model, source = case(count, k)
    found = evaluation(source)
    evaluated = found(model, [{"step": 0}])
    assert model.asked == list(range(count))
    expected, matrix = by_scikit_learn(model.table, source.labels)
    assert evaluated.metrics == pytest.approx(expected, rel=1e-6)
    predictions = found.predictions(model)
    assert predictions.confusion(k).tolist() == matrix
    assert predictions.confusion(k, 2).sum() == count
    assert found(model).metrics == evaluation(source, batch_size=7)(model).metrics
    rows = list(csv.DictReader(io.StringIO(evaluated.tables["classes.csv"])))
    scores = precision_recall_fscore_support(source.labels, predictions.guess, labels=range(k), zero_division=0)
    for number, (row, *expected) in enumerate(zip(rows, *scores, strict=True)):
        values = [float(row[name] or 0) for name in ("precision", "recall", "f1", "images")]
        assert values == pytest.approx(expected, abs=5e-5)
        others = [(-times, other) for other, times in enumerate(matrix[number]) if times and other != number]
        times, other = min(others, default=(0, None))
        assert (row["most_often_taken_for"], int(row["times"])) == ("" if other is None else names(k)[other], -times)


@torch.no_grad()
def test_blocks_of_neighbouring_classes_sum_the_whole_matrix():
    model, source = case(300, 12)
    found = evaluation(source)
    predictions = found.predictions(model)
    whole = predictions.confusion(12)
    assert torch.equal(predictions.confusion(12, 4), whole.view(4, 3, 4, 3).sum((1, 3)))
    assert predictions.confusion(12, 5).sum() == 300


@torch.no_grad()
def test_of_equals_the_first_is_the_guess():
    source = Memory(tagged(8), torch.arange(8), names(8))
    found, model = evaluation(source), Table(torch.zeros(8, 8), names(8))
    metrics = found(model).metrics
    assert found.predictions(model).guess.tolist() == [0] * 8
    assert metrics["accuracy"] == 1 / 8
    assert metrics["accuracy_top5"] == 5 / 8
    assert metrics["loss"] == pytest.approx(math.log(8), rel=1e-12)


@torch.no_grad()
def test_a_model_that_is_not_finite_is_not_right():
    source = Memory(tagged(16), torch.arange(16) % 8, names(8))
    found, model = evaluation(source), Table(torch.full((16, 8), math.nan), names(8))
    evaluated = found(model, [{"step": 0}])
    assert math.isnan(evaluated.metrics["loss"])
    assert evaluated.metrics["accuracy"] == 1 / 8
    assert all(figure.png() for figure in evaluated.figures.values())


def join(rank: int, world: int, folder: Path, count: int, k: int, failure: str) -> None:
    """Measure as one of several processes, and write down what came of it."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    model, source = case(count, k)
    if failure == "labels" and rank == world - 1:
        source.labels = None
    elif failure == "files":
        source = Files(sorted(map(str, folder.glob("*.png"))), source.labels, source.classes)
    found = evaluation(source)
    with torch.no_grad():
        try:
            result = {"metrics": found(model).metrics, "asked": list(model.asked)}
            result["places"] = found.predictions(model).place.tolist()
        except UserError as error:
            result = {"error": str(error)}
    (folder / f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


def spread(folder: Path, world: int, count: int, k: int, failure: str = "") -> list[dict]:
    """What each of `world` processes has measured."""
    assert together(child(join, rank, world, folder, count, k, failure) for rank in range(world)) == [0] * world
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("count", [100, 2])
def test_three_processes_measure_what_one_does(tmp_path, count):
    model, source = case(count, 7)
    with torch.no_grad():
        alone = evaluation(source)(model).metrics
    results = spread(tmp_path, 3, count, 7)
    assert sorted(number for result in results for number in result["asked"]) == list(range(count))
    for result in results:
        assert result["metrics"] == alone
        assert result["places"] == list(range(count))


def test_what_fails_in_one_process_is_told_in_all(tmp_path):
    results = spread(tmp_path, 2, 20, 3, failure="labels")
    assert ["no labels" in result["error"] for result in results] == [True, True]


def files(folder: Path, count: int, name: str = "{:04d}.png", first: int = 0) -> list[str]:
    """Tagged images as files."""
    paths = []
    for number, image in enumerate(tagged(count)):
        paths.append(str(folder / name.format(number + first)))
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(paths[-1])
    return paths


def test_too_many_unreadable_files_for_all_processes_together(tmp_path):
    for path in files(tmp_path, 30)[-2:]:  # in the part of the last one, which has not seen enough to say so
        Path(path).write_bytes(b"no image")
    results = spread(tmp_path, 2, 30, 3, failure="files")
    assert [result["error"] for result in results] == ["2 of 30 image files cannot be read, more than 1%"] * 2


@torch.no_grad()
def test_unreadable_files_are_left_out_and_told(tmp_path):
    model, whole = case(200, 6)
    paths = files(tmp_path, 200)
    Path(paths[150]).write_bytes(b"no image")
    found = evaluation(Files(paths, whole.labels, whole.classes))
    evaluated, predictions = found(model, [{"step": 0}]), found.predictions(model)
    kept = [place for place in range(200) if place != 150]
    expected, matrix = by_scikit_learn(model.table[kept], whole.labels[kept])
    assert evaluated.metrics == pytest.approx(expected | {"unreadable": 1}, rel=1e-6)
    assert predictions.confusion(6).tolist() == matrix
    assert any("unreadable and left out: 1 " in line for line in evaluated.lines)
    assert numbers_of(evaluated.figures["mistakes"]) == predictions.place[predictions.worst(24)].tolist()
    for path in paths[:5]:
        Path(path).write_bytes(b"no image")
    with pytest.raises(UserError, match="6 of 200 image files cannot be read"):
        found(model)


def numbers_of(gallery) -> list[int]:
    """The tags of the images shown."""
    colors = [(255 * picture.image[:, 0, 0]).round().int().tolist() for row in gallery.rows for picture in row]
    return [red + 256 * green for red, green, _ in colors]


@torch.no_grad()
def test_the_mistakes_shown_are_the_most_confident_and_the_model_is_asked_once():
    model, source = case(300, 6)
    model.table[::2] = model.table[::2].round()  # so that some are equally confident
    gallery = evaluation(source)(model, [{"step": 0}]).figures["mistakes"]
    assert model.asked == list(range(300))
    chances = model.table.double().softmax(-1)
    wrong = [place for place in range(300) if int(chances[place].argmax()) != int(source.labels[place])]
    wrong.sort(key=lambda place: -chances[place].max().item())
    assert numbers_of(gallery) == wrong[:24]
    assert f"{len(wrong)} mistakes in 300 test images" in gallery.title
    captions = [picture.captions for row in gallery.rows for picture in row]
    for place, (truth, guess) in zip(wrong, captions, strict=False):
        assert truth == f"class {int(source.labels[place])}"
        number = int(chances[place].argmax())
        assert (f"class {number}" in guess, f"{100 * chances[place, number].item():.0f} %" in guess) == (True, True)
    source = Memory(tagged(3), [0, 1, 2], names(3))
    gallery = evaluation(source)(Table(torch.eye(3) * 9, names(3)), [{"step": 0}]).figures["mistakes"]
    assert (gallery.rows, "no mistake" in gallery.title) == ([], True)


@torch.no_grad()
def test_equally_confident_mistakes_come_by_their_place():
    found = evaluation(Memory(tagged(10), [1] * 10, names(2)))
    predictions = found.predictions(Table(torch.tensor([[2.0, 0.0], [3.0, 0.0]]).repeat(5, 1), names(2)))
    assert predictions.worst(7).tolist() == [1, 3, 5, 7, 9, 0, 2]


def real_labels(folder: Path, **entries) -> Path:
    """A file of ReaL labels in which each image has the class 7 alone, but for some."""
    labels = [[7] for _ in range(50_000)]
    for number, entry in entries.items():
        labels[int(number[1:]) - 1] = entry
    path = folder / "real.json"
    path.write_text(json.dumps(labels))
    return path


@torch.no_grad()
def test_real_labels_count_whatever_they_allow_and_leave_out_what_has_none(tmp_path):
    paths = files(tmp_path, 6, "ILSVRC2012_val_{:08d}.JPEG.png", first=11)[::-1]
    guesses = [3, 4, 7, 5, 6, 9]  # of the files 16, 15, 14, ...
    model = Table(torch.nn.functional.one_hot(torch.tensor(guesses[::-1]), 1000).float() * 9, WNIDS)
    real = real_labels(tmp_path, n16=[1, 3], n15=[], n13=[2, 8], n12=[6], n11=[7, 8])
    source = Files(paths, [3, 3, 3, 3, 3, 3], WNIDS)
    found = evaluation(source, real=str(real))
    evaluated = found(model, [{"step": 0}])
    assert evaluated.metrics["accuracy"] == 1 / 6
    assert evaluated.metrics["accuracy_real"] == 3 / 5  # 16, 14 and 12; not 13 and 11
    assert any("by ReaL labels 60.0 %" in line for line in evaluated.lines)


@torch.no_grad()
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file"),
        ("[[1], [2", "is no JSON, or damaged"),
        ("\xff", "is no JSON, or damaged"),
        ("[" * 100_000, "is no JSON, or damaged"),
        ('{"a": 1}', "but is no list"),
        ("[[1], [2]]", "but is a list of 2"),
        ("[" + "[1]," * 49_999 + "[1000]]", "the entry of image 50000 is no list of class numbers"),
        ("[3," + "[1]," * 49_998 + "[1]]", "the entry of image 1 is no list of class numbers"),
        ("[[true]," + "[1]," * 49_998 + "[1]]", "the entry of image 1 is no list of class numbers"),
    ],
)
def test_real_labels_that_are_none_are_refused(tmp_path, content, reason):
    path = tmp_path / "real.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    source = Files(files(tmp_path, 2, "ILSVRC2012_val_{:08d}.png", first=1), [0, 1], WNIDS)
    with pytest.raises(UserError, match=f"^real={path}: .*{reason}") as raised:
        evaluation(source, real=str(path))
    assert "\n" not in str(raised.value)


@torch.no_grad()
def test_real_labels_need_imagenets_images_and_classes(tmp_path):
    real = str(real_labels(tmp_path))

    def refusal(source) -> str:
        with pytest.raises(UserError) as raised:
            evaluation(source, real=real)
        assert str(raised.value).startswith(f"real={real}: ")
        return str(raised.value)

    right = files(tmp_path, 2, "ILSVRC2012_val_{:08d}.png", first=1)
    assert "val0000.png does not fit" in refusal(Files(files(tmp_path, 2, "val{:04d}.png"), [0, 1], WNIDS))
    beyond = files(tmp_path, 2, "ILSVRC2012_val_{:08d}.png", first=50_000)
    assert "val_00050001.png does not fit" in refusal(Files(beyond, [0, 1], WNIDS))
    assert "image 0 does not fit" in refusal(Memory(tagged(2), [0, 1], WNIDS))
    for classes in (names(1000), WNIDS[::-1], WNIDS[:999], [*WNIDS, "n99999999"]):
        assert "1000 classes" in refusal(Files(right, [0, 1], classes))


@torch.no_grad()
@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (["cat", "dog", "owl"], None),
        (["cat", "owl", "dog"], "class 1 is 'dog', the model's is 'owl'"),
        (["cat", "dog"], r"images \(3\) are not the model's \(2\): class 2 is 'owl', the model's is absent"),
        (["cat", "dog", "owl", "pig"], "class 3 is absent, the model's is 'pig'"),
    ],
)
def test_classes_of_another_model_are_refused_by_the_first_that_differs(own, reason):
    source = Memory(tagged(3), [0, 1, 2], ["cat", "dog", "owl"])
    model = Table(torch.eye(3, len(own)), own)
    if reason is None:
        assert evaluation(source)(model).metrics["accuracy"] == 1
    else:
        with pytest.raises(UserError, match=reason):
            evaluation(source)(model)


@torch.no_grad()
def test_images_without_labels_and_no_images_are_refused():
    model = Table(torch.eye(3), names(3))
    with pytest.raises(UserError, match="the test images have no labels"):
        evaluation(Memory(tagged(3)))(model)
    with pytest.raises(UserError, match="no validation images"):
        evaluation(Memory(tagged(0), [], names(3)), part="validation")(model)


@torch.no_grad()
def test_names_of_folders_that_are_no_text_can_be_written():
    odd = (os.fsdecode(b"caf\xe9"), "line\nbreak", "a$b{", "x" * 300)
    source = Memory(tagged(8), [0, 1, 2, 3] * 2, odd)
    found, model = evaluation(source), Table(torch.eye(4).roll(1, 1).repeat(2, 1), odd)
    evaluated = found(model, [{"step": 0}])
    for text in (evaluated.tables["classes.csv"], *evaluated.lines):
        text.encode()
    rows = list(csv.DictReader(io.StringIO(evaluated.tables["classes.csv"])))
    assert [row["class"] for row in rows][1:] == list(odd[1:])
    assert all("\n" not in line for line in evaluated.lines)
    assert all(figure.png() for figure in evaluated.figures.values())


@torch.no_grad()
def test_words_tell_the_numbers_and_the_worst_classes():
    labels = torch.tensor([0] * 40 + [1] * 20 + [2] * 20 + [3] * 10 + [4] * 10)
    guesses = labels.clone()
    guesses[:10], guesses[40:52], guesses[60:62], guesses[80:89] = 1, 3, 0, 4
    guesses[52:54] = 2
    source = Memory(tagged(100), labels, ["ant", "bee", "cat", "dog", "elk", "fox"])
    evaluator = evaluation(source)

    def said(guesses):
        return evaluator(Table(torch.eye(6)[guesses] * 5, source.classes), [{"step": 0}]).lines

    lines = said(guesses)
    share = 100 - 10 - 12 - 2 - 9 - 2
    assert lines[0].startswith(f"top-1 {share}.0 %, top-5 ")
    assert lines[0].endswith("of 100 images (chance 40.0 %, always the most frequent class)")
    assert not any("nothing yet" in line for line in lines)
    assert lines[-1] == (
        "lowest: dog 10.0 % (taken for elk 90.0 %), bee 30.0 % (taken for dog 60.0 %), "
        "ant 75.0 % (taken for bee 25.0 %)"
    )
    assert all("\n" not in line for line in lines)
    assert said(labels)[-1] == "no image is named wrong"
    assert said(labels * 0)[1] == "not above chance by two standard errors, so this tells nothing yet"


HISTORY = [
    {"step": 0, "loss": 2.3, "accuracy": 0.1, "accuracy_top5": 0.5},
    {"step": 1, "train/loss": 2.2, "train/accuracy": 0.2},
    {"step": 2, "train/loss": None, "train/accuracy": 0.3},
    {"step": 3, "train/loss": 2.0, "train/accuracy": 0.4},
    {"step": 3, "loss": 1.9, "accuracy": 0.35, "accuracy_top5": 0.8},
]


@torch.no_grad()
def test_figures_describe_shares_of_classes_and_curves_next_to_a_model_that_ignores_the_image():
    model, source = case(250, 10)
    figures = evaluation(source)(model, [*HISTORY, {"step": 3}]).figures
    metrics, matrix = by_scikit_learn(model.table, source.labels)
    assert figures["confusion"].counts.tolist() == matrix
    assert f"{100 * metrics['accuracy']:.1f} %" in figures["confusion"].title
    shares = sorted((count / 250 for count in Counter(source.labels.tolist()).values()), reverse=True)
    expected = [100 * shares[0], 100 * sum(shares[:5]), -sum(share * math.log(share) for share in shares)]
    loss, accuracy = figures["learning"].panels
    assert [level.y for level in (*accuracy.levels, *loss.levels)] == pytest.approx(expected)
    watched = [{f"validation/{name}": value for name, value in row.items() if "train" not in name} for row in HISTORY]
    history = [row | {"step": before["step"]} for row, before in zip(watched, HISTORY, strict=True)]
    for panel in evaluation(source)(model, history).figures["learning"].panels:
        steps = {line.label.split(",")[0]: list(line.x) for line in panel.lines if line.x}
        assert steps == {"validation": [0, 3], "test": [3]}


def test_a_history_has_the_metrics_of_its_last_row_and_none_for_what_is_not_finite():
    history = [{"step": 0, "a": 1.0}, {"step": 4, "other/a": 2.0}]
    assert with_metrics(history, {"a": 3.0, "b": math.nan}) == [
        history[0],
        {"step": 4, "other/a": 2.0, "a": 3.0, "b": None},
    ]
    assert history[1] == {"step": 4, "other/a": 2.0}
