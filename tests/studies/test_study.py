"""A comparison reports the results of its runs; the choice of a learning rate never uses test images."""

import json
import re
import statistics

import numpy as np
import pytest
from PIL import Image

from ssvit.studies import comparison

BOTH = {"pretrained": {}, "scratch": {"checkpoint": "scratch"}}


class Runs:
    """Simulated runs that record their arguments."""

    def __init__(self, score):
        self.asked, self.score = [], score

    def __call__(self, name, changes):
        self.asked.append((name, dict(changes)))
        final = self.score(name, changes)
        return [{"step": 0, "test/accuracy": 0.1}, {"step": 3, "train/loss": 1.0}, {"step": 4, "test/accuracy": final}]


class Watched(Runs):
    """Runs with validation images for the curve, and test images, on which accuracy is 0.05 less, for the figure."""

    def __call__(self, name, changes):
        *_, last = super().__call__(name, changes)
        others = {"validation/accuracy_constant": 0.3, "validation/images": 50}
        rows = [{"step": step, "validation/accuracy": value, **others} for step, value in ((0, 0.1), (2, 0.2))]
        final = last["test/accuracy"]
        last |= {"validation/accuracy": final, "test/accuracy": final - 0.05, **others}
        return [*rows, last | {"test/accuracy_constant": 0.25, "test/images": 400}]


def test_a_comparison_is_mean_and_deviation_over_its_runs(tmp_path):
    scores = {("pretrained", 5): 0.6, ("pretrained", 6): 0.7, ("scratch", 5): 0.41, ("scratch", 6): 0.43}
    runs = Runs(lambda name, changes: scores[name.split("_")[0], changes["recipe.seed"]])
    comparison.compare_sides(runs, BOTH, seed=5, seeds=2, folder=tmp_path)
    # They differ only in the initial weights.
    for name, changes in runs.asked:
        own = {"recipe.seed": int(name[-1])}
        assert changes == (own | {"checkpoint": "scratch"} if name.startswith("scratch") else own)
    report = json.loads((tmp_path / "comparison.json").read_text())
    for side in ("pretrained", "scratch"):
        values = [scores[side, seed] for seed in (5, 6)]
        assert report["accuracy"][side]["mean"] == pytest.approx(sum(values) / 2)
        assert report["accuracy"][side]["deviation"] == pytest.approx(statistics.stdev(values))
        assert report["curves"][side] == {
            "step": [0, 4],
            "mean": [pytest.approx(0.1), pytest.approx(sum(values) / 2)],
            "deviation": [pytest.approx(0), pytest.approx(statistics.stdev(values))],
        }
    assert report["gain"] == pytest.approx(0.23)
    assert report["verdict"]  # Student's t of so few seeds: Welch's standard error 5.1 points, 1.08 degrees of freedom
    with Image.open(tmp_path / "comparison.png") as image:
        assert min(image.size) > 300


def test_curves_are_of_the_validation_images_and_the_figure_is_of_the_test_images(tmp_path):
    comparison.compare_sides(
        Watched(lambda name, changes: 0.8 if "pretrained" in name else 0.6), BOTH, seed=0, seeds=2, folder=tmp_path
    )
    report = json.loads((tmp_path / "comparison.json").read_text())
    assert report["curves"]["scratch"]["mean"] == pytest.approx([0.1, 0.2, 0.6])
    assert report["accuracy"]["scratch"]["mean"] == pytest.approx(0.55)
    assert {key: report[key] for key in ("measured_on", "images", "chance", "verdict")} == {
        "measured_on": "test", "images": 400, "chance": 0.25, "verdict": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("pretrained", "scratch", "seeds", "words"),
    [
        ([0.3] * 2, [0.3] * 2, 2, "chance"),
        ([0.33, 0.34], [0.3] * 2, 2, "chance"),  # 0.25 and two standard errors are 0.293
        ([0.70, 0.80], [0.65, 0.75], 2, "95 %"),
        ([0.70, 0.71], [0.6, 0.61], 2, ""),
        ([0.61] * 3, [0.6] * 3, 3, "± 7.0"),  # 400 images
        ([0.72], [0.7], 1, "95 %"),
        ([0.85], [0.6], 1, ""),
    ],
)
def test_a_gain_that_is_not_significant_is_reported_as_such(tmp_path, capsys, pretrained, scratch, seeds, words):
    scores = {"pretrained": pretrained, "scratch": scratch}
    runs = Watched(lambda name, changes: scores[name.split("_")[0]][changes["recipe.seed"]])
    comparison.compare_sides(runs, BOTH, seed=0, seeds=seeds, folder=tmp_path)
    report = json.loads((tmp_path / "comparison.json").read_text())
    assert report["verdict"] in capsys.readouterr().out
    assert report["error"] > 0
    assert bool(report["verdict"]) == bool(words)
    assert words in report["verdict"]


def test_equal_scores_of_unknown_error_are_neither_a_gain_nor_a_loss():
    words = {}
    for gain in (-0.1, 0, 0.1):
        summary = {"pretrained": {"mean": 0.5 + gain}, "scratch": {"mean": 0.5}}
        line = comparison._conclusion(summary, "mAP", None, "")
        words[gain] = ("raised" in line, "lowered" in line)
    assert words == {-0.1: (False, True), 0: (False, False), 0.1: (True, False)}


def test_training_from_random_weights_has_its_own_recipe(tmp_path):
    sides = comparison.sides({"steps": 40, "lr": 1e-3})
    assert sides == {"pretrained": {}, "scratch": {"checkpoint": "scratch", "recipe.steps": 40, "recipe.lr": 1e-3}}
    runs = Watched(lambda name, changes: {"pretrained": 0.8, "scratch": 0.5}[name.removesuffix("_seed0")])
    comparison.compare_sides(runs, sides, seed=0, seeds=1, folder=tmp_path)
    assert [changes.get("recipe.steps") for _, changes in runs.asked] == [None, 40]
    report = json.loads((tmp_path / "comparison.json").read_text())
    assert report["gain"] == pytest.approx(0.3)
    # Of 0.75 and 0.45 on 400 images, each with a further correct and a further wrong prediction.
    first, second = 301 / 402, 181 / 402
    error = 2 * (first * (1 - first) / 402 + second * (1 - second) / 402) ** 0.5
    assert report["error"] == pytest.approx(error + 0.3 - (first - second))


@pytest.mark.parametrize("seeds", [2, 3])
def test_without_a_true_difference_a_gain_or_loss_is_significant_in_at_most_one_of_20_comparisons(tmp_path, seeds):
    random = np.random.default_rng(0)
    told = 0
    for _ in range(400):
        values = 0.5 + 0.01 * random.standard_normal((2, seeds))
        summary = {name: comparison._spread(side.tolist()) for name, side in zip(BOTH, values, strict=True)}
        score = comparison.FinalScore(1, 0.5, "test", 0.1, 10**6)
        told += comparison._verdict(summary, score, *comparison._error(summary, score)) == ""
    assert told <= 0.05 * 400


def test_runs_of_different_lengths_have_a_curve_over_the_steps_of_all(tmp_path):
    """Runs end at different steps; each has a separate row for the test images."""
    ends = {"pretrained_seed0": 4, "pretrained_seed1": 8, "scratch_seed0": 6, "scratch_seed1": 6}

    def run(name, changes):
        rows = [{"step": step, "validation/accuracy": step / 10} for step in range(0, ends[name] + 1, 2)]
        return [*rows, {"step": ends[name], "test/accuracy": ends[name] / 20}]

    comparison.compare_sides(run, BOTH, seed=0, seeds=2, folder=tmp_path)
    report = json.loads((tmp_path / "comparison.json").read_text())
    curves = {side: (curve["step"], curve["mean"]) for side, curve in report["curves"].items()}
    assert curves == {"pretrained": ([0, 2, 4], [0.0, 0.2, 0.4]), "scratch": ([0, 2, 4, 6], [0.0, 0.2, 0.4, 0.6])}
    assert report["accuracy"]["pretrained"]["values"] == [0.2, 0.4]


def test_a_comparison_of_one_seed_claims_no_deviation(tmp_path, capsys):
    comparison.compare_sides(Runs(lambda name, changes: 0.5), BOTH, seed=0, seeds=1, folder=tmp_path)
    assert "±" not in capsys.readouterr().out


@pytest.mark.parametrize(("scores", "best"), [({0.1: 0.5, 0.01: 0.7, 0.3: 0.6}, 0.01), ({0.1: 0.5, 0.3: 0.5}, 0.1)])
def test_the_choice_is_the_best_on_the_development_split(tmp_path, scores, best):
    # On the test images, other rates would be better, which must not affect the choice.
    runs = Runs(lambda name, changes: scores[changes["recipe.lr"]] if "development" in changes else 0.0)
    assert comparison.choose(runs, learning_rates=list(scores), development=0.2, folder=tmp_path) == best
    *tried, last = runs.asked
    assert {changes["recipe.lr"] for _, changes in tried} == set(scores)
    assert all(changes["development"] == 0.2 for _, changes in tried)
    assert last == ("chosen", {"recipe.lr": best})
    report = json.loads((tmp_path / "sweep.json").read_text())
    assert (report["chosen"], report["test"]) == (best, 0.0)


def test_a_choice_at_chance_is_reported_as_not_significant(tmp_path, capsys):
    options = {"learning_rates": [0.1, 0.2], "development": 0.2, "folder": tmp_path}
    comparison.choose(Watched(lambda name, changes: 0.3), **options)
    told = capsys.readouterr().out
    assert "30.00 %" in told
    assert re.search(r"\brecipe\.lr=0\.1: 25\.00 %", told)
    comparison.choose(Watched(lambda name, changes: 0.9), **options)
    assert "30.00 %" not in capsys.readouterr().out
