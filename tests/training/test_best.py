"""The best checkpoint, chosen by a scripted metric: kept, restored after a kill, the same in two processes."""

import math
import shutil

import pytest
import tiny
from runs import states, train_in_processes

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.manifest import read_manifest
from ssvit.errors import OptionError
from ssvit.evaluation.evaluators.base import Evaluation, Evaluator
from ssvit.objectives.targets import Classes, Regression
from ssvit.training import best
from ssvit.training.recipe import Recipe

EACH = {"save_every": 2, "evaluate_every": 2, "best": "scripted/score"}


class Scripted(Evaluator):
    """Returns the next of some values at each call, beginning with step 0."""

    def __init__(self, *values, name="score"):
        self.values, self.name = list(values), name

    def __call__(self, objective, history=None):
        return Evaluation(metrics={self.name: self.values.pop(0), f"{self.name}_error": 0.02})


def scripted(folder, *values, steps=12, **options):
    """Train with a scripted metric."""
    return tiny.train(folder, evaluators={"scripted": Scripted(*values)}, **EACH | {"steps": steps, **options})


def recipe(**options):
    return Recipe(**{**tiny.RECIPE, "save_every": 1, **options})


def history(*values, name="score"):
    return [{"step": step, "train/loss": 1.0} | {f"mine/{name}": value} for step, value in enumerate(values)]


LESS = (
    "loss", "loss_masked", "squared_error_masked", Regression("l1").score_name, Regression("l2").score_name,
    "alignment", "uniformity", "feature_cosine", "patch_feature_cosine", "feature_cosine_layer3", "unreadable", "ece",
    "brier",
)  # fmt: skip
GREATER = (
    "score", Classes().score_name, "accuracy_masked", "map", "macro_f1", "rankme", "rankme_layer3", "information",
    "agreement", "top1", "feature_std", "target_std", "entropy_of_mean", "prototypes_chosen",
)  # fmt: skip


@pytest.mark.parametrize(("name", "step"), [*((name, 3) for name in LESS), *((name, 2) for name in GREATER)])
def test_each_metric_has_its_own_direction(name, step):
    found = best.find_best(history(9.0, 0.5, 0.9, 0.1, None, 0.9, name=name), recipe(best=f"mine/{name}"))
    assert (found.step, found.value) == (step, {3: 0.1, 2: 0.9}[step])


def test_step_0_is_not_chosen():
    assert best.find_best(history(9.0, 8.0, 5.0, 7.0, 6.0), recipe(best="mine/score")).step == 1
    assert best.find_best(history(9.0), recipe(best="mine/score")) is None


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_the_best_evaluation_has_a_checkpoint_between_the_regular_ones(tmp_path, strategy):
    evaluators = {"scripted": Scripted(0.9, 0.1, 0.2, 0.5, 0.3, 0.4, 0.2)}  # after steps 0, 1, …, 6
    options = {"evaluators": evaluators, **EACH, "steps": 6, "evaluate_every": 1, "save_every": 4, "strategy": strategy}
    assert train_in_processes(tmp_path, 2, **options) == [0, 0]
    assert read_manifest(tmp_path / "best")["step"] == 3


def test_auto_takes_validation_images_then_the_training_images_of_a_probe():
    row = {"step": 3, "probe/knn20": 0.9, "test/accuracy": 0.9, "held_out/map": 0.1}
    assert best.find_best([row], recipe()) is None
    row["held_out/loss"] = 0.1
    assert best.find_best([row], recipe()).metric == "held_out/loss"
    row["probe/knn20_choice"] = 0.5
    assert best.find_best([row], recipe()).metric == "probe/knn20_choice"
    row["probe/few_shot5_choice"] = 0.6  # of a probe that was requested after the first
    assert best.find_best([row], recipe()).metric == "probe/knn20_choice"
    row["validation/accuracy"] = 0.4
    assert best.find_best([row], recipe()).metric == "validation/accuracy"
    assert best.find_best([row], recipe(best=None)) is None
    segmentation = [{"step": step, "validation/miou": miou} for step, miou in enumerate((0.1, 0.6, 0.5))]
    found = best.find_best(segmentation, recipe())
    assert (found.metric, found.step) == ("validation/miou", 1)


@pytest.mark.parametrize(("gain", "kept"), [(0.05, False), (0.06, True)])  # 2 sqrt(2) 0.02 = 0.0566
def test_auto_keeps_nothing_if_no_evaluations_differ_significantly(tmp_path, gain, kept):
    def train(folder, *values, **options):
        evaluators = {"probe": Scripted(*values, name="knn20_choice")}
        return tiny.train(folder, evaluators=evaluators, **EACH | {"best": "auto", "steps": 8, **options})

    values = [0.1, 0.3, 0.3 + gain, 0.32, 0.32]
    train(tmp_path, *values)
    assert (tmp_path / "best").exists() == kept
    assert not train(tmp_path)[0]
    assert (tmp_path / "best").exists() == kept
    train(tmp_path / "named", *values, best="probe/knn20_choice")  # is compared without regard to its error
    assert read_manifest(tmp_path / "named" / "best")["step"] == 4


def test_a_metric_of_test_images_and_an_unknown_one_are_errors():
    for name in ("test/accuracy", "probe/knn20", "probe/few_shot5_last"):
        with pytest.raises(OptionError, match=f"best={name}"):
            recipe(best=name)
    with pytest.raises(OptionError, match=r"recipe\.best=mine/f1"):
        best.find_best(history(1.0), recipe(best="mine/f1"))


def test_the_best_checkpoint_is_kept_when_newer_ones_are_deleted(tmp_path):
    scripted(tmp_path, 0.9, 0.1, 0.5, 0.4, 0.5, 0.3, 0.2)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [f"step_{step:08d}" for step in (8, 10, 12)]
    kept = Checkpoint.open(tmp_path / "best")
    assert (kept.step, kept.name) == (4, tmp_path.name)
    assert tiny.loaded(tmp_path / "best").arguments == kept.encoder
    assert not list(tmp_path.glob(".best*"))


def test_a_kill_between_the_checkpoint_and_its_copy_loses_nothing(tmp_path):
    scripted(tmp_path, 0.0, 0.1, 0.5, 0.4, 0.3, steps=8)
    shutil.rmtree(tmp_path / "best")
    for path in tmp_path.glob("step_*"):
        if path.name > "step_00000004":
            shutil.rmtree(path)
    (tmp_path / ".best.part").mkdir()
    scripted(tmp_path, 0.4, 0.3, steps=8)
    assert read_manifest(tmp_path / "best")["step"] == 4
    assert not list(tmp_path.glob(".best*"))


def test_a_kill_after_the_last_checkpoint_keeps_no_former_best(tmp_path, monkeypatch):
    keep = best.link_checkpoint

    def killed(folder, step):
        if step == 6:
            raise KeyboardInterrupt
        keep(folder, step)

    monkeypatch.setattr(best, "link_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        scripted(tmp_path, 0.0, 1.0, 2.0, 3.0, steps=6)
    assert read_manifest(tmp_path / "best")["step"] == 4
    monkeypatch.setattr(best, "link_checkpoint", keep)
    assert not scripted(tmp_path, steps=6)[0]
    assert read_manifest(tmp_path / "best")["step"] == 6


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_two_processes_keep_the_same_checkpoint(tmp_path, strategy):
    evaluators = {"scripted": Scripted(0.0, 0.2, math.nan, 0.1)}
    assert train_in_processes(tmp_path, 2, evaluators=evaluators, **EACH, steps=6, strategy=strategy) == [0, 0]
    assert read_manifest(tmp_path / "best")["step"] == 2
    assert all(weight.isfinite().all() for weight in states(tmp_path / "best")["model"].values())
