"""An encoder beside others on the same images: intervals, paired tests, and whether the test images suffice."""

import json

import numpy as np
import pytest
import torch
from command import TINY
from composing import composed, untrained

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.cli import evaluate
from ssvit.evaluation.baselines import OWN, RANDOM
from ssvit.evaluation.report import against, side_by_side
from ssvit.evaluation.report.figures import side_by_side as plotted
from ssvit.evaluation.report.options import Evaluate
from ssvit.evaluation.report.scores import Scores
from ssvit.evaluation.report.side_by_side import SideBySide
from ssvit.options import OptionError

FEW = (
    "probe@probes=[few_shot_paper,knn]", "probes.few_shot_paper.l2=[1,1024]", "probes.knn.k=[3]",
    "fabric.accelerator=cpu",
)  # fmt: skip


def answers(rates, images, seed=0):
    """Whether some classifiers are right; all find the same images hard."""
    easy = np.random.default_rng(seed).random(images)
    return np.stack([(easy < rate).astype(float) for rate in rates])


def scores(values, probe="few_shot_paper", column="all labels", chance=0.1):
    """values: of each encoder, (m,)."""
    per_image = {name: torch.from_numpy(of) for name, of in values.items()}
    return Scores(
        probe=probe, columns=(column,), values={name: (of.mean(),) for name, of in values.items()}, deviations={},
        best="x", chosen_by="", options={}, numbers={}, chance=chance, chosen=dict.fromkeys(values, "layer1"),
        per_image=per_image,
    )  # fmt: skip


def test_a_sentence_says_whether_it_helped_and_whether_the_images_suffice():
    own, near, far, worse = answers((0.52, 0.515, 0.4, 0.6), 1000)
    values = {OWN: own, RANDOM: far, "near": near[::-1].copy(), "worse": worse}
    groups = {"mine": [OWN], RANDOM: [RANDOM], "near": ["near"], "worse": ["worse"]}
    compared = SideBySide([scores(values), scores(values, "knn", "1-NN")], groups)
    helped, unknown, harmed = compared.sentences()
    gain = 100 * (own.mean() - far.mean())
    assert helped.startswith(
        "Against random weights, by ridge regression, all labels: pre-training helped, "
        f"+{gain:.1f} percentage points (95 % interval +"
    )
    for sentence in (helped, harmed):  # a minimum detectable difference contradicts a smaller one that is significant
        assert "test images" not in sentence
    assert helped.endswith(f"Also better by 1-NN +{gain:.1f}.")
    assert "no difference can be told" in unknown
    standing = next(one for one in compared.standings if one.encoder == "near")
    count = side_by_side.rounded(standing.difference.needed)
    assert count > 1000
    assert "The test set is too small to tell: 1,000 test images show differences of" in unknown
    assert f"about {count:,} images like these would show this one. Not told by 1-NN" in unknown
    assert "Against worse, by ridge regression, all labels: worse, \N{MINUS SIGN}" in harmed
    level = np.roll(own, 7)  # right on as many images, others
    (zero,) = SideBySide([scores({OWN: own, "level": level})], {"mine": [OWN], "level": ["level"]}).sentences()
    assert "no difference can be told, +0.0 percentage points" in zero
    assert ". The measured difference is 0; 1,000 test images show differences of" in zero
    assert "too small" not in zero
    rows = side_by_side.table(compared.standings)
    assert len(rows) == 1 + 2 * 4
    assert rows[1][:3] == ["ridge regression, all labels", "mine", f"{100 * own.mean():.1f}"]
    assert rows[1][4:] == ["\N{EN DASH}"] * 5
    dots = plotted(compared).probes["ridge regression, all labels"]
    assert [(dot.name, dot.interval) for dot in dots] == [(one.encoder, one.interval) for one in compared.standings[:4]]
    assert plotted(compared).png()


def test_seeds_that_disagree_tell_nothing():
    ours, theirs = answers((0.7, 0.5), 2000), answers((0.5, 0.49), 2000)
    values = {OWN: ours[0], "b": ours[1], "c": theirs[0], "d": theirs[1]}
    compared = SideBySide([scores(values)], {"mine": [OWN, "b"], "theirs": ["c", "d"]})
    own, other = compared.standings
    assert own.values == pytest.approx((ours[0].mean(), ours[1].mean()))
    assert own.value == pytest.approx(ours.mean())
    assert (other.difference.images.sign, other.difference.sign) == (1, 0)
    assert other.difference.p is None
    (sentence,) = compared.sentences()
    assert "the seeds differ too much" in sentence


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What three runs of a tiny model leave, without their training: two seeds of one configuration, and another."""
    folder = tmp_path_factory.mktemp("outputs")
    for name, seed, width in (("mae_seed0", 0, 16), ("mae_seed1", 1, 16), ("other", 0, 24)):
        options = [*TINY, f"name={name}", f"recipe.seed={seed}", f"encoder.width={width}"]
        untrained(folder / name, *options, seed=seed + width)
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
    others = f"against=[{outputs}/other,{foreign},{outputs}/mae_seed1]"
    found = measured(outputs, outputs / "mae_seed0", others)
    page = (outputs / "report" / "report.html").read_text()
    alone = {
        "": measured(outputs, outputs / "mae_seed0"),
        "other ": measured(outputs, outputs / "other"),
    }
    for place, one in enumerate(found["measured"]):
        for prefix, report in alone.items():
            values = report["measured"][place]["values"]
            own = {prefix + name: values[name] for name in report["own"]}
            assert own.items() <= one["values"].items()
        assert [name for name in one["values"] if name.startswith("public ")] == [
            "public layer1_class_token", "public layer2_class_token",
        ]  # fmt: skip
    assert found["side_by_side"]["entries"] == {
        "mae": ["", "mae_seed1"], "random weights": ["random weights"], "pixels": ["pixels"], "other": ["other"],
        "public": ["public"],
    }  # fmt: skip
    assert found["facts"]["against"]["public"]["image_size"] == [32, 32]
    told = capsys.readouterr().out
    assert "public sees the images in 32x32 pixels; the checkpoint sees them in 16x16" in told
    assert found["headline"] in told.replace("\n", " ")
    assert "public" not in found["headline"]  # which compares with the baselines alone
    for sentence in found["side_by_side"]["sentences"]:
        assert sentence in told
    assert page.count("<h2>Side by side</h2>") == 1
    first = found["side_by_side"]["standings"][0]
    assert (first["encoder"], len(first["values"]), first["difference"]) == ("mae", 2, None)
    assert all(one["difference"]["seeds"] for one in found["side_by_side"]["standings"] if one["encoder"] == "other")


def test_images_of_another_size_are_asked_for_in_the_entry(outputs, foreign):
    found = measured(outputs, outputs / "mae_seed0", f"against=[{{path:{foreign},image_size:16}}]")
    alone = measured(
        outputs, foreign, "data=synthetic", "data.images=64", "data.held_out_images=32", "data.image_size=16"
    )
    for one, own in zip(found["measured"], alone["measured"], strict=True):
        assert {f"public {name}": own["values"][name] for name in alone["own"]}.items() <= one["values"].items()


PROBES = {"knn": {"_target_": "ssvit.evaluation.probes.knn.Knn"}}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("run", "against=run: must be a list of runs and files of weights"),
        (["OUT/none"], "against=.*none: no such folder"),
        (["OUT/mae_seed0"], "against=.*mae_seed0: stands there twice, or is the checkpoint itself"),
        (["OUT/other", "OUT/other"], "against=.*other: stands there twice"),
        (
            [{"path": "OUT/other", "size": 3}],
            "against.size=3: must be a path, or {path: …} with other options of path, ",
        ),
        ([{"image_size": 3}], "against.path=null: must be a path"),
        ([{"path": "OUT/other", "image_size": 7}], "against.patch_size=4: must divide the image's height of 7"),
    ],
)
def test_a_wrong_entry_is_refused(outputs, entries, message):
    def placed(entry):
        if isinstance(entry, str):
            return entry.replace("OUT", str(outputs))
        return {name: placed(value) if isinstance(value, str) else value for name, value in entry.items()}

    given = entries if isinstance(entries, str) else [placed(entry) for entry in entries]
    with pytest.raises(OptionError, match=f"^{message}"):
        against.others(Evaluate(against=given, probes=PROBES), Checkpoint.open(outputs / "mae_seed0"))


def test_a_layer_that_another_lacks_is_refused(outputs):
    options = Evaluate(against=[str(outputs / "other")], features={"layer": 3}, probes=PROBES)
    with pytest.raises(OptionError, match=r"^features\.layer=3: .*; that is of other$"):
        against.others(options, Checkpoint.open(outputs / "mae_seed0"))
