"""Robustness sets on made folders of each layout, against plain loops over a model that is known by heart."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import Table

from ssvit.cli import robustness as command
from ssvit.data.augment.crop import CenterCrop
from ssvit.data.sources import robustness as layouts
from ssvit.figures.png import png
from ssvit.options import OptionError
from ssvit.studies.robustness import Robustness, by_corruption, facts, table

WNIDS = [f"n{number:08d}" for number in range(6)]
COUNT = 400
LOGITS = torch.randn(COUNT, 6, generator=torch.Generator().manual_seed(3))


class Known(Table):
    """Has the logits of numbered images by heart."""

    def probabilities(self, logits):
        return logits.softmax(-1)


class Numbered:
    """Writes images whose pixels are their number, and remembers what is where."""

    def __init__(self, root):
        self.root, self.numbers = root, {}

    def write(self, *path):
        number = len(self.numbers)
        file = self.root.joinpath(*path)
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), (number % 256, number // 256, 0), np.uint8)).save(file)
        self.numbers["/".join(path)] = number

    def logits(self, *path):
        return LOGITS[self.numbers["/".join(path)]].tolist()

    def path(self, name):
        return str(self.root / name)


@pytest.fixture
def files(tmp_path):
    return Numbered(tmp_path)


def measure(classes=WNIDS):
    return Robustness(Known(LOGITS[:, : len(classes)], classes), CenterCrop(size=4), batch_size=7)


def best(logits, among):
    return max(among, key=lambda one: logits[one])


def test_answers_are_the_set_s_classes_and_clean_stands_beside_them(files):
    for wnid in WNIDS:
        for image in range(9):
            files.write("clean", wnid, f"{image}.png")
    kept, sizes = [1, 3, 4], [5, 9, 7]
    for label, size in zip(kept, sizes, strict=True):
        for image in range(size):
            files.write("a", WNIDS[label], f"{image}.png")
    files.write("a", "n99999999", "0.png")
    of = measure()
    clean, row = of("clean", files.path("clean"), "classes"), of("a", files.path("a"), "classes")

    def accuracy(name, labels, among):
        found = [
            best(files.logits(*path.split("/")), among) == label
            for path in files.numbers
            for label in labels
            if path.startswith(f"{name}/{WNIDS[label]}/")
        ]
        value = sum(found) / len(found)
        return value, math.sqrt(value * (1 - value) / len(found)), len(found)

    for share, expected in (
        (row.accuracy, accuracy("a", kept, kept)),
        (row.clean, accuracy("clean", kept, kept)),
        (clean.accuracy, accuracy("clean", range(6), range(6))),
    ):
        assert share == pytest.approx(expected[:2])
    assert (row.images, row.classes, row.left_out, row.chance) == (21, 3, 1, pytest.approx(9 / 21))
    assert clean.clean is None
    assert clean.chance == pytest.approx(1 / 6)


@pytest.mark.parametrize("suffix", ["json", "csv"])
def test_a_folder_may_be_several_classes(files, suffix):
    mapping = {"alarm_clock": [WNIDS[0], WNIDS[5]], "bench": [WNIDS[2]], "unused": [WNIDS[1]]}
    for folder in ("alarm_clock", "bench", "of_no_class"):
        for image in range(8):
            files.write("objectnet", folder, f"{image}.png")
    path = files.root / f"mapping.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps({**mapping, "alarm_clock": f"{WNIDS[0]}; {WNIDS[5]}"}))
    else:
        path.write_text("\n".join(",".join([folder, *classes]) for folder, classes in mapping.items()))
    read = layouts.read_mapping("mappings.objectnet", path)
    assert read == mapping
    row = measure()("objectnet", files.path("objectnet"), "classes", read)
    found = [
        WNIDS[best(files.logits("objectnet", folder, f"{image}.png"), range(6))] in mapping[folder]
        for folder in ("alarm_clock", "bench")
        for image in range(8)
    ]
    assert row.accuracy.value == pytest.approx(sum(found) / 16)
    assert (row.images, row.left_out, row.chance) == (16, 8, 0.5)
    with pytest.raises(OptionError, match="zebra is no class of the classifier"):
        measure()("objectnet", files.path("objectnet"), "classes", {"bench": ["zebra"]})


def test_errors_by_corruption_and_severity_and_a_standard_error_over_photographs(files):
    cells = [("fog", 1), ("fog", 2), ("blur", 1)]
    for corruption, severity in cells:
        for label in (0, 1, 2):
            for image in range(10):
                files.write("c", corruption, str(severity), WNIDS[label], f"{image}.png")
    assert layouts.layout("sets.c", files.path("c")) == layouts.CORRUPTIONS
    row = measure()("c", files.path("c"), layouts.CORRUPTIONS)
    wrong = {
        cell: [
            best(files.logits("c", cell[0], str(cell[1]), WNIDS[label], f"{image}.png"), (0, 1, 2)) != label
            for label in (0, 1, 2)
            for image in range(10)
        ]
        for cell in cells
    }
    errors = {cell: sum(of) / 30 for cell, of in wrong.items()}
    assert {(cell.corruption, cell.severity): cell.error.value for cell in row.cells} == pytest.approx(errors)
    means = {"fog": (errors["fog", 1] + errors["fog", 2]) / 2, "blur": errors["blur", 1]}
    assert by_corruption(row.cells) == pytest.approx(means)
    of_images = [
        1 - (wrong["fog", 1][image] + wrong["fog", 2][image]) / 4 - wrong["blur", 1][image] / 2 for image in range(30)
    ]
    mean = np.mean(of_images)
    assert row.accuracy == pytest.approx((mean, np.std(of_images) / math.sqrt(30)))
    assert row.accuracy.value == pytest.approx(1 - np.mean(list(means.values())))
    assert f"| fog | {100 * means['fog']:.1f} | {100 * errors['fog', 1]:.1f} |" in table([row])


def test_shape_bias_counts_decisions_for_shape_or_texture(files):
    classes = ("bird", "tabby", "siamese", "elephant", "dog", "car")
    mapping = {"bird": ["bird"], "cat": ["tabby", "siamese"], "elephant": ["elephant"]}
    pairs = [
        (shape, texture, number)
        for shape in ("bird", "cat", "elephant", "oven")
        for texture in ("bird", "cat", "elephant")
        for number in range(1, 7)
    ]
    for shape, texture, number in pairs:
        files.write("cue", shape, f"{shape}{number}-{texture}{number}.png")
    assert layouts.layout("sets.cue", files.path("cue")) == layouts.CUE_CONFLICT
    row = measure(classes)("cue", files.path("cue"), layouts.CUE_CONFLICT, mapping)
    decisions = Counter()
    for shape, texture, number in pairs:
        if shape in (texture, "oven"):
            continue
        exponents = [math.exp(one) for one in files.logits("cue", shape, f"{shape}{number}-{texture}{number}.png")]
        means = {
            name: np.mean([exponents[classes.index(one)] for one in of]) / sum(exponents)
            for name, of in mapping.items()
        }
        decided = max(means, key=means.get)
        decisions["shape" if decided == shape else "texture" if decided == texture else "neither"] += 1
    total, shapes = decisions.total(), decisions["shape"]
    agreeing = sum(shape == texture for shape, texture, _ in pairs)
    assert (row.images, row.agreeing, row.left_out) == (total, agreeing, len(pairs) - total - agreeing)
    assert f"{agreeing} " in "".join(line for line in table([row]).splitlines() if "agree" in line)
    assert row.accuracy.value == pytest.approx(shapes / total)
    bias, count = shapes / (shapes + decisions["texture"]), shapes + decisions["texture"]
    assert row.shape_bias == pytest.approx((bias, math.sqrt(bias * (1 - bias) / count)))
    assert set(row.by_shape) <= set(mapping)
    by_name = measure(("bird", "cat", "elephant", "dog", "car", "oven"))
    of_all = by_name("cue", files.path("cue"), layouts.CUE_CONFLICT)
    assert (of_all.agreeing, of_all.left_out) == (agreeing, 0)
    assert "unreadable" not in table([of_all])


def test_imagenet_s_classes_of_the_cues():
    wnids = [f"n{number:08d}" for number in range(1000)]
    found = layouts.entry_level(wnids)
    names = [name for of in found.values() for name in of]
    assert (len(found), len(names), len(set(names))) == (16, 207, 207)
    assert found["elephant"] == (wnids[385:387])
    assert layouts.entry_level(["cat", "dog"]) == {"cat": ["cat"], "dog": ["dog"]}


def test_the_picture_and_the_numbers_have_all_sets(files):
    for label in (0, 1):
        for image in range(4):
            files.write("clean", WNIDS[label], f"{image}.png")
            files.write("c", "fog", str(1 + image % 2), WNIDS[label], f"{image}.png")
            files.write("cue", f"bird{image}-cat{label}.png")
    of = measure()
    rows = [of("clean", files.path("clean"), "classes"), of("c", files.path("c"), "corruptions")]
    rows.append(of("cue", files.path("cue"), "cue conflict", {"bird": [WNIDS[0]], "cat": [WNIDS[1], WNIDS[2]]}))
    found = json.loads(json.dumps(facts(rows)))
    assert [one["name"] for one in found] == ["clean", "c", "cue"]
    assert found[1]["clean"]["value"] == rows[0].accuracy.value
    figure = command.figure(rows)
    bars, errors, shapes = figure.axes
    for axis, names in ((bars, ["clean", "c", "cue"]), (shapes, ["all", *rows[2].by_shape])):
        assert [one.get_text() for one in axis.get_yticklabels()] == names
        assert min(axis.get_ylim()) < 0 < len(names) - 1 < max(axis.get_ylim())
    assert [line.get_label() for line in errors.lines] == ["fog"]
    assert len(png(figure)) > 5000


@pytest.mark.parametrize(("options", "message"), [
    ({"sets": None}, "sets=null: must be names of sets"),
    ({"sets": {"a": "nowhere"}}, "sets.a=nowhere: no such folder"),
    ({"mappings": {"b": "x.json"}}, "must name files of sets"),
    ({"mappings": {"a": "x.json"}}, "mappings.a=x.json: cannot be read"),
    ({"batch_size": 0}, "batch_size=0"),
])  # fmt: skip
def test_what_cannot_be_is_refused(files, options, message):
    files.write("a", WNIDS[0], "0.png")
    with pytest.raises(OptionError, match=message):
        command.check(command.Robustness(**{"sets": {"a": files.path("a")}} | options))


def test_folders_of_other_classes_are_refused(files):
    files.write("a", "zebra", "0.png")
    with pytest.raises(OptionError, match="has no folder of a class of the classifier, as n00000000, but zebra"):
        measure()("a", files.path("a"), "classes")
