"""The report of an evaluation: its page has every number and loads nothing, and no name can break it."""

import base64
import io
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from plots import Page, curves
from sklearn.decomposition import PCA

from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources.memory import Memory
from ssvit.errors import UserError
from ssvit.evaluation.baselines import PIXELS, RANDOM
from ssvit.evaluation.features import FeatureSets
from ssvit.evaluation.report import page as report
from ssvit.evaluation.report.figures import by_layer, components, figures
from ssvit.evaluation.report.scores import Scores, Split
from ssvit.evaluation.titles import title
from ssvit.figures.plot import Panel, Plot

OWN = tuple(f"layer{layer}_patch_mean" for layer in (1, 2, 3))
NAMES = (*OWN, *(f"random_{name}" for name in OWN), "pixels")
METADATA = {
    "checkpoint": "a/b", "data": "cifar10 in /data", "train_images": 3781, "test_images": 420, "image_size": [8, 8],
    "measured_on": "validation", "precision": 32, "chance": 0.123, "chance_balanced": 0.5, "multi_label": False,
    "classes": ["a", "b"], "against": {},
}  # fmt: skip


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


def write(folder, metadata=METADATA, scores=BOTH, own=OWN, figures=None, conclusion=("No gain.",)):
    files = report.write(
        folder, metadata=metadata, scores=scores, feature_sets=own, figures=figures or {},
        tables=[[["probe", "%"], ["x", "5"]]], standings=[], conclusion=conclusion, commands=["ssvit embed"],
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


def test_every_number_is_in_both_files_and_baselines_come_last(tmp_path):
    of_reverse = replace(SHOTS, values=dict(sorted(SHOTS.values.items(), reverse=True)))
    broken = scored("knn", ["1-NN"], [0.5, math.nan, 0.2, math.nan, math.inf, 0.1, math.nan], best=OWN[0])
    page, numbers, _ = write(tmp_path / "new" / "folder", scores=[of_reverse, PROBE, broken])
    for place, found in enumerate(BOTH):
        at = page.rows.index(["%", *found.columns])
        rows = page.rows[at + 1 : at + 1 + len(NAMES)]
        assert rows[:3] == expected(found)[:3]
        assert sorted(rows) == sorted(expected(found))
        classes = [row["class"] for row in page.all("tr")][at + 1 : at + 1 + len(NAMES)]
        assert classes == ["", "best", "", *["baseline"] * 4]
        assert {key: tuple(row) for key, row in numbers["measured"][place]["values"].items()} == found.values
    assert [OWN[1], "\N{EN DASH}"] in page.rows
    assert numbers["measured"][2]["values"][OWN[1]] == [None]
    assert numbers["measured"][0]["numbers"] == {"seen": [None, 1]}
    assert (numbers["own"], numbers["headline"]) == (list(OWN), "No gain.")
    assert ["x", "5"] in page.rows
    assert 0 < page.text.index("3,781 training") < page.text.index("No gain.") < page.text.index("ssvit embed")
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["report.html", "report.json"]


@pytest.mark.parametrize(
    ("name", "column", "expected"),
    [
        ("ridge", "all labels", "ridge regression (all labels)"), ("ridge", "", "ridge regression (all labels)"),
        ("few_shot", "1 label per class", "ridge regression (1 label per class)"),
        ("few_shot_big_vision", "25 labels per class", "ridge regression (25 labels per class; big_vision protocol)"),
        ("few_shot5", "", "ridge regression (5 labels per class)"), ("knn", "20-NN mAP", "20-NN mAP"),
        ("knn20_standardized", "", "20-NN (standardised features)"), ("logistic", "test", "logistic regression"),
        ("my_probe", "score", "my probe (score)"),
    ],
)  # fmt: skip
def test_a_probe_has_one_title_by_any_of_its_names(name, column, expected):
    assert title(name, column) == expected


def test_a_choice_is_stated_if_there_was_one():
    assert "chosen" in report.choice(PROBE, OWN)
    assert "chosen" not in report.choice(PROBE, OWN[1:2])


def test_the_data_are_described():
    (one,), (unlabelled,) = report.data(METADATA), report.data(METADATA | {"chance": None})
    for line in (one, unlabelled):
        assert all(part in line for part in ("3,781", "420", "cifar10 in /data", "precision: 32"))
    assert all(part in one for part in ("2 classes", "12.3 %", "50.0 %"))
    assert "%" not in unlabelled
    (several,) = report.data(METADATA | {"multi_label": True})
    assert "mAP 12.3 %" in several
    near = {"test_images": 3, "without": {"20-NN": 0.5123}, "pairs": []}
    _, copies = report.data(METADATA | {"near_duplicates": near})
    assert copies.startswith("3 ")
    assert "0.7 %" in copies
    assert copies.endswith("20-NN 51.2 %")


def test_the_page_needs_nothing_from_elsewhere(tmp_path):
    figures = {"by_layer": by_layer(BOTH, OWN), "confusion": Plot([Panel("")], (2, 1))}
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


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_report_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, error):
    write(tmp_path)
    before = (tmp_path / "report.html").read_bytes()

    def fail(descriptor):
        raise error

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UserError):
        write(tmp_path, METADATA | {"checkpoint": "second"})
    assert (tmp_path / "report.html").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_layers_are_shown_next_to_their_baselines():
    known = replace(SHOTS, chance=0.1, images=200)
    figure = by_layer((known, PROBE), OWN)
    drawn = curves(replace(figure, panels=figure.panels[:1]))
    assert drawn["encoder"] == pytest.approx([50, 70, 65])
    assert drawn["random weights"] == pytest.approx([10, 20, 30])
    assert drawn["pixels"] == pytest.approx(25)
    assert drawn["chance (ignoring the image)"] == pytest.approx(10)
    assert [list(line.x) for line in figure.panels[0].lines] == [[1, 2, 3]] * 2
    for panel, found, gain in zip(figure.panels, BOTH, ("+5.0", "-4.0"), strict=True):
        # Layer 2 was chosen, although layer 3 is better on the test images of the second probe.
        assert all(part in panel.title for part in (found.title, "layer 2", gain))
    alone = scored("knn", ["1-NN"], [0.5] * 7, values={OWN[2]: (0.5,)}, best=OWN[2])
    (panel,) = by_layer([alone], OWN[2:]).panels
    assert [(line.label, list(line.y)) for line in panel.lines if line.x] == [("encoder", [50])]


def test_colours_are_the_components_of_a_library():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 4, 5, 9, generator=generator) * torch.tensor([9.0, 6, 4, 1, 1, 1, 1, 1, 1])
    found = components(values)
    assert found.shape == (7, 4, 5, 3)
    assert (found.min().item(), found.max().item()) == (0, 1)
    centred = values.double() - values.double().mean(0)
    theirs = PCA(3).fit_transform(centred.flatten(0, 2).numpy())
    inside = ((found > 0) & (found < 1)).flatten(0, 2).numpy()
    for color, expected, kept in zip(found.flatten(0, 2).T.numpy(), theirs.T, inside.T, strict=True):
        assert abs(np.corrcoef(color[kept], expected[kept])[0, 1]) > 0.9999
        assert kept.mean() > 0.97
    # What all images have in common at a place changes nothing.
    shared = 50 * torch.randn(4, 5, 9, generator=generator)
    torch.testing.assert_close(components(values + shared), found, rtol=0, atol=1e-4)


def test_what_does_not_vary_has_no_colour():
    assert torch.equal(components(torch.ones(2, 3, 3, 5)), torch.full((2, 3, 3, 3), 0.5))
    two = components(torch.rand(4, 3, 3, 2))
    assert torch.equal(two[..., 2], torch.full((4, 3, 3), 0.5))


@pytest.mark.parametrize("is_segmented", [False, True])
def test_a_report_shows_patches_with_masks_or_without(is_segmented):
    images = torch.randint(0, 256, (8, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    source = Memory(images, torch.arange(8) % 2, ("a", "b"))
    source.mask_classes = ("soil", "leaf")
    masks = torch.zeros(8, 8, 8, dtype=torch.uint8) if is_segmented else None
    sets = FeatureSets({"layer1_patches": torch.rand(8, 2, 2, 6).half()}, source, torch.arange(8), masks)
    split = Split(("layer1_patches",), sets, sets, CenterCrop(size=8, resize=None).build())
    scores = Scores(
        probe="mine", columns=("test",), values={"layer1_patches": (0.5,)}, deviations={"layer1_patches": (None,)},
        best="layer1_patches", chosen_by="", options={}, numbers={}, predictions=masks,
    )  # fmt: skip
    figure = figures({"mine": split}, [scores], [])["segmentation" if is_segmented else "patches"]
    assert {"image", "components"} <= set(figure.columns)
    assert figure.png()
    assert ("predicted" in figure.columns) == is_segmented
    assert [*figure.legend] == ["soil"] * is_segmented


@pytest.mark.parametrize(("size", "expected"), [((16, 16), 18), ((32, 64), 36), ((8, 16), 9)])
def test_encoders_of_other_image_sizes_see_the_same_part_of_an_image(size, expected):
    view = CenterCrop(size=16, resize=18).for_size(size)
    assert (view.size, view.resize) == (size, expected)
    assert CenterCrop(size=16).for_size(size).resize is None
