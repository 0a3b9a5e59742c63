"""The best checkpoint and the early end, by a scripted metric: kept, found again after a kill, in two processes."""

import json
import math
import shutil

import pytest
import tiny
import torch
from runs import spread

from ssvit.checkpoints import storage
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.manifest import read
from ssvit.evaluation.panels.base import Evaluation, Evaluator
from ssvit.loading import encoder as loading
from ssvit.loading import encoder_options as loading_options
from ssvit.objectives.targets import Classes, Regression
from ssvit.options import OptionError
from ssvit.training import best
from ssvit.training.recipe import Recipe

EACH = {"save_every": 2, "evaluate_every": 2, "best": "scripted/score"}


class Scripted(Evaluator):
    """Gives the next of some values at each call, beginning with step 0."""

    def __init__(self, values):
        self.values = list(values)

    def __call__(self, objective, history=None):
        return Evaluation(metrics={"score": self.values.pop(0)}, lines=["measured"])


class AtEnd(Evaluator):
    at_end = True

    def __call__(self, objective, history=None):
        return Evaluation(metrics={"score": 1.0}, lines=["measured at the end"])


def states(path):
    return storage.load(Checkpoint.open(path))


def recipe(**options):
    return Recipe(**{**tiny.RECIPE, "save_every": 1, **options})


def rows(*values, name="score"):
    return [{"step": step, "train/loss": 1.0} | {f"own/{name}": value} for step, value in enumerate(values)]


def test_the_greatest_value_is_the_best_and_of_a_loss_the_least():
    values = [9.0, 2.0, 5.0, None, 5.0, 4.0]
    assert best.find(rows(*values), recipe(best="own/score")) == best.Best("own/score", 2, 5.0, 3)
    assert best.find(rows(*values, name="loss"), recipe(best="own/loss")) == best.Best("own/loss", 1, 2.0, 4)


LESS = (
    "loss", "loss_masked", "squared_error", "squared_error_masked", "absolute_error", "alignment", "uniformity",
    "feature_cosine", "patch_feature_cosine", "feature_cosine_layer3", "unreadable",
)  # fmt: skip
GREATER = (
    "score", "accuracy", "accuracy_masked", "map", "macro_f1", "rankme", "rankme_layer3", "information", "agreement",
    "top1", "feature_std", "target_std", "entropy_of_mean", "prototypes_chosen",
)  # fmt: skip


@pytest.mark.parametrize(("name", "step"), [*((name, 3) for name in LESS), *((name, 2) for name in GREATER)])
def test_each_metric_is_the_best_in_its_own_direction(name, step):
    found = best.find(rows(9.0, 0.5, 0.9, 0.1, 0.4, name=name), recipe(best=f"own/{name}"))
    assert (found.step, found.value) == (step, {3: 0.1, 2: 0.9}[step])


@pytest.mark.parametrize("target", [Classes, Regression])
@pytest.mark.parametrize("loss", ["l1", "l2"])
def test_a_target_says_itself_in_which_direction_its_score_is_better(target, loss):
    target = target.__new__(target)
    target.loss = loss
    found = best.find(rows(9.0, 0.5, 0.9, name=target.score_name), recipe(best=f"own/{target.score_name}"))
    assert (found.step == 2) == target.higher_is_better


def test_step_0_and_steps_that_are_not_saved_are_not_chosen():
    found = best.find(rows(9.0, 8.0, 5.0, 7.0, 6.0), recipe(best="own/score", save_every=2))
    assert (found.step, found.since) == (4, 0)
    assert best.find(rows(9.0), recipe(best="own/score")) is None


def test_auto_takes_validation_images_then_the_training_images_of_a_probe():
    row = {"step": 3, "probe/knn20": 0.9, "test/accuracy": 0.9, "held_out/loss": 0.1}
    assert best.find([row], recipe()) is None
    row["probe/knn20_choice"] = 0.5
    assert best.find([row], recipe()).metric == "probe/knn20_choice"
    row["probe/few_shot5_choice"] = 0.6  # of a probe that was requested after the first
    assert best.find([row], recipe()).metric == "probe/knn20_choice"
    row["validation/accuracy"] = 0.4
    assert best.find([row], recipe()).metric == "validation/accuracy"
    assert best.find([row], recipe(best=None)) is None


class ScriptedProbe(Scripted):
    """The accuracy of a probe on training images, with its standard error."""

    def __call__(self, objective, history=None):
        return Evaluation(metrics={"knn20_choice": self.values.pop(0), "knn20_choice_error": 0.02})


@pytest.mark.parametrize(("drop", "kept"), [(0.05, False), (0.06, True)])  # 2 sqrt(2) 0.02 = 0.0566
def test_auto_keeps_nothing_where_no_evaluations_differ_significantly(tmp_path, capsys, drop, kept):
    values = [0.1, 0.3, 0.3 + drop, 0.32, 0.32]
    options = EACH | {"best": "auto", "steps": 8}
    tiny.train(tmp_path, evaluators={"probe": ScriptedProbe(values)}, **options)
    assert (tmp_path / "best").exists() == kept
    assert (f"checkpoint={tmp_path / 'best'}" in capsys.readouterr().out) == kept
    if kept:
        assert read(tmp_path / "best")["step"] == 4
    worked, _ = tiny.train(tmp_path, evaluators={"probe": ScriptedProbe([])}, **options)
    assert not worked
    assert (tmp_path / "best").exists() == kept
    # A metric that was named is compared as it is.
    tiny.train(
        tmp_path / "named", evaluators={"probe": ScriptedProbe(values)}, **options | {"best": "probe/knn20_choice"}
    )
    assert read(tmp_path / "named" / "best")["step"] == 4


def test_what_cannot_choose_is_refused():
    for name in ("test/accuracy", "probe/knn20", "probe/few_shot5_last"):
        with pytest.raises(OptionError, match="must not choose by test images"):
            recipe(best=name)
    with pytest.raises(OptionError, match="patience=3: needs a metric"):
        recipe(best=None, patience=3)
    with pytest.raises(OptionError, match=r"recipe\.best=own/f1: is not measured here; there are own/score$"):
        best.find(rows(1.0), recipe(best="own/f1"))


def test_the_best_checkpoint_outlives_the_newer_ones(tmp_path, capsys):
    script = Scripted([0.9, 0.1, 0.5, 0.4, 0.5, 0.3, 0.2])
    tiny.train(tmp_path, evaluators={"scripted": script}, **EACH)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [f"step_{step:08d}" for step in (8, 10, 12)]
    assert read(tmp_path / "best")["step"] == 4
    assert f"step 4 has the best scripted/score, 0.5: checkpoint={tmp_path / 'best'}" in capsys.readouterr().out
    tiny.train(tmp_path / "short", evaluators={"scripted": Scripted([0.0] * 7)}, **EACH | {"steps": 12})
    own = Checkpoint.open(tmp_path / "best")
    assert (own.step, own.name) == (4, tmp_path.name)
    assert loading.load_encoder(loading_options.LoadEncoder(path=tmp_path / "best")).arguments == own.encoder
    assert not list(tmp_path.glob(".best*"))


def test_the_last_step_is_no_news_where_it_is_the_best(tmp_path, capsys):
    tiny.train(tmp_path, evaluators={"scripted": Scripted([0.0, 1.0, 2.0, 3.0])}, **EACH, steps=6)
    assert read(tmp_path / "best")["step"] == 6
    assert "has the best" not in capsys.readouterr().out


def test_a_kill_between_the_checkpoint_and_its_second_name_loses_nothing(tmp_path):
    values = [0.0, 0.1, 0.5, 0.4, 0.3]
    tiny.train(tmp_path, evaluators={"scripted": Scripted(values)}, **EACH, steps=8)
    shutil.rmtree(tmp_path / "best")
    for path in tmp_path.glob("step_*"):
        if path.name > "step_00000004":
            shutil.rmtree(path)
    (tmp_path / ".best.part").mkdir()
    tiny.train(tmp_path, evaluators={"scripted": Scripted(values[3:])}, **EACH, steps=8)
    assert read(tmp_path / "best")["step"] == 4
    assert not list(tmp_path.glob(".best*"))


def test_a_kill_after_the_last_checkpoint_leaves_no_former_best(tmp_path, monkeypatch, capsys):
    class Killed(BaseException):
        pass

    keep = best.keep

    def killed(folder, step):
        if step == 6:
            raise Killed
        keep(folder, step)

    monkeypatch.setattr(best, "keep", killed)
    with pytest.raises(Killed):
        tiny.train(tmp_path, evaluators={"scripted": Scripted([0.0, 1.0, 2.0, 3.0])}, **EACH, steps=6)
    assert read(tmp_path / "best")["step"] == 4
    monkeypatch.setattr(best, "keep", keep)
    worked, _ = tiny.train(tmp_path, evaluators={"scripted": Scripted([])}, **EACH, steps=6)
    assert not worked
    assert read(tmp_path / "best")["step"] == 6


def test_a_run_that_gains_nothing_ends_early_and_is_finished(tmp_path, capsys):
    values = [0.0, 0.2, 0.1, 0.2, 0.1, 0.1, 0.1]
    evaluators = lambda skip=0: {"scripted": Scripted(values[skip:]), "late": AtEnd()}  # noqa: E731
    tiny.train(tmp_path / "early", evaluators=evaluators(), **EACH, patience=2)
    said = capsys.readouterr().out
    assert "ended early (recipe.patience=2): step 2 has the best scripted/score, 0.2" in said
    assert "late: measured at the end" in said
    written = [json.loads(line) for line in (tmp_path / "early" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in written if "late/score" in row] == [6]
    assert read(tmp_path / "early" / "step_00000006")["ended"] is True
    worked, _ = tiny.train(tmp_path / "early", evaluators={}, **EACH, patience=2)
    assert not worked
    # With more patience it goes on, and ends with the bits of a run that never stopped.
    tiny.train(tmp_path / "early", evaluators=evaluators(4), **EACH)
    tiny.train(tmp_path / "whole", evaluators=evaluators(), **EACH)
    found = [states(tmp_path / name / "step_00000012") for name in ("early", "whole")]
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert "ended" not in read(tmp_path / "early" / "step_00000012")


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_two_processes_end_early_together(tmp_path, strategy):
    evaluators = {"scripted": Scripted([0.0, 0.2, math.nan, 0.1, 0.1, 0.1, 0.1])}
    options = {"evaluators": evaluators, **EACH, "patience": 2, "strategy": strategy}
    assert spread(tmp_path, 2, **options) == [0, 0]
    assert read(tmp_path / "best")["step"] == 2
    assert max(tmp_path.glob("step_*")).name == "step_00000006"
    weights = states(tmp_path / "best")["model"]
    assert all(weight.isfinite().all() for weight in weights.values())
