"""Accuracy of a classifier: its numbers against plain loops, however they are spread; words, tables and pictures."""

import csv
import io
import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image
from ranks import results
from tiny import Table

from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources.base import class_text
from ssvit.data.sources.files import Files
from ssvit.data.sources.memory import Memory
from ssvit.errors import UserError
from ssvit.evaluation.calibration import Calibration
from ssvit.evaluation.evaluators.classification import Classification
from ssvit.evaluation.evaluators.options import Classification as ClassificationOptions


def tagged(count: int, side: int = 4) -> torch.Tensor:
    """Return images (count, 3, side, side) whose pixels encode their index."""
    number = torch.arange(count)
    return (
        torch.stack((number % 256, number // 256, number * 0), 1)
        .to(torch.uint8)[:, :, None, None]
        .repeat(1, 1, side, side)
    )


def names(k: int) -> list[str]:
    return [f"class {number}" for number in range(k)]


def case(count: int, k: int, *, multi_label: bool = False) -> tuple[Table, Memory]:
    """A model that is correct about half of the time, and images of a few classes often, of others never."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(count, generator=generator).square() * (k - 0.5)).long()
    logits = torch.randn(count, k, generator=generator)
    if multi_label:
        labels = torch.rand(count, k, generator=generator) < 0.35
    else:
        logits[torch.arange(count), labels] += 1.5
    return Table(logits, names(k), "multi_label" if multi_label else "softmax"), Memory(tagged(count), labels, names(k))


def evaluation(source, side: int = 4, part: str = "test", **options) -> Classification:
    chosen = ClassificationOptions(**{"batch_size": 16} | options)
    return Classification(chosen, source=source, transform=CenterCrop(size=side).build(), part=part)


def calibration_error(probabilities, correct) -> tuple[float, list[list[float]]]:
    """Return the calibration error and, for each of 15 bins, its size, mean probability and mean of correct."""
    bins: list[list[tuple[float, int]]] = [[] for _ in range(15)]
    for probability, is_correct in zip(probabilities.tolist(), correct.tolist(), strict=True):
        number = next(number for number in range(15) if probability <= (number + 1) / 15 or number == 14)
        bins[number].append((probability, is_correct))
    rows = [[len(pairs), *(sum(column) / len(pairs) for column in zip(*pairs, strict=True))] for pairs in bins]
    return sum(row[0] * abs(row[2] - row[1]) for row in rows if row[0]) / len(correct), rows


def by_scikit_learn(logits: torch.Tensor, labels: torch.Tensor) -> tuple[dict[str, float], list[list[int]]]:
    """The numbers and the confusion matrix."""
    import sklearn.metrics as peer

    k, guess = logits.shape[1], logits.argmax(1)
    there = labels.unique()
    metrics = {
        "accuracy": peer.accuracy_score(labels, guess),
        "loss": peer.log_loss(labels, logits.double().softmax(1), labels=range(k)),
        "ece": calibration_error(logits.double().softmax(1).max(1).values, guess == labels)[0],
        "brier": sum(
            peer.brier_score_loss(labels == number, logits.double().softmax(1)[:, number]) for number in range(k)
        ),
        "accuracy_per_class": peer.recall_score(labels, guess, labels=there, average="macro"),
        "macro_f1": peer.f1_score(labels, guess, average="macro"),
        "accuracy_constant": labels.bincount().max().item() / len(labels),
        "images": len(labels),
    }
    if k > 5:
        metrics["accuracy_top5"] = peer.top_k_accuracy_score(labels, logits, k=5, labels=range(k))
    return metrics, peer.confusion_matrix(labels, guess, labels=range(k)).tolist()


@torch.no_grad()
@pytest.mark.parametrize(("count", "k"), [(1, 2), (50, 2), (90, 5), (200, 6), (333, 40)])
def test_numbers_are_those_of_scikit_learn(count, k):
    import sklearn.metrics as peer

    model, source = case(count, k)
    found = evaluation(source)
    evaluated = found(model, [{"step": 0}])
    assert model.asked == list(range(count))
    expected, matrix = by_scikit_learn(model.table, source.labels)
    assert evaluated.metrics == pytest.approx(expected, rel=1e-6)
    predictions = found.predictions(model)
    assert predictions.confusion(k).tolist() == matrix
    blocks = torch.arange(k) * 2 // k
    merged = torch.zeros(2, 2, dtype=torch.int64).index_put_((blocks[:, None], blocks), torch.tensor(matrix), True)
    assert torch.equal(predictions.confusion(k, 2), merged)
    assert found(model).metrics == evaluation(source, batch_size=7)(model).metrics
    rows = list(csv.DictReader(io.StringIO(evaluated.tables["classes.csv"])))
    scores = peer.precision_recall_fscore_support(source.labels, predictions.guess, labels=range(k), zero_division=0)
    for row, *expected in zip(rows, *scores, strict=True):
        values = [float(row[name] or 0) for name in ("precision", "recall", "f1", "images")]
        assert values == pytest.approx(expected, abs=5e-5)


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


def measured(count: int, k: int, files: list[str] | None = None) -> dict:
    """Return the measurements of one process, or its error."""
    model, source = case(count, k)
    if files is not None:
        source = Files(files, source.labels, source.classes)
    found = evaluation(source)
    try:
        result = {"metrics": found(model).metrics, "asked": list(model.asked)}
        return result | {"places": found.predictions(model).source_indices.tolist()}
    except UserError as error:
        return {"error": str(error)}


@pytest.mark.parametrize("count", [100, 2])
def test_three_processes_measure_what_one_does(tmp_path, count):
    model, source = case(count, 7)
    with torch.no_grad():
        alone = evaluation(source)(model).metrics
    found = results(measured, 3, tmp_path, count, 7)
    assert sorted(number for result in found for number in result["asked"]) == list(range(count))
    for result in found:
        assert result["metrics"] == alone
        assert result["places"] == list(range(count))


def files(folder: Path, count: int, name: str = "{:04d}.png", first: int = 0) -> list[str]:
    """Tagged images as files."""
    paths = []
    for number, image in enumerate(tagged(count)):
        paths.append(str(folder / name.format(number + first)))
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(paths[-1])
    return paths


def test_too_many_unreadable_files_for_all_processes_together(tmp_path):
    paths = files(tmp_path, 30)
    for path in paths[-2:]:  # in the part of the last one, which has not seen enough to say so
        Path(path).write_bytes(b"no image")
    found = results(measured, 2, tmp_path, 30, 3, paths)
    assert [result["error"] for result in found] == ["2 of 30 image files cannot be read, more than 1%"] * 2


@torch.no_grad()
def test_unreadable_files_are_left_out_and_told(tmp_path):
    model, whole = case(200, 6)
    paths = files(tmp_path, 200)
    Path(paths[150]).write_bytes(b"no image")
    found = evaluation(Files(paths, whole.labels, whole.classes))
    evaluated, predictions = found(model, [{"step": 0}]), found.predictions(model)
    kept = [index for index in range(200) if index != 150]
    expected, matrix = by_scikit_learn(model.table[kept], whole.labels[kept])
    assert evaluated.metrics == pytest.approx(expected | {"unreadable": 1}, rel=1e-6)
    assert predictions.confusion(6).tolist() == matrix
    assert len(predictions.source_indices) == 199
    wrong = predictions.source_indices[[mistake.row for mistake in predictions.mistakes(24, names(6))]]
    assert numbers_of(evaluated.figures["mistakes"]) == wrong.tolist()
    for path in paths[:5]:
        Path(path).write_bytes(b"no image")
    with pytest.raises(UserError, match=r"\b6 of 200\b"):
        found(model)


def numbers_of(gallery) -> list[int]:
    """The tags of the images shown."""
    colors = [(255 * picture.image[:, 0, 0]).round().int().tolist() for row in gallery.rows for picture in row]
    return [red + 256 * green for red, green, _ in colors]


@torch.no_grad()
@pytest.mark.parametrize("multi_label", [False, True])
def test_the_mistakes_shown_are_the_most_confident_ones_and_images_are_predicted_once(multi_label):
    model, source = case(300, 6, multi_label=multi_label)
    model.table[::2] = model.table[::2].round()  # so that some are equally confident
    gallery = evaluation(source)(model, [{"step": 0}]).figures["mistakes"]
    assert model.asked == list(range(300))
    wrong = []
    for source_indices in range(300):
        logits, truth = model.table[source_indices].double(), source.labels[source_indices]
        if multi_label:
            confidence = torch.where((logits >= 0) != truth, logits.abs().sigmoid(), 0)
            number = int(confidence.argmax())
            caption = (class_text(truth, names(6)) or "none", ("no " if truth[number] else "") + names(6)[number])
            errors = [(-confidence[number].item(), source_indices, *caption)] * int(confidence[number] > 0)
        else:
            number = int(logits.argmax())
            probability = logits.softmax(-1)[number].item()
            errors = [(-probability, source_indices, names(6)[int(truth)], names(6)[number])] * (number != int(truth))
        wrong += errors
    wrong.sort(key=lambda error: error[:2])
    assert numbers_of(gallery) == [source_indices for _, source_indices, *_ in wrong[:24]]
    assert gallery.title.startswith(f"{len(wrong)} ")
    assert " 300 " in gallery.title
    captions = [picture.captions for row in gallery.rows for picture in row]
    assert captions == [(truth, f"→ {-100 * confidence:.0f} % {guess}") for confidence, _, truth, guess in wrong[:24]]


@torch.no_grad()
def test_without_mistakes_the_gallery_is_empty():
    source = Memory(tagged(3), [0, 1, 2], names(3))
    evaluated = evaluation(source)(Table(torch.eye(3) * 9, names(3)), [{"step": 0}])
    assert evaluated.figures["mistakes"].rows == []
    assert evaluated.figures["mistakes"].png()


@torch.no_grad()
def test_figures_of_a_multi_label_classifier_are_those_of_scikit_learn():
    import sklearn.metrics as peer

    model, source = case(80, 4, multi_label=True)
    truth, logits = source.labels, model.table.data
    truth[:, 3] = False
    metrics = evaluation(source)(model).metrics
    guess = (logits >= 0).numpy()
    probabilities = logits.double().sigmoid()
    error, rows = calibration_error(probabilities.flatten(), truth.flatten())
    assert metrics == pytest.approx({
        "map": peer.average_precision_score(truth[:, :3], logits[:, :3], average="macro"),
        "micro_f1": peer.f1_score(truth, guess, average="micro"),
        "macro_f1": peer.f1_score(truth, guess, average="macro"),
        "loss": torch.nn.functional.binary_cross_entropy_with_logits(logits, truth.float()).item() * 4,
        "ece": error,
        "brier": sum(peer.brier_score_loss(truth[:, number], probabilities[:, number]) for number in range(4)),
        "map_constant": truth[:, :3].double().mean().item(),
        "images": 80,
    })  # fmt: skip
    evaluated = evaluation(source)(model, [{"step": 0}])
    assert set(evaluated.figures) == {"mistakes", "learning", "reliability"}
    assert_shows(evaluated.figures["reliability"], rows)
    rows = list(csv.DictReader(io.StringIO(evaluated.tables["classes.csv"])))
    assert [row["class"] for row in rows] == names(4)
    assert [int(row["images"]) for row in rows] == truth.sum(0).tolist()


@torch.no_grad()
@pytest.mark.parametrize(
    ("source", "classes", "loss", "reason"),
    [
        (Memory(tagged(3)), "abc", "softmax", r"\blabels\b"),
        (Memory(tagged(0), [], "abc"), "abc", "softmax", r"\btest\b"),
        (Memory(tagged(3), [0, 1, 2], "abc"), "acb", "softmax", r"\b1 .*'b'.*'c'"),
        (Memory(tagged(3), [0, 1, 2], "abc"), "ab", "softmax", r"\b2 .*'c'"),
        (Memory(tagged(3), [0, 1, 2], "abc"), "abcd", "softmax", r"\b3 .*'d'"),
        (Memory(tagged(3), [0, 1, 2], "abc"), "abc", "multi_label", r"\btraining\b.*\btest\b"),
        (Memory(tagged(3), torch.eye(3) > 0, "abc"), "abc", "softmax", r"\btest\b.*\btraining\b"),
    ],
)
def test_images_that_do_not_fit_the_model_are_refused(source, classes, loss, reason):
    model = Table(torch.eye(3, len(classes)), classes, loss)
    with pytest.raises(UserError, match=reason) as error:
        evaluation(source)(model)
    assert "\n" not in str(error.value)


@torch.no_grad()
def test_lines_have_the_classes_of_the_lowest_recall():
    labels = torch.tensor([0] * 40 + [1] * 20 + [2] * 20 + [3] * 10 + [4] * 10)
    guesses = labels.clone()
    guesses[:10], guesses[40:52], guesses[60:62], guesses[80:89] = 1, 3, 0, 4
    guesses[52:54] = 2
    source = Memory(tagged(100), labels, ["ant", "bee", "cat", "dog", "elk", "fox"])

    def lines(guesses):
        return evaluation(source)(Table(torch.eye(6)[guesses] * 5, source.classes), [{"step": 0}]).lines

    assert re.findall(r"(\w+): ([\d.]+) % \(([\d.]+) % predicted as (\w+)\)", lines(guesses)[-1]) == [
        ("dog", "10.0", "90.0", "elk"), ("bee", "30.0", "60.0", "dog"), ("ant", "75.0", "25.0", "bee")
    ]  # fmt: skip
    assert len(lines(labels * 0)) == len(lines(guesses)) + 1  # not above chance
    assert "(" not in lines(labels)[-1]


def assert_shows(figure, rows):
    """Check that a reliability diagram shows the expected bins, and that it can be drawn."""
    assert figure.counts == [row[0] for row in rows]
    shown = zip(figure.counts, figure.probabilities, figure.frequencies, strict=True)
    filled = [row for row in rows if row[0]]
    assert [list(values) for values in shown if values[0]] == [pytest.approx(row, rel=1e-12) for row in filled]
    assert figure.png()


@torch.no_grad()
@pytest.mark.parametrize(("count", "sharpness"), [(1, 1), (400, 0.3), (400, 3)])
def test_the_reliability_diagram_shows_accuracy_by_confidence(count, sharpness):
    model, source = case(count, 4)
    model.table *= sharpness
    confidence, guess = model.table.double().softmax(1).max(1)
    error, rows = calibration_error(confidence, guess == source.labels)
    evaluated = evaluation(source)(model, [{"step": 0}])
    assert evaluated.metrics["ece"] == pytest.approx(error, rel=1e-12)
    assert_shows(evaluated.figures["reliability"], rows)


@torch.no_grad()
def test_sampled_labels_are_calibrated_and_certain_ones_are_as_wrong_as_they_can_be():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 3, generator=generator)
    labels = logits.softmax(1).multinomial(1, generator=generator)[:, 0]
    metrics = evaluation(Memory(tagged(4000), labels, names(3)), batch_size=1000)(Table(logits, names(3))).metrics
    assert metrics["ece"] < 0.03
    wrong = Table(torch.eye(3)[(labels + 1) % 3] * 1e3, names(3))
    metrics = evaluation(Memory(tagged(4000), labels, names(3)), batch_size=1000)(wrong).metrics
    assert (metrics["ece"], metrics["brier"]) == (1, 2)


def test_probabilities_at_the_edges_of_bins_and_outside_of_numbers():
    probabilities = torch.tensor([0, 1 / 15, 2 / 15, 1, 0.5], dtype=torch.float64)
    bins = Calibration.of(probabilities, torch.tensor([False, True, True, True, False]))
    assert bins.counts.tolist() == [2, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1]
    assert bins.error == pytest.approx((abs(1 - 1 / 15) + 13 / 15 + 0.5) / 5)
    probabilities[0] = math.nan
    assert math.isnan(Calibration.of(probabilities, torch.ones(5, dtype=torch.bool)).error)


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


WNIDS = [f"n{number:08d}" for number in range(1000)]


def real_labels(folder: Path, **entries) -> str:
    """A file of ReaL labels: the class 7 for each image, but for some."""
    labels = [[7] for _ in range(50_000)]
    for number, entry in entries.items():
        labels[int(number[1:]) - 1] = entry
    (folder / "real.json").write_text(json.dumps(labels))
    return str(folder / "real.json")


@torch.no_grad()
def test_any_of_an_images_real_labels_is_correct_and_an_image_without_them_is_excluded(tmp_path):
    paths = files(tmp_path, 6, "ILSVRC2012_val_{:08d}.JPEG.png", first=11)[::-1]
    guesses = [3, 4, 7, 5, 6, 9]  # of the images 16, 15, 14, ...
    model = Table(torch.nn.functional.one_hot(torch.tensor(guesses[::-1]), 1000).float() * 9, WNIDS)
    real = real_labels(tmp_path, n16=[1, 3], n15=[], n13=[2, 8], n12=[6], n11=[7, 8])
    metrics = evaluation(Files(paths, [3] * 6, WNIDS), real=real)(model, [{"step": 0}]).metrics
    assert metrics["accuracy"] == 1 / 6
    assert metrics["accuracy_real"] == 3 / 5  # 16, 14 and 12; not 13 and 11


@pytest.mark.parametrize(
    ("content", "name", "classes"),
    [
        (None, "ILSVRC2012_val_{:08d}.png", WNIDS),
        ("[[1], [2", "ILSVRC2012_val_{:08d}.png", WNIDS),
        ('{"a": 1}', "ILSVRC2012_val_{:08d}.png", WNIDS),
        ("[" + "[1]," * 49_999 + "[1000]]", "ILSVRC2012_val_{:08d}.png", WNIDS),
        ("[3," + "[1]," * 49_998 + "[1]]", "ILSVRC2012_val_{:08d}.png", WNIDS),
        ("[" + "[1]," * 49_999 + "[1]]", "val{:04d}.png", WNIDS),
        ("[" + "[1]," * 49_999 + "[1]]", "ILSVRC2012_val_{:08d}.png", names(1000)),
    ],
)
def test_other_files_images_and_classes_have_no_real_labels(tmp_path, content, name, classes):
    path = tmp_path / "real.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=f"^real={path}: "):
        evaluation(Files(files(tmp_path, 2, name, first=1), [0, 1], classes), real=str(path))
