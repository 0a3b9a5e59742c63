"""TensorBoard shows a chart for each curve of a run, with baselines as lines."""

import pytest
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.summary.writer import event_file_writer
from tensorboard.util import tensor_util

from ssvit.training.loggers.options import TensorBoard as TensorBoardOptions
from ssvit.training.loggers.tensorboard import TensorBoard, lines
from ssvit.training.metrics_log import MetricsLog
from ssvit.training.recipe import Recipe

PREDICTION = {"loss": 2.0, "loss_masked": 2.1, "loss_constant": 3.0, "accuracy": 0.4, "accuracy_constant": 0.1,
              "accuracy_copying": 0.2}  # fmt: skip
PROBE = {"train_images": 64, "test_images": 32, "class_token": 1, "chance": 0.1, "knn20": 0.5, "knn20_pixels": 0.3,
         "knn20_chance": 0.1, "knn20_chosen": 2, "knn20_last": 0.4, "knn20_layer1": 0.3,
         "knn20_layer2": 0.5}  # fmt: skip
COLLAPSE = {"entropy_of_mean": 1.0, "entropy": 0.5, "entropy_uniform": 2.0, "information": 0.1,
            "information_at_most": 2.0, "agreement": 0.9, "agreement_by_chance": 0.1,
            "patch_agreement": 0.8}  # fmt: skip
ROW = {f"held_out/{name}": value for name, value in PREDICTION.items()}
ROW |= {f"probe/{name}": value for name, value in PROBE.items()}


def test_a_baseline_is_a_line_in_the_chart_of_its_curve():
    assert lines(ROW) == {
        "": {"held_out/loss": 2.0, "held_out/loss_masked": 2.1, "held_out/accuracy": 0.4, "probe/knn20": 0.5,
             "probe/knn20_last": 0.4},
        "constant": {"held_out/loss": 3.0, "held_out/accuracy": 0.1},
        "copying": {"held_out/accuracy": 0.2},
        "pixels": {"probe/knn20": 0.3},
        "chance": {"probe/knn20": 0.1},
    }  # fmt: skip
    curves = ("entropy_of_mean", "entropy", "information", "agreement", "patch_agreement")
    assert lines(COLLAPSE) == {
        "": {name: COLLAPSE[name] for name in curves},
        "uniform": {"entropy": 2.0},
        "at_most": {"information": 2.0},
        "chance": {"agreement": 0.1},
    }
    row = {"train/loss_mean": 1.0, "images_per_second": 5.0}  # without the curve that this baseline belongs to
    assert lines(row) == {"": row}


@pytest.fixture
def board(tmp_path, monkeypatch):
    """A run of nine steps that was killed after step 5 and resumed after step 3, as TensorBoard reads it.

    It reads files in the order of their names, which end with numbers. Here, both processes may begin in one second.
    """
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(10))
    run = tmp_path / "run"
    run.mkdir()
    for first, last in ((0, 5), (3, 9)):
        logger = TensorBoard(TensorBoardOptions(), folder=run, name="run", hyperparameters={})
        log = MetricsLog(run, Recipe(steps=9, warmup=0), first_step=first, loggers=[logger])
        for step in range(first if first == 0 else first + 1, last + 1):
            if step:
                log.record(step, {"train/loss": 1 / step})
            if step % 3 == 0:
                log.record(step, ROW | {"held_out/accuracy": step / 10})
        log.finish()
        log.close()
    return EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()


def test_the_lines_of_a_chart_have_each_point_once(board):

    def points(run: str, tag: str) -> list[tuple[int, float]]:
        events = board.Tensors(run, tag)
        return [(event.step, pytest.approx(float(tensor_util.make_ndarray(event.tensor_proto)))) for event in events]

    assert sorted(board.Runs()) == ["run", "run/chance", "run/constant", "run/copying", "run/pixels"]
    assert points("run", "train/loss") == [(step, 1 / step) for step in range(1, 10)]
    assert points("run", "held_out/accuracy") == [(step, step / 10) for step in (0, 3, 6, 9)]
    assert points("run/copying", "held_out/accuracy") == [(step, 0.2) for step in (0, 3, 6, 9)]
    assert points("run/chance", "probe/knn20") == [(step, 0.1) for step in (0, 3, 6, 9)]
