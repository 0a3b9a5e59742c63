"""The report of an evaluation: every number is in it, nothing of it is from elsewhere, no name can break it."""

import base64
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from PIL import Image
from plots import curves

from ssvit.evaluation.baselines import PIXELS, RANDOM
from ssvit.evaluation.features import Features
from ssvit.evaluation.probes.knn import Knn
from ssvit.evaluation.probes.ridge import FewShot
from ssvit.evaluation.report import page as report
from ssvit.evaluation.report.conclusion import conclude
from ssvit.evaluation.report.figures import by_column, by_layer
from ssvit.evaluation.report.scores import Scores
from ssvit.evaluation.report.side_by_side import SideBySide
from ssvit.evaluation.titles import title
from ssvit.figures.plot import Panel, Plot
from ssvit.options import UserError

OWN = tuple(f"layer{layer}_patch_mean" for layer in (1, 2, 3))
NAMES = (*OWN, *(f"random_{name}" for name in OWN), "pixels")
EVIL = "<script>alert('1')</script> | [a](b) & \"c\"\n# d \udcff"
VOID = {"meta", "img"}


def scored(probe: str, columns, scores, deviation=None, **changes) -> Scores:
    """A probe whose last column has the scores, and each column before it 0.0123 less."""
    last = len(columns) - 1
    values = {
        name: tuple(score - 0.0123 * (last - place) for place in range(last + 1))
        for name, score in zip(NAMES, scores, strict=True)
    }
    return Scores(**{
        "probe": probe, "columns": tuple(columns), "values": values,
        "deviations": dict.fromkeys(NAMES, (deviation,) * len(columns)), "best": OWN[1],
        "chosen": {"": OWN[1], RANDOM: f"random_{OWN[2]}", PIXELS: PIXELS}, "chosen_by": "leave-one-out",
        "options": {"k": (1, 5)}, "numbers": {"seen": [math.nan, 1]},
    } | changes)  # fmt: skip


SHOTS = scored(
    "few_shot", ["1 label per class", "5 labels per class", "all labels"], [0.5, 0.7, 0.65, 0.1, 0.2, 0.3, 0.25], 0.0156
)
PROBE = scored("logistic", ["train", "validation", "test"], [0.3, 0.41, 0.45, 0.1, 0.2, 0.3, 0.42])
BOTH = (SHOTS, PROBE)
GROUPS = {"mine": [""], RANDOM: [RANDOM], PIXELS: [PIXELS]}


class Page(HTMLParser):
    """What a page is made of; it fails on a tag that is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.rows, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]


def write(folder, facts=None, scores=BOTH, own=OWN, figures=None):
    files = report.write(
        folder, facts=facts or {"checkpoint": "a/b"}, scores=scores, own=own, figures=figures or {},
        compared=SideBySide(scores, GROUPS), conclusion=concluded(*scores),
    )  # fmt: skip
    page, numbers = (path.read_text(encoding="utf-8") for path in files)
    return Page(page), json.loads(numbers, parse_constant=pytest.fail), page


def expected(found: Scores) -> list[list[str]]:
    rows = []
    for name in NAMES:
        pairs = zip(found.values[name], found.deviations[name], strict=True)
        cells = [f"{100 * mean:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}") for mean, spread in pairs]
        rows.append([name, *cells])
    return rows


def test_every_number_is_in_every_form(tmp_path):
    page, numbers, _ = write(tmp_path / "new" / "folder")
    for place, found in enumerate(BOTH):
        heading = ["%", *found.columns]
        at = page.rows.index(heading)
        assert page.rows[at + 1 : at + 1 + len(NAMES)] == expected(found)
        assert {key: tuple(row) for key, row in numbers["measured"][place]["values"].items()} == found.values
    assert numbers["measured"][0]["numbers"] == {"seen": [None, 1]}
    assert numbers["own"] == list(OWN)
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "report.html", "report.json",
    ]  # fmt: skip


def test_baselines_stand_last_whatever_their_order(tmp_path):
    values = dict(sorted(SHOTS.values.items(), reverse=True))
    page, *_ = write(tmp_path, scores=[scored("few_shot", SHOTS.columns, [0.5] * 7, values=values)])
    at = page.rows.index(["%", *SHOTS.columns])
    assert [row[0] for row in page.rows[at + 1 : at + 4]] == list(OWN)
    kinds = [row["class"] for row in page.all("tr")][-len(NAMES) :]
    assert kinds == ["", "best", "", *["baseline"] * 4]


@pytest.mark.parametrize(
    ("name", "column", "expected"),
    [
        ("few_shot_paper", "all labels", "ridge regression, all labels"),
        ("few_shot", "1 label per class", "ridge regression, 1 label per class"),
        ("few_shot_big_vision", "25 shot", "ridge regression, 25 labels per class, big_vision protocol"),
        ("few_shotall", "", "ridge regression, all labels"),
        ("few_shot5", "", "ridge regression, 5 labels per class"),
        ("knn", "20-NN mAP", "20-NN mAP"),
        ("knn20_standardized", "", "20-NN, standardised features"),
        ("logistic", "test", "logistic regression"),
        ("my_probe", "score", "my probe, score"),
    ],
)
def test_a_probe_has_one_title_by_any_of_its_names(name, column, expected):
    assert title(name, column) == expected


@pytest.mark.parametrize(
    "probe", [FewShot(shots=[1, 5]), FewShot(shots="all"), Knn(k=[1, 20]), Knn(k=5, standardize=True)]
)
def test_reports_have_the_title_that_the_probe_has_in_training(probe):
    generator = torch.Generator().manual_seed(0)
    features = Features(torch.randn(40, 4, generator=generator), torch.arange(40) % 2, ("a", "b"))
    found = scored(probe.name.replace("20", "").replace("5", ""), list(probe(features, features).scores), [0.5] * 7)
    assert found.title == probe.title


def test_a_single_reading_was_not_chosen(tmp_path):
    page, *_ = write(tmp_path, own=OWN[1:2])
    assert "Chosen" not in page.text


def concluded(*probes: Scores, side: int = 64) -> list[str]:
    """Of images with so many pixels a side, which the encoder sees with 64."""
    return conclude(probes, SideBySide(probes, GROUPS), side=side, size=64)


ADVICE = concluded(PROBE)[-1]  # 1 point below pixels


def test_a_summary_compares_with_the_higher_baseline():
    unknown = scored("knn", ["1-NN"], [0.5, math.nan, *[0.1] * 5])
    rows = report.summary([*BOTH, unknown])
    dash = "\N{EN DASH}"
    assert rows[1] == [SHOTS.title, "70.0", dash, "30.0", "+40.0", OWN[1], "random_" + OWN[2]]
    assert rows[2][-1] == "pixels"
    assert rows[3][1:5] == [dash, dash, "10.0", dash]
    assert concluded(SHOTS, unknown) == concluded(SHOTS)


def answered(name: str, encoder: int, random: int, pixels: int) -> Scores:
    """A probe of 400 images, of which each encoder classifies so many tenths correctly."""
    tenths = torch.arange(400) % 10
    counts = {"": encoder, RANDOM: random, PIXELS: pixels}
    per_image = {
        name: ((tenths + 7 * place) % 10 < count).double() for place, (name, count) in enumerate(counts.items())
    }
    shares = [values.mean().item() for values in per_image.values()]
    return scored(name, ["1-NN"], [0.1, shares[0], 0.1, 0.1, 0.1, *shares[1:]], per_image=per_image)


CLEAR, NEAR, LOST, RANDOM_WINS = (
    answered("clear", 7, 3, 2), answered("near", 5, 5, 2), answered("lost", 4, 2, 8), answered("worse", 4, 8, 2),
)  # fmt: skip


def test_a_significant_gain_needs_no_advice():
    (sentence,) = concluded(CLEAR)
    assert "significantly better than random weights and pixels" in sentence
    assert CLEAR.title + " +40.0" in sentence  # above the higher baseline
    gain, unclear = concluded(CLEAR, NEAR)
    assert NEAR.title not in gain
    assert unclear.startswith(f"Not significant: {NEAR.title} +0.0")


@pytest.mark.parametrize(
    ("probes", "baseline"),
    [([LOST], PIXELS), ([RANDOM_WINS], RANDOM), ([CLEAR, LOST], PIXELS), ([NEAR, RANDOM_WINS], RANDOM)],
)
def test_a_baseline_that_wins_comes_first(probes, baseline, tmp_path):
    first, *_, last = concluded(*probes)
    assert first.lower().startswith(baseline)
    assert f"{probes[-1].title} \N{MINUS SIGN}40.0" in first
    assert last == ADVICE
    page, numbers, _ = write(tmp_path, scores=probes)
    assert numbers["headline"] == " ".join(concluded(*probes))
    assert numbers["headline"] in page.text


def test_without_a_significant_gain_there_is_advice():
    first, *_, last = concluded(NEAR)
    assert "significantly better" not in first
    assert last == ADVICE
    tries = ("checkpoint=", "recipe.steps", "standard", "finetune with compare=scratch")
    places = [ADVICE.index(words) for words in tries]
    assert places == sorted(places)


def test_larger_images_are_advised_where_they_have_more_detail():
    assert "data.image_size" not in ADVICE
    advice = concluded(PROBE, side=300)[-1]
    assert advice.index("checkpoint=") < advice.index("larger data.image_size") < advice.index("recipe.steps")
    assert re.search(r"\b300\b.*\b64\b", advice)


def test_what_was_not_tested_is_not_significant():
    (sentence,) = concluded(SHOTS)
    assert f"{SHOTS.title} +40.0" in sentence
    assert "significantly" not in sentence
    assert concluded(PROBE, SHOTS)[-1] != ADVICE
    assert "No baseline" in " ".join(conclude([SHOTS], SideBySide([SHOTS], {"mine": [""]}), side=64, size=64))


def test_what_is_not_above_chance_is_no_gain():
    near = scored("knn", ["1-NN"], [0.5, 0.14, *[0.1] * 5], chance=0.1, images=200)
    *_, silent, last = concluded(near)
    assert "1-NN 14.0 %" in silent
    assert "not above chance" in silent
    assert last == ADVICE
    assert f"{near.title} +4.0" not in " ".join(concluded(CLEAR, near))
    assert report.summary([near])[1][1:5] == ["14.0 ± 2.5", "10.0", "10.0", "+4.0"]
    far = scored("knn", ["1-NN"], [0.5, 0.15, *[0.1] * 5], chance=0.1, images=200)
    assert f"{far.title} +5.0" in "".join(concluded(far))
    for figure in (by_layer([far], OWN), by_column([far])):
        assert curves(figure)["chance (most frequent class)"] == pytest.approx(10)


def test_data_and_counts_stand_before_what_was_found(tmp_path):
    facts = {
        "checkpoint": "a/b", "data": "cifar10 in /data", "train_images": 3781, "test_images": 420,
        "measured_on": "validation", "chance": 0.123, "classes": ["a", "b"],
        "copies": {"test_images_in_train": 3, "examples": [{"test": "1.jpg", "train": "2.jpg"}]},
    }  # fmt: skip
    page, *_ = write(tmp_path, facts)
    told = (
        "3,781 training and 420 validation images, 2 classes (chance 12.3 %); data: cifar10 in /data",
        "3 of the validation images stand among the training images too, pixel for pixel: 1.jpg is 2.jpg, …",
    )
    assert report.data(facts) == list(told)
    assert 0 < page.text.index(told[0]) < page.text.index(told[1]) < page.text.index(concluded(*BOTH)[0])
    unlabelled = facts | {"chance": None, "copies": {"test_images_in_train": 0, "examples": []}}
    assert report.data(unlabelled) == ["3,781 training and 420 validation images, no labels; data: cifar10 in /data"]


def test_what_is_not_finite_is_a_dash(tmp_path):
    broken = scored("knn", ["1-NN"], [0.5, math.nan, 0.2, math.nan, math.inf, 0.1, math.nan], best=OWN[0])
    page, numbers, _ = write(tmp_path, scores=[broken])
    assert [OWN[1], "\N{EN DASH}"] in page.rows
    assert numbers["measured"][0]["values"][OWN[1]] == [None]
    assert "1-NN +40.0 percentage points" in numbers["headline"]


def test_no_name_breaks_the_report(tmp_path):
    facts = {"checkpoint": EVIL, "classes": [EVIL, "b"], EVIL: {"a": tmp_path}, "seconds": math.inf, "odd": [{"a": 1}]}
    page, numbers, text = write(tmp_path, facts, figures={EVIL: Plot([Panel("")], (2, 1))})
    assert not page.all("script")
    assert "<script" not in text
    one_line = " ".join(EVIL.encode(errors="backslashreplace").decode().split())
    assert page.text.count(one_line) >= 4
    assert page.all("img")[0]["alt"] == one_line.replace("_", " ")
    assert numbers["facts"]["classes"][0] == EVIL
    assert numbers["facts"]["seconds"] is None


def test_the_page_needs_nothing_from_elsewhere(tmp_path):
    figures = {"by_layer": by_layer(BOTH, OWN), "anything": Plot([Panel("")], (2, 1))}
    page, _, text = write(tmp_path, figures=figures)
    assert {tag for tag, _ in page.tags}.isdisjoint(
        {"script", "link", "iframe", "object", "embed", "base", "form", "a"}
    )
    assert not re.search(r"https?:|//|@import|url\(", re.sub(r"base64,[^\"]+", "", text))
    assert "default-src 'none'" in next(
        one["content"] for one in page.all("meta") if one.get("http-equiv") == "Content-Security-Policy"
    )
    sources = [image["src"].removeprefix("data:image/png;base64,") for image in page.all("img")]
    assert [Image.open(io.BytesIO(base64.b64decode(source))).format for source in sources] == ["PNG", "PNG"]
    assert "layer 2 chosen" in page.all("img")[0]["alt"]
    assert (page.all("img")[1]["width"], page.all("img")[1]["height"]) == ("200", "100")


def test_a_report_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    write(tmp_path, {"checkpoint": "first"})
    before = (tmp_path / "report.html").read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="cannot be written"):
        write(tmp_path, {"checkpoint": "second"})
    assert (tmp_path / "report.html").read_bytes() == before


def test_layers_are_shown_next_to_their_baselines():
    figure = by_layer(BOTH, OWN)
    drawn = curves(replace(figure, panels=figure.panels[:1]))
    assert drawn["encoder"] == pytest.approx([50, 70, 65])
    assert drawn["random weights"] == pytest.approx([10, 20, 30])
    assert drawn["pixels"] == pytest.approx(25)
    assert [list(line.x) for line in figure.panels[0].lines] == [[1, 2, 3]] * 2
    alone = scored("knn", ["1-NN"], [0.5] * 7, values={OWN[2]: (0.5,)}, best=OWN[2])
    for figure in (by_layer([alone], OWN[2:]), by_column([alone])):
        assert [(line.label, list(line.y)) for line in figure.panels[0].lines if line.x] == [("encoder", [50])]


def test_nothing_is_selected_by_test_labels():
    for place, found in enumerate(BOTH):  # layer 2 was chosen; on the test images of the second, layer 3 is better
        title = by_layer(BOTH, OWN).panels[place].title
        assert found.title in title
        assert "layer 2 chosen" in title
        assert ("+5.0" if place == 0 else "-4.0") in title
    weak = replace(SHOTS, chosen=SHOTS.chosen | {RANDOM: f"random_{OWN[0]}"})  # 10 %, where layer 3 has 30 %
    assert report.summary([weak])[1][3:5] == ["25.0", "+45.0"]
    assert report.summary([weak])[1][-1] == PIXELS


def test_columns_that_count_are_joined_with_their_deviations():
    panel, single = by_column(BOTH).panels
    encoder, random, _ = panel.lines
    assert encoder.y == pytest.approx([67.54, 68.77, 70])
    assert encoder.around == pytest.approx([1.56] * 3)
    assert random.y == pytest.approx([17.54, 18.77, 20])
    assert [line.label for line in panel.lines] == ["encoder", "random weights", "pixels"]
    assert [len(line.x) for line in single.lines] == [1] * 9
    mixed = scored("retrieval", ["recall@1", "recall@10", "precision@10", "mAP"], [0.5] * 7)
    (panel,) = by_column([mixed]).panels
    assert [len(line.x) for line in panel.lines] == [2, 1, 1] * 3
    assert list(panel.xticks.values()) == list(mixed.columns)
