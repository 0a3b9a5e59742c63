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
from ssvit.options import OptionError, UserError
from ssvit.studies.robustness import RobustnessEvaluation, table

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
    return RobustnessEvaluation(Known(LOGITS[:, : len(classes)], classes), CenterCrop(size=4), batch_size=7)


def best(logits, among):
    return max(among, key=lambda one: logits[one])


def test_answers_are_the_set_s_classes(files):
    kept, sizes = [1, 3, 4], [5, 9, 7]
    for label, size in zip(kept, sizes, strict=True):
        for image in range(size):
            files.write("a", WNIDS[label], f"{image}.png")
    files.write("a", "n99999999", "0.png")
    result = measure()("a", files.path("a"), "classes", None)
    found = [
        best(files.logits("a", WNIDS[label], f"{image}.png"), kept) == label
        for label, size in zip(kept, sizes, strict=True)
        for image in range(size)
    ]
    value = sum(found) / 21
    assert result.accuracy == pytest.approx((value, math.sqrt(value * (1 - value) / 21)))
    assert (result.images, result.classes, result.left_out, result.chance) == (21, 3, 1, pytest.approx(9 / 21))


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


def test_errors_by_corruption_and_severity(files):
    cells = [("fog", 1), ("fog", 2), ("blur", 1)]
    for corruption, severity in cells:
        for label in (0, 1, 2):
            for image in range(10):
                files.write("c", corruption, str(severity), WNIDS[label], f"{image}.png")
    assert layouts.layout("sets.c", files.path("c")) == layouts.CORRUPTIONS
    result = measure()("c", files.path("c"), layouts.CORRUPTIONS, None)
    errors = {"fog": {}, "blur": {}}
    for corruption, severity in cells:
        wrong = [
            best(files.logits("c", corruption, str(severity), WNIDS[label], f"{image}.png"), (0, 1, 2)) != label
            for label in (0, 1, 2)
            for image in range(10)
        ]
        errors[corruption][severity] = sum(wrong) / 30
    assert result.errors == {name: pytest.approx(by_severity) for name, by_severity in errors.items()}
    accuracy = 1 - ((errors["fog"][1] + errors["fog"][2]) / 2 + errors["blur"][1]) / 2
    assert result.accuracy == pytest.approx((accuracy, math.sqrt(accuracy * (1 - accuracy) / 30)))
    mean = 50 * sum(errors["fog"].values())
    assert f"| fog | {mean:.1f} | {100 * errors['fog'][1]:.1f} | {100 * errors['fog'][2]:.1f} |" in table([result])


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
    assert (row.images, row.left_out) == (total, len(pairs) - total)
    assert row.accuracy.value == pytest.approx(shapes / total)
    bias, count = shapes / (shapes + decisions["texture"]), shapes + decisions["texture"]
    assert row.shape_bias == pytest.approx((bias, math.sqrt(bias * (1 - bias) / count)))
    assert f"shape bias {100 * bias:.1f}" in table([row])
    assert json.loads(json.dumps(vars(row)))["shape_bias"] == pytest.approx([*row.shape_bias])


def test_imagenet_s_classes_of_the_cues():
    wnids = [f"n{number:08d}" for number in range(1000)]
    found = layouts.entry_level(wnids)
    names = [name for of in found.values() for name in of]
    assert (len(found), len(names), len(set(names))) == (16, 207, 207)
    assert found["elephant"] == (wnids[385:387])
    assert layouts.entry_level(["cat", "dog"]) == {"cat": ["cat"], "dog": ["dog"]}


@pytest.mark.parametrize(("options", "message"), [
    (["sets={a:nowhere}"], "sets.a=nowhere: no such folder"),
    (["mappings={b:x.json}"], "must name files of sets"),
    (["mappings={a:x.json}"], "mappings.a=x.json: cannot be read"),
    (["batch_size=0"], "batch_size=0"),
])  # fmt: skip
def test_wrong_options_are_refused_by_name(files, options, message):
    files.write("a", WNIDS[0], "0.png")
    with pytest.raises(UserError, match=message):
        command.command.call([f"sets={{a:{files.path('a')}}}", "checkpoint=none", *options])


def test_folders_of_other_classes_are_refused(files):
    files.write("a", "zebra", "0.png")
    with pytest.raises(OptionError, match="has no folder of a class of the classifier, as n00000000, but zebra"):
        measure()("a", files.path("a"), "classes", None)
