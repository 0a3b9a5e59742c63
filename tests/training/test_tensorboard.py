"""What TensorBoard makes of a run's folder: a card for each curve, baselines as lines in it, hyperparameters."""

import pytest
from tensorboard import context
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups
from tensorboard.summary.writer import event_file_writer
from tensorboard.util import tensor_util

from ssvit.training.loggers import tensorboard_options
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


def test_a_baseline_is_a_line_in_the_card_of_its_curve():
    assert lines(ROW) == {
        "": {"held_out/loss": 2.0, "held_out/loss_masked": 2.1, "held_out/accuracy": 0.4, "probe/knn20": 0.5,
             "probe/knn20_last": 0.4},
        "constant": {"held_out/loss": 3.0, "held_out/accuracy": 0.1},
        "copying": {"held_out/accuracy": 0.2},
        "pixels": {"probe/knn20": 0.3},
        "chance": {"probe/knn20": 0.1},
    }  # fmt: skip
    found = lines(COLLAPSE)
    assert found.pop("") == {
        name: COLLAPSE[name] for name in ("entropy_of_mean", "entropy", "information", "agreement", "patch_agreement")
    }
    assert found == {"uniform": {"entropy": 2.0}, "at_most": {"information": 2.0}, "chance": {"agreement": 0.1}}


def test_a_metric_keeps_its_card_where_the_curve_is_missing():
    assert lines({"train/loss_mean": 1.0, "images_per_second": 5.0}) == {
        "": {"train/loss_mean": 1.0, "images_per_second": 5.0}
    }


@pytest.fixture
def board(tmp_path, monkeypatch):
    """A run of nine steps that was killed after step 5 and went on after step 3, as TensorBoard reads it.

    Both in one process and perhaps one second, with files numbered from 9: by their names alone 14 is before 9.
    """
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    run = tmp_path / "run"
    run.mkdir()
    for first, last in ((0, 5), (3, 9)):
        options = {"recipe.lr": 0.1, "objective": "mae", "encoder.class_token": True}
        logger = TensorBoard(tensorboard_options.TensorBoard(), folder=run, name="run", hyperparameters=options)
        log = MetricsLog(run, Recipe(steps=9, warmup=0), first_step=first, loggers=[logger])
        for step in range(first if first == 0 else first + 1, last + 1):
            if step:
                log.record(step, {"train/loss": 1 / step})
            if step % 3 == 0:
                log.record(step, ROW | {"held_out/accuracy": step / 10})
        if last == 9:
            log.finish()
        log.close()
    return EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload(), tmp_path


def test_the_lines_of_a_card_have_each_point_once(board):
    multiplexer, _ = board

    def points(run: str, tag: str) -> list[tuple[int, float]]:
        events = multiplexer.Tensors(run, tag)
        return [(event.step, pytest.approx(float(tensor_util.make_ndarray(event.tensor_proto)))) for event in events]

    assert sorted(multiplexer.Runs()) == ["run", "run/chance", "run/constant", "run/copying", "run/pixels"]
    assert points("run", "train/loss") == [(step, 1 / step) for step in range(1, 10)]
    assert points("run", "held_out/accuracy") == [(step, step / 10) for step in (0, 3, 6, 9)]
    assert points("run/copying", "held_out/accuracy") == [(step, 0.2) for step in (0, 3, 6, 9)]
    assert points("run/chance", "probe/knn20") == [(step, 0.1) for step in (0, 3, 6, 9)]


def test_the_hyperparameters_have_the_final_metrics(board):
    multiplexer, folder = board
    tab = backend_context.Context(
        base_plugin.TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(folder)))
    )
    asked = context.RequestContext()
    given = tab.hparams_metadata(asked, ""), tab.hparams_from_data_provider(asked, "", None)
    experiment = tab.experiment_from_metadata(asked, "", True, *given)
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0, slice_size=10, include_metrics=True, allowed_statuses=[api_pb2.STATUS_SUCCESS]
    )
    for metric in experiment.metric_infos:
        request.col_params.add().metric.CopyFrom(metric.name)
    (session,) = list_session_groups.Handler(asked, tab, "", request).run().session_groups
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in session.hparams.items()}
    assert values == {"recipe.lr": 0.1, "objective": "mae", "encoder.class_token": True}
    own = [value for value in session.metric_values if not value.name.group]
    final = {value.name.tag: (value.training_step, pytest.approx(value.value)) for value in own}
    cards = {**lines(ROW)[""], "held_out/accuracy": 0.9, "train/loss": 1 / 9}
    assert {name: final[name] for name in cards} == {name: (9, value) for name, value in cards.items()}
