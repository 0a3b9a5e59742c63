"""budget=…: the schedule of a run follows from the cost of a step, and its evaluations from their cost."""

import json

import pytest
from command import error_of, tiny_options
from runs import rows

from ssvit.training import budget
from ssvit.training.estimate import Estimate
from ssvit.training.options import Pretrain
from ssvit.training.session import Session

SCHEDULE = ("recipe.steps", "recipe.warmup", "recipe.save_every", "recipe.evaluate_every", "recipe.log_every")
FREE = tiny_options(*SCHEDULE)
SMALL = [*FREE, "probes=[]", "evaluator=[]", "name=run"]


@pytest.fixture
def costs(monkeypatch):
    """A function that sets the measured cost of a step; evaluations are free."""

    def set_to(**values):
        monkeypatch.setattr(Session, "estimate", lambda *_: Estimate(steps=1, memory={}, **values))

    return set_to


def trained(folder):
    return max(rows(folder, "train/loss"))


def test_the_number_of_steps_fits_the_budget_after_the_preparation(call, costs, tmp_path):
    costs(step=0.5, preparation=2.0)
    folder = call("pretrain", *SMALL, "budget=7s")
    assert trained(folder) == (7 - 2) / 0.5
    assert "recipe.warmup=10: " in str(error_of(call, "pretrain", *SMALL, "budget=7s", "recipe.warmup=10", "name=long"))


def test_a_continued_run_keeps_its_number_of_steps(call, costs, tmp_path):
    options = (*SMALL, "recipe.save_every=3")
    costs(step=1.0)
    folder = call("pretrain", *options, "budget=8s")
    newest = max(folder.glob("step_*"))
    costs(step=0.1)  # another machine
    for part in newest.iterdir():
        part.unlink()
    newest.rmdir()
    call("pretrain", *options, "budget=8")  # the same time, written differently
    assert trained(folder) == 8
    assert "budget" in str(error_of(call, "pretrain", *options, "budget=9s"))


def test_fine_tuning_within_a_budget(call, costs, outputs, tmp_path):
    costs(step=0.25)
    few = ["recipe.batch_size=8", "figures=none", "check_frozen=false"]
    folder = call("finetune", f"checkpoint={outputs / 'masked_patch_shapes'}", "budget=2s", *few)
    assert trained(folder) == 8


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pretrain", ["recipe.steps=3"]),
        ("pretrain", ["budget=soon"]),
        ("finetune", ["recipe.steps=3", "checkpoint=scratch", "data=shapes", "encoder=mini"]),
        ("evaluate", ["train_images=20"]),
    ],
)
def test_what_contradicts_a_budget_is_one_line(call, outputs, name, options):
    usual = ["checkpoint=outputs/masked_patch_shapes"] if name == "evaluate" else []
    budgets = [] if "budget=soon" in options else ["budget=9s"]
    assert "budget" in str(error_of(call, name, *usual, *options, *budgets))


@pytest.mark.parametrize("seconds", [5, 30, 90, 600, 6000])
def test_evaluations_take_at_most_a_tenth_of_the_budget_if_two_can(seconds):
    options = Pretrain.model_construct(budget=float(seconds), evaluators={}, probing=Pretrain().probing)
    result = budget.chosen(options, Estimate(steps=1, step=0.1, evaluation=4.0, final=1.0, memory={}))
    steps, every = result["recipe.steps"], result["recipe.evaluate_every"]
    assert steps == round(seconds / 0.1)
    count = 1 + -(-steps // every)
    images = result.get("probing.train_images", 2000) / 2000
    spent = 1 + 4 * count * images
    assert spent <= 0.1 * seconds or (count == 2 and images == 0.1)
    assert count <= 1 + budget.EVALUATIONS
    # One more evaluation would not fit.
    assert count == 1 + budget.EVALUATIONS or images < 1 or spent + 4 > 0.1 * seconds * 0.9 - 4


def test_a_budget_reduces_the_images_of_an_evaluation(call, outputs, tmp_path, monkeypatch):
    from ssvit.evaluation.report import cost

    monkeypatch.setattr(cost, "estimate", lambda *_: cost.Cost(passes=60.0, fits=40.0, rest=1.0, clock=None))
    options = ["checkpoint=outputs/masked_patch_shapes", "probes=[knn]", "probes.knn.k=1", "figures=none", "cache=null"]
    counts = []
    for number, text in enumerate(("51s", "200s")):
        folder = call("evaluate", *options, f"budget={text}", f"output={tmp_path / str(number)}")
        counts.append(json.loads((folder / "report.json").read_text())["metadata"]["train_images"])
    assert counts[0] == pytest.approx(counts[1] / 2, rel=0.1)
    options[1:3] = "probes=[knn]", "probes.knn.k=40"
    assert "budget=" in str(error_of(call, "evaluate", *options, "budget=2s"))
