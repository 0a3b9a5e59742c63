"""Probes during training equal plain loops and the evaluation of the checkpoint, and do not affect training."""

import itertools
import json
import math
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from PIL import Image
from ranks import own_rank, results, start
from runs import final

from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources.files import Files
from ssvit.data.sources.memory import Memory
from ssvit.evaluation import options as features_options
from ssvit.evaluation.evaluators import base, online
from ssvit.evaluation.evaluators.base import Evaluation, Evaluator
from ssvit.evaluation.evaluators.online import Probing, describe, start_of
from ssvit.evaluation.evaluators.options import Probing as ProbingOptions
from ssvit.evaluation.features import Frozen, Pixels, extract
from ssvit.evaluation.probes.base import Probe, Result
from ssvit.evaluation.probes.options import Knn, Ridge
from ssvit.evaluation.processes import all_gather_results
from ssvit.training import loop

CLASSES = ("dark", "pale", "red")
VIEW = CenterCrop(size=16).build()
PROBES = {"knn": Knn(k=4).build(), "few_shot": Ridge(shots=3).build()}


def labelled(count: int, seed: int) -> Memory:
    """Pictures of three classes that overlap, as many of each."""
    labels = torch.arange(count) % 3
    noise = torch.Generator().manual_seed(seed)
    centres = torch.tensor([[70, 70, 70], [110, 110, 110], [120, 70, 80]])[labels]
    images = centres[:, :, None, None] + 60 * torch.randn(count, 3, 1, 1, generator=noise)
    images = images + 30 * torch.randn(count, 3, 16, 16, generator=noise)
    return Memory(images.clamp(0, 255).to(torch.uint8), labels, CLASSES)


TRAIN, TEST = labelled(60, 1), labelled(45, 2)


def probing(probes=PROBES, train=TRAIN, test=TEST, **options) -> Probing:
    numbers = {"every": 4, "train_images": 30, "test_images": 45, "batch_size": 16} | options
    return Probing(ProbingOptions(**numbers), probes=probes, train=train, test=test, transform=VIEW)


def rows(folder: Path, evaluator: str = "probe") -> dict[int, dict]:
    """Return the metrics of an evaluator by step."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    own = {row["step"]: {key: row[key] for key in row if key.startswith(f"{evaluator}/")} for row in found}
    return {step: row for step, row in own.items() if row}


class Recorder(Probe):
    """A probe that stores the features that it receives; later ones are better on test images only."""

    name = "recorder"

    def __init__(self):
        self.asked = []

    def __call__(self, train, test, *, choose=False):
        self.asked.append((train, test))
        return Result(scores={"accuracy": len(self.asked) / 10}, choice=(-len(self.asked),))


def asked(recorder: Recorder, layers: int, pooling: str = "class_token") -> dict[str, list]:
    """Return training and test features of the last evaluation by layer."""
    return {f"layer{n}_{pooling}": found for n, found in enumerate(recorder.asked[-layers:], start=1)}


def test_the_interval_is_the_smallest_that_stays_below_the_share():
    for steps, batch_size, evaluate_every, images in itertools.product(
        (7, 100, 601), (8, 64), (1, 10, 100), (20, 1000)
    ):
        numbers = {"images": images, "steps": steps, "batch_size": batch_size, "evaluate_every": evaluate_every}
        every = base.interval(**numbers)

        def cost(interval, steps=steps, images=images):
            due = [step for step in range(steps + 1) if step % interval == 0 or step == steps]
            return len(due) * images * base.COST

        limit = base.SHARE * steps * batch_size
        affordable = [n for n in range(evaluate_every, steps, evaluate_every) if cost(n) < limit]
        assert every == min(affordable, default=steps)


@torch.no_grad()
def test_the_numbers_are_those_of_the_probes():
    recorder = Recorder()
    model = tiny.model().eval()
    metrics = probing({**PROBES, "recorder": recorder})(model).metrics
    assert (metrics["train_images"], metrics["test_images"]) == (30, 45)
    features = asked(recorder, 2) | {"pixels": recorder.asked[0]}
    for probe in PROBES.values():
        choices = []
        for name, (train, test) in features.items():
            assert torch.bincount(train.labels).tolist() == [10, 10, 10]
            result = probe(train, test, choose=True)
            end = "pixels" if name == "pixels" else name.split("_")[0]
            assert metrics[f"{probe.name}_{end}"] == [*result.scores.values()][-1]
            choices.append(result.choice)
        chosen = metrics[f"{probe.name}_chosen"]
        assert choices[chosen - 1] == max(choices[:2])
        assert metrics[probe.name] == metrics[f"{probe.name}_layer{chosen}"]
        assert metrics[f"{probe.name}_last"] == metrics[f"{probe.name}_layer2"]
    assert (metrics["recorder"], metrics["recorder_chosen"], metrics["recorder_last"]) == (0.2, 1, 0.3)


@torch.no_grad()
def test_what_chooses_is_an_accuracy_with_its_standard_error():
    metrics = probing()(tiny.model().eval()).metrics
    for name, predictions in (("knn4", 30), ("few_shot3", 3 * 9)):  # few_shot: three samples of 3 images of 3 classes
        accuracy = metrics[f"{name}_choice"]
        assert 0 < accuracy < 1
        assert accuracy * predictions == pytest.approx(round(accuracy * predictions))
        assert metrics[f"{name}_choice_error"] == pytest.approx((accuracy * (1 - accuracy) / predictions) ** 0.5)


@pytest.mark.parametrize(("precision", "pooling"), [("32-true", "patch_mean"), ("bf16-mixed", "class_token")])
def test_the_features_are_those_of_the_checkpoint(tmp_path, precision, pooling):
    """Features during training equal the features that commands extract from the checkpoint."""
    recorder, objective = Recorder(), tiny.model(0.2)
    objective.encoder.pooling = pooling
    objective.encoder.options = objective.encoder.options.changed(pooling=pooling)
    probes = {"probe": probing({"recorder": recorder})}
    tiny.train(tmp_path, objective=objective, evaluators=probes, precision=precision)
    encoder = tiny.loaded(tmp_path / "step_00000012")
    function = Frozen(encoder, features_options.Features(layer="all").specs(encoder.arguments), identity="")
    evaluator = probing({})
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        train, test = (extract(function, source, VIEW, batch_size=16) for source in (evaluator._train, evaluator._test))
    for name, sets in asked(recorder, 2, pooling).items():
        for found, expected in zip(sets, (train[name], test[name]), strict=True):
            assert torch.equal(found.values, expected.values)
            assert torch.equal(found.labels, expected.labels)
    pixels = extract(Pixels(), evaluator._test, VIEW).values["pixels"]
    assert torch.equal(recorder.asked[0][1].values, pixels)


def test_training_does_not_notice_and_a_run_goes_on_with_its_history(tmp_path, capsys):
    class Other(Evaluator):
        def __call__(self, objective, history=None):
            return Evaluation(metrics={"number": 1.0})

    tiny.train(tmp_path / "without", dropout=0.2)
    tiny.train(tmp_path / "with", dropout=0.2, evaluators={"probe": probing(), "other": Other()})
    assert final(tmp_path / "with") == final(tmp_path / "without")
    assert list(rows(tmp_path / "with")) == [0, 4, 8, 12]
    assert list(rows(tmp_path / "with", "other")) == [0, 6, 12]
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("probe: ")]
    with Image.open(tmp_path / "with" / "probes.png") as picture:
        assert min(picture.size) > 300

    objective = tiny.interrupted(tiny.model(0.2), 8)
    with pytest.raises(tiny.Interrupted):
        tiny.train(tmp_path / "broken", dropout=0.2, evaluators={"probe": probing()}, objective=objective)
    tiny.train(tmp_path / "broken", dropout=0.2, evaluators={"probe": probing()})
    assert final(tmp_path / "broken") == final(tmp_path / "without")
    assert rows(tmp_path / "broken") == rows(tmp_path / "with")
    assert told == [line for line in capsys.readouterr().out.splitlines() if line.startswith("probe: ")]
    assert len(told) == 2


class Slow(Probe):
    """A user's probe whose call number `at` sends SIGTERM to the process and then takes long."""

    name = "slow"

    def __init__(self, at=-1):
        self.calls, self.at = 0, at

    def __call__(self, train, test, *, choose=False):
        self.calls += 1
        if self.calls == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):
                time.sleep(0.01)
            raise AssertionError("the probe was not interrupted")
        return Result(scores={"slow": train.values.mean().sigmoid().item()})


class Exchanging(Evaluator):
    """Work of several processes, whose step `at` sends SIGTERM to this process and then takes long."""

    every = 4

    def __init__(self, at: int | None):
        self.steps, self.at = 0, at

    def work(self) -> int:
        if self.steps == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):
                time.sleep(0.01)
            raise AssertionError("the evaluation was not interrupted")
        self.steps += 1
        return self.steps

    def __call__(self, objective, history=None):
        for _ in range(3):
            shared = all_gather_results(self.work)  # as batches are
            assert shared == [self.steps] * 2
            self.work()  # as a fit is
        return Evaluation(metrics={"steps": self.steps % 6})


def evaluate_together(folder: Path, strategy: str, at: dict[int, int]) -> None:
    evaluator, status = Exchanging(at.get(own_rank())), 0
    try:
        tiny.train(folder, dropout=0.2, strategy=strategy, evaluators={"probe": evaluator}, log_every=5)
    except loop.Stopped as stopped:
        status = stopped.status
    (folder / f"steps.{own_rank()}").write_text(str(evaluator.steps))
    os._exit(status)


# The second of four evaluations has the steps 6 to 11: those of even numbers are shared.
@pytest.mark.parametrize(
    ("strategy", "at"),
    [
        ("ddp", {1: 8}),
        *(
            pytest.param(*both, marks=pytest.mark.slow)
            for both in (("ddp", {0: 7}), ("ddp", {0: 8, 1: 7}), ("fsdp", {1: 8}))
        ),
    ],
    ids=str,
)
def test_a_signal_interrupts_an_evaluation_of_two_processes_which_end_together(tmp_path, strategy, at):
    """And with the bits of a run that nothing interrupts, whether one process receives the signal or both."""
    assert start(evaluate_together, 2, tmp_path / "whole", strategy, {}) == [0, 0]
    broken = tmp_path / "broken"
    assert start(evaluate_together, 2, broken, strategy, at) == [143, 143]
    for rank in range(2):
        steps = int((broken / f"steps.{rank}").read_text())
        assert steps == at[rank] if rank in at else steps <= min(at.values()) + 2
    assert list(rows(broken)) == [0]
    assert max(path.name for path in broken.glob("step_*")) == "step_00000004"
    assert start(evaluate_together, 2, broken, strategy, {}) == [0, 0]
    assert final(broken) == final(tmp_path / "whole")
    assert rows(broken) == rows(tmp_path / "whole")


# An evaluation is two calls of the probe, and the first one calls it once more, for pixels.
@pytest.mark.parametrize(("step", "call"), [(0, 2), (4, 5), (12, 9)])
def test_a_signal_interrupts_an_evaluation_which_is_repeated_after_the_restart(tmp_path, step, call):
    class Other(Evaluator):
        def __call__(self, objective, history=None):
            return Evaluation(metrics={})

    def train(folder, call=-1):
        evaluators = {"other": Other(), "probe": probing({"slow": Slow(call)})}
        return tiny.train(folder, dropout=0.2, evaluators=evaluators, log_every=5)

    train(tmp_path / "whole")
    broken = tmp_path / "broken"
    with pytest.raises(loop.Stopped) as stopped:
        train(broken, call)
    assert stopped.value.status == 128 + signal.SIGTERM
    assert max((path.name for path in broken.glob("step_*")), default="") == (f"step_{step:08d}" if step else "")
    assert step == 0 or step not in rows(broken)
    assert train(broken)[0] is True
    assert final(broken) == final(tmp_path / "whole")
    assert rows(broken) == rows(tmp_path / "whole")
    assert not list(broken.glob("aside*"))
    assert train(broken)[0] is False


METRICS = {"train_images": 30, "test_images": 45, "chance": 1 / 3, "knn4": 0.52, "knn4_chosen": 1, "knn4_last": 0.5,
           "knn4_pixels": 0.48, "knn4_layer1": 0.52, "knn4_layer2": 0.5}  # fmt: skip
START = {"step": 0, "train_images": 30, "test_images": 45, "knn4": 0.31}


# Two standard errors of a difference from 31 % on 45 images are about 20.8 points; on ten times as many 6.5.
@pytest.mark.parametrize(
    ("changes", "start", "multi_label", "verdicts"),
    [
        ({}, {}, False, ["significantly better", "not significantly different"]),
        ({}, {"knn4": 0.32}, False, ["not significantly different", "not significantly different"]),
        ({"test_images": 450}, {"knn4": 0.32, "test_images": 450}, False,
         ["significantly better", "not significantly different"]),
        ({"knn4_pixels": 0.6}, {"knn4": 0.52}, False, ["not significantly different", "not significantly different"]),
        ({}, {"test_images": 40}, False, ["not significantly different"]),  # a start on other images is no baseline
        ({}, {"knn4": None}, False, ["not significantly different"]),
        ({}, {"step": 4}, False, ["not significantly different"]),
        ({"knn4": 0.47, "knn4_pixels": 0.2}, {}, False, []),  # two standard errors of chance are 14.1 points
        ({"test_images": 450, "knn4_pixels": 0.6}, {"knn4": 0.31, "test_images": 450}, False,
         ["significantly better", "significantly worse"]),
        ({"knn4_pixels": 0.52}, {"knn4": 0.1}, True, ["better", "equal"]),
        ({"knn4_chance": 0.45}, {}, False, []),
        ({}, {"knn4": 0.53}, True, ["worse", "better"]),
    ],
)  # fmt: skip
def test_a_line_compares_a_probe_with_its_baselines(changes, start, multi_label, verdicts):
    metrics = METRICS | changes
    baselines = {"random weights": start_of([START | start], metrics).get("knn4")}
    line = describe(Knn(k=4).build(), metrics, baselines, multi_label=multi_label)
    assert (
        re.findall(r"((?:not )?(?:significantly )?(?:better|worse|different|equal))(?= than| from| to)", line)
        == verdicts
    )


@torch.no_grad()
def test_chance_is_the_most_frequent_class_or_with_few_shots_a_uniform_guess():
    test = TEST.take(torch.tensor([0, 3, 6, 9, 1, 2]))
    metrics = probing(test=test)(tiny.model().eval(), [{"step": 0}]).metrics
    chances = [metrics[name] for name in ("chance", "knn4_chance", "few_shot3_chance")]
    assert chances == pytest.approx([4 / 6, 4 / 6, 1 / 3])


@torch.no_grad()
def test_features_that_are_not_finite_do_not_end_a_run():
    model = tiny.model().eval()
    model.encoder.norm.bias.fill_(math.inf)
    evaluation = probing()(model, [{"step": 0}])
    assert all(math.isnan(evaluation.metrics[name]) for name in ("knn4", "few_shot3"))
    assert evaluation.figures["probes"].png()


@pytest.mark.parametrize(
    ("changes", "probes", "lines"),
    [
        ({}, 2, 0), ({"train_images": 8}, 2, 1), ({"train": TRAIN.take(torch.arange(4))}, 1, 2),
        ({"train": Memory(TRAIN.in_memory)}, 0, 1), ({"test": Memory(TEST.in_memory)}, 0, 1),
    ],
)  # fmt: skip
def test_each_probe_without_sufficient_images_is_reported_in_one_line(changes, probes, lines):
    evaluator = probing(**changes)
    assert (len(evaluator.probes), len(evaluator.remarks)) == (probes, lines)
    assert not any("\n" in line for line in evaluator.remarks)


def test_files_are_read_once_and_unreadable_ones_left_out(tmp_path):
    paths = [str(tmp_path / f"{number:03}.png") for number in range(120)]
    many = labelled(120, 3)
    for path, image in zip(paths, many.in_memory, strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    Path(paths[7]).write_bytes(b"no image")
    evaluator = probing(train=Files(paths, many.labels, CLASSES), train_images=120)
    for path in paths:
        os.remove(path)
    expected = probing(train=many.take(torch.tensor([n for n in range(120) if n != 7])), train_images=119)
    with torch.no_grad():
        model = tiny.model().eval()
        assert evaluator(model).metrics == expected(model).metrics
    assert len(evaluator._train) == 119


def probed() -> dict[str, float]:
    return probing()(tiny.model().eval()).metrics


@torch.no_grad()
def test_two_processes_get_the_numbers_of_one(tmp_path):
    assert results(probed, 2, tmp_path) == [probed()] * 2


def test_a_rise_a_plateau_and_a_fall_are_told_apart():
    curves = {
        "rise": [0.02 * step for step in range(16)],
        "plateau": [0.1, 0.2, 0.3, *[0.4 + 0.001 * (step % 2) for step in range(13)]],
        "fall": [0.1, 0.3, 0.6, *[0.5 - 0.02 * step for step in range(13)]],
    }
    lines = {}
    for name, values in curves.items():
        history = [{"step": 10 * step, "knn4": value} for step, value in enumerate(values)]
        (lines[name],) = online.trends(history, [SimpleNamespace(name="knn4", title="4-NN")])
    assert all(word in line for word, line in lines.items())
    assert " 30 " in lines["plateau"]
    assert " 20 " in lines["fall"].replace(";", " ")
