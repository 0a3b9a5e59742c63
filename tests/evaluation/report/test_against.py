"""Comparison of encoders on the same images: intervals, paired tests and minimum detectable differences."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from command import TINY, tiny_options
from composing import composed, untrained
from images import put_set

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.cli import evaluate
from ssvit.data import fingerprints
from ssvit.data.sources.decode import load
from ssvit.data.sources.decode_options import PixelFormat
from ssvit.errors import OptionError
from ssvit.evaluation.baselines import OWN, PIXELS, RANDOM
from ssvit.evaluation.report import against, comparison
from ssvit.evaluation.report.figures import side_by_side
from ssvit.evaluation.report.options import Evaluate
from ssvit.evaluation.report.scores import Scores
from ssvit.evaluation.statistics import bootstrap, detectable

FEW = (
    "probe@probes=[ridge,knn]", "probes.ridge.l2=[1,1024]", "probes.knn.k=[3]",
    "launch.accelerator=cpu", "figures=none",
)  # fmt: skip


def answers(rates, images, seed=0):
    """Return whether classifiers are correct on each image; the same images are difficult for all."""
    easy = np.random.default_rng(seed).random(images)
    return np.stack([(easy < rate).astype(float) for rate in rates])


def scores(values, probe="ridge", column="all labels", chance=0.1):
    """values: of each encoder, (m,)."""
    per_image = {name: torch.from_numpy(of) for name, of in values.items()}
    return Scores(
        probe=probe, columns=(column,), values={name: (of.mean(),) for name, of in values.items()}, deviations={},
        best="x", chosen_by="", options={}, numbers={}, chance=chance, chosen={name: name for name in values},
        per_image=per_image,
    )  # fmt: skip


CLEAR, NEAR, LOST, HARMED = (
    dict(zip((OWN, RANDOM, PIXELS), answers(rates, 400), strict=True))
    for rates in ((0.7, 0.3, 0.2), (0.5, 0.5, 0.2), (0.4, 0.2, 0.8), (0.4, 0.8, 0.2))
)


def test_a_table_has_each_difference_with_its_interval():
    own, near, far = answers((0.52, 0.515, 0.4), 1000)
    one = replace(scores({OWN: own, RANDOM: far, "near": near[::-1].copy()}), balanced={OWN: 0.456, RANDOM: 0.2})
    untested = replace(scores({OWN: own, RANDOM: far, "near": near}, "mine"), per_image={})
    standings = comparison.compare_encoders([one, untested], "run")
    assert [standing.encoder for standing in standings] == ["run", RANDOM, "near"]
    rows = comparison.comparison_table([one, untested], standings)
    assert [len(row) for row in rows] == [5 + 2 + 1] * 3
    title, score, interval, chance, balanced, random, other, features = rows[1]
    assert (title, score, chance, features) == (one.title, f"{100 * own.mean():.1f}", "10.0", "x")
    assert (balanced, rows[2][4]) == ("45.6", "\N{EN DASH}")
    low, high = bootstrap(own[None], 0, 1)[0]
    assert interval == f"{100 * low:.1f} to {100 * high:.1f}"
    gain, (low, high) = own.mean() - far.mean(), bootstrap((own - far)[None], -1, 1)[0]
    assert random == f"+{100 * gain:.1f} (+{100 * low:.1f} to +{100 * high:.1f})*"
    assert other.endswith(f", detectable {100 * detectable(own - near[::-1]):.1f}")
    assert [*rows[2][1:4], *rows[2][5:7]] == [score, "\N{EN DASH}", chance, f"+{100 * gain:.1f}", "+0.5"]
    dots = side_by_side(standings).probes[one.title]
    assert [(dot.name, dot.interval) for dot in dots] == [(row.encoder, row.interval) for row in standings]
    assert side_by_side(standings).png()


def test_the_accuracies_have_a_row_for_each_encoder_and_balanced_ones_if_they_differ():
    own, other = answers((0.5, 0.25), 100)
    ridge, knn = (scores({OWN: own, PIXELS: other}, *of) for of in (("ridge", ""), ("knn", "3-NN")))
    table = comparison.accuracy_table(comparison.accuracies([ridge, knn], "run"), "100 test images")
    first, second = (f"{100 * values.mean():.1f}" for values in (own, other))
    assert table == [
        ["% of 100 test images", ridge.title, "3-NN"], ["run", first, first], [PIXELS, second, second],
    ]  # fmt: skip
    for balanced, columns in ((own.mean() + 0.005, 2), (own.mean() + 0.02, 4)):
        known = replace(ridge, balanced={OWN: balanced})
        heads, of_run, of_pixels = comparison.accuracy_table(comparison.accuracies([known, knn], "run"), "images")
        assert len(heads) == len(of_run) == len(of_pixels) == 1 + columns
        if columns == 4:
            assert of_run[1:] == [first, f"{100 * balanced:.1f}", first, "\N{EN DASH}"]


@pytest.mark.parametrize(
    ("values", "verdicts", "is_advised"),
    [
        ([CLEAR], [["significantly better"], ["significantly better"]], False),
        ([NEAR], [["not significantly"], ["significantly better"]], True),
        ([CLEAR, NEAR], [["significantly better", "not significantly"], ["significantly better"]], False),
        ([CLEAR, LOST], [["significantly better"], ["significantly better", "significantly worse"]], True),
        ([HARMED], [["significantly worse"], ["significantly better"]], True),
    ],
)
def test_the_conclusion_follows_the_significance_tests(values, verdicts, is_advised):
    probes = [scores(of_probe, f"probe{number}") for number, of_probe in enumerate(values)]
    sentences = comparison.conclude(probes, comparison.compare_encoders(probes, "run"), advice="more steps")
    advice = sentences[2:]
    for sentence, words, name in zip(sentences, verdicts, (RANDOM, PIXELS), strict=False):
        assert name in sentence
        assert all(word in sentence for word in words)
        assert (("significantly worse" in sentence), ("not significantly" in sentence)) == (
            "significantly worse" in words, "not significantly" in words,
        )  # fmt: skip
    assert bool(advice) == is_advised


def test_features_at_chance_are_no_gain_and_baselines_may_be_missing():
    weak = replace(scores(CLEAR), chance=0.69, images=400, best=OWN)
    *_, at_chance, advice = comparison.conclude([weak], comparison.compare_encoders([weak], "run"), None, "more steps")
    assert weak.title in at_chance
    assert advice == "more steps"
    alone = scores({OWN: CLEAR[OWN]})
    (sentence,) = comparison.conclude([alone], comparison.compare_encoders([alone], "run"))
    assert "baselines=false" in sentence


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The folders of two runs of tiny models, without their training."""
    folder = tmp_path_factory.mktemp("outputs")
    for name, width in (("mae", 16), ("other", 24)):
        untrained(folder / name, *TINY, f"name={name}", f"encoder.width={width}", seed=width)
    return folder


@pytest.fixture(scope="module")
def foreign(outputs):
    """A file in timm's layout, of images of 32 pixels."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(5)
    made = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 3, "num_classes": 0}
    path = outputs / "public.pth"
    torch.save(timm.models.VisionTransformer(**made).state_dict(), path)
    return path


def measured(outputs, run, *options):
    options = (f"outputs={outputs}", f"checkpoint={run}", f"output={outputs}/report", *FEW, *options)
    evaluate.run(composed(*options, tool="evaluate").config)
    return json.loads((outputs / "report" / "report.json").read_text())


def test_others_have_the_numbers_that_they_have_alone(outputs, foreign, capsys):
    others = f"against=[{outputs}/other,{foreign}]"
    found = measured(outputs, outputs / "mae", others)
    alone = {"": measured(outputs, outputs / "mae"), "other ": measured(outputs, outputs / "other")}
    for place, one in enumerate(found["measured"]):
        for prefix, report in alone.items():
            values = report["measured"][place]["values"]
            own = {prefix + name: values[name] for name in report["own"]}
            assert own.items() <= one["values"].items()
        assert [name for name in one["values"] if name.startswith("public ")] == [
            "public layer1_class_token", "public layer2_class_token",
        ]  # fmt: skip
    assert found["metadata"]["against"]["public"]["image_size"] == [32, 32]
    assert found["headline"] in capsys.readouterr().out.replace("\n", " ")
    first, *rest = found["standings"]
    assert [row["encoder"] for row in (first, *rest[:4])] == ["mae", RANDOM, PIXELS, "other", "public"]


def test_images_of_another_size_are_asked_for_in_the_entry(outputs, foreign):
    found = measured(outputs, outputs / "mae", f"against=[{{path:{foreign},image_size:16}}]")
    alone = measured(outputs, foreign, "data=shapes", "data.images=64", "data.held_out_images=32", "data.image_size=16")
    for one, own in zip(found["measured"], alone["measured"], strict=True):
        assert {f"public {name}": own["values"][name] for name in alone["own"]}.items() <= one["values"].items()


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    """Runs on one folder of images, of weights that differ, in colour, in grey, and with a range of values."""
    folder = tmp_path_factory.mktemp("formats")
    put_set(folder / "images", 40, (20, 20))
    small = tiny_options("data", "launch", "target")
    images = [f"data={folder}/images", "data.image_size=16"]
    grey = ["data.channels=1", "data.mean=0.4", "data.std=0.2"]
    for name, own in {"colour": [], "grey": grey, "bright": ["data.range=[0,90]"]}.items():
        untrained(folder / name, *small, *images, *own, seed=len(name))
    return folder


def test_each_encoder_has_images_in_its_own_pixel_format(formats):
    names = ("colour", "grey", "bright")
    few = "baselines=false", "duplicates=false"
    alone = {name: measured(formats, formats / name, *few) for name in names}
    for first in names[:2]:
        others = [name for name in names if name != first]
        against = f"against=[{','.join(f'{formats}/{name}' for name in others)}]"
        found = measured(formats, formats / first, against, *few)
        for name in others:
            for probe, own in zip(found["measured"], alone[name]["measured"], strict=True):
                expected = {f"{name} {key}": own["values"][key] for key in alone[name]["own"]}
                assert expected.items() <= probe["values"].items()


def test_images_of_the_pretraining_are_identified_in_the_pixel_format_of_each_run(formats):
    for name, pixels in {"colour": {}, "grey": {"channels": 1}, "bright": {"range": [0, 90]}}.items():
        paths = sorted(map(str, (formats / "images").rglob("*.png")))
        shown = [load(path, PixelFormat(**pixels)) for path in paths[:30]]
        fingerprints._write(formats / name, fingerprints.fingerprints(shown).numpy())
    names = ("colour", "grey", "bright")
    counts = []
    for first in names:
        others = ",".join(str(formats / name) for name in names if name != first)
        options = f"against=[{others}]", "data.held_out=0.5", "baselines=false"
        found = measured(formats, formats / first, *options)["metadata"]["pretraining"]
        counts.append({name: found[name]["identical"] for name in names})
    assert len(set(counts[0].values())) == 1
    assert counts[0]["grey"] > 5
    assert counts[1:] == counts[:1] * 2


def evaluation(outputs, **options):
    encoder = {"_part_": "encoder/checkpoint", "path": str(outputs / "mae")}
    parts = {"encoder": encoder, "data": {"_part_": "data/shapes"}, "probes": {"knn": {"_part_": "probe/knn"}}}
    return Evaluate(**parts, **options)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("run", "against=run: "),
        (["OUT/none"], "against.checkpoint=.*none: "),
        (["OUT/mae"], "against=.*mae: "),
        (["OUT/other", "OUT/other"], "against=.*other: "),
        ([{"path": "OUT/other", "size": 3}], "against.size=3: "),
        ([{"image_size": 3}], "against.path"),
        ([{"path": "OUT/other", "image_size": 7}], "against.image_size=7: .*4"),
    ],
)
def test_a_wrong_entry_is_refused(outputs, entries, message):
    def placed(entry):
        if isinstance(entry, str):
            return entry.replace("OUT", str(outputs))
        return {name: placed(value) if isinstance(value, str) else value for name, value in entry.items()}

    given = entries if isinstance(entries, str) else [placed(entry) for entry in entries]
    with pytest.raises(OptionError, match=f"^{message}"):
        against.others(evaluation(outputs, against=given), Checkpoint.open(outputs / "mae"))


def test_a_layer_that_another_lacks_is_refused(outputs):
    options = evaluation(outputs, against=[str(outputs / "other")], features={"layer": 3})
    with pytest.raises(OptionError, match=r"^features\.layer=3: .*\bother\b"):
        against.others(options, Checkpoint.open(outputs / "mae"))
