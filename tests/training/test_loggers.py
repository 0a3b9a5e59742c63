"""The loggers of a run: each row once, however often the run is resumed, in files and in the services' own stores."""

import csv
import json
import math
import struct
from collections.abc import Mapping

import pytest
from command import TINY, one_line
from PIL import Image

from ssvit.checkpoints.run_folder import rows
from ssvit.config.declaration import Options
from ssvit.options import OptionError, UserError
from ssvit.training.loggers import csv_options, wandb_options
from ssvit.training.loggers.base import Unreachable
from ssvit.training.loggers.csv import Csv
from ssvit.training.loggers.follower import Follower
from ssvit.training.metrics_log import MetricsLog
from ssvit.training.recipe import Recipe

PICTURE = Image.new("RGB", (8, 8))
RUN = {"name": "group/run", "hyperparameters": {"recipe.lr": 0.1, "objective": "mae"}}


def loss(step: int) -> float:
    return 1 / (1 + step)


def run(folder, logger, first: int, last: int, *, complete: bool = False) -> None:
    """A process that goes on after step `first` and ends after step `last`: an evaluation at every third step."""
    log = MetricsLog(folder, Recipe(steps=9, warmup=0), first_step=first, loggers=[logger])
    for step in range(first if first == 0 else first + 1, last + 1):
        if step > 0:
            log.record(step, {"train/loss": loss(step), "train/norm": math.nan if step == 2 else 1.0})
        if step % 3 == 0:
            log.record(step, {"held_out/loss": loss(step)})
            logger.show(step, "mosaic", PICTURE)
    if complete:
        log.finish()
    log.close()


# Killed after step 5, of which step 3 was the last checkpoint; killed before the first checkpoint; not killed.
WAYS = [((0, 5), (3, 9)), ((0, 2), (0, 9)), ((0, 9),), ((0, 4), (3, 4), (3, 9))]


def resumed(folder, make, way) -> None:
    for number, (first, last) in enumerate(way, 1):
        run(folder, make(), first, last, complete=number == len(way))


@pytest.mark.parametrize("way", WAYS)
def test_csv_is_the_rows_of_the_metrics(tmp_path, way):
    resumed(tmp_path, lambda: Csv(csv_options.Csv(), folder=tmp_path, **RUN), way)
    with open(tmp_path / "metrics.csv", newline="") as file:
        found = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    assert found == [{name: x for name, x in row.items() if x is not None} for row in rows(tmp_path)]
    assert [row["step"] for row in found if "train/loss" in row] == list(range(1, 10))


class Service(Follower):
    """One in memory, that does not answer while `away`."""

    file = "service.json"

    def __init__(self, kept: dict, **given) -> None:
        super().__init__(Options(), **given)
        self.kept, self.away = kept, False

    def start(self, identity):
        identity = identity or f"run{len(self.kept)}"
        self.kept.setdefault(identity, [])
        self.own = self.kept[identity]
        return identity

    def send(self, step: int, row: Mapping[str, float]) -> None:
        if self.away:
            raise Unreachable("away")
        self.own += [(step, name, value) for name, value in row.items()]

    def send_picture(self, step, name, picture):
        self.own.append((step, name, None))


EXPECTED = sorted(
    [(step, "train/loss", loss(step)) for step in range(1, 10)]
    + [(step, "train/norm", 1.0) for step in range(1, 10) if step != 2]
    + [(step, "held_out/loss", loss(step)) for step in (0, 3, 6, 9)]
)


@pytest.mark.parametrize("way", WAYS)
def test_a_service_gets_each_row_and_picture_once(tmp_path, way):
    kept: dict = {}
    resumed(tmp_path, lambda: Service(kept, folder=tmp_path, **RUN), way)
    assert list(kept) == ["run0"]
    assert sorted(one for one in kept["run0"] if one[1] != "mosaic") == EXPECTED
    assert sorted(step for step, name, _ in kept["run0"] if name == "mosaic") == [0, 3, 6, 9]


def test_a_run_that_goes_on_with_fewer_or_more_rows_of_a_step_loses_and_repeats_none(tmp_path):
    """Killed after step 5, of which step 3 was the last checkpoint; it goes on without, then with an evaluator."""
    service = Service({}, folder=tmp_path, **RUN)
    for first, last, evaluated in ((0, 5, True), (3, 7, False), (6, 9, True)):
        log = MetricsLog(tmp_path, Recipe(steps=9, warmup=0), first_step=first, loggers=[service])
        for step in range(first + 1, last + 1):
            log.record(step, {"train/loss": loss(step)})
            if evaluated:
                log.record(step, {"held_out/loss": loss(step)})
        log.close()
    sent = [(step, name) for step, name, _ in service.own]
    assert [step for step, name in sent if name == "train/loss"] == [*range(1, 10)]
    assert [step for step, name in sent if name == "held_out/loss"] == [1, 2, 3, 4, 5, 7, 8, 9]


def test_a_service_that_comes_later_gets_the_rows_before(tmp_path):
    kept: dict = {}
    run(tmp_path, Csv(csv_options.Csv(), folder=tmp_path, **RUN), 0, 4)
    run(tmp_path, Service(kept, folder=tmp_path, **RUN), 3, 9)
    assert sorted(one for one in kept["run0"] if one[1] != "mosaic") == EXPECTED


def test_a_service_out_of_reach_stops_no_run_and_gets_the_rows_later(tmp_path, capsys):
    service = Service({}, folder=tmp_path, **RUN)
    log = MetricsLog(tmp_path, Recipe(steps=9, warmup=0), first_step=0, loggers=[service])
    service.away = True
    log.record(1, {"train/loss": loss(1)})
    log.record(2, {"train/loss": loss(2)})
    service.away = False
    log.record(3, {"train/loss": loss(3)})
    log.close()
    assert service.own == [(step, "train/loss", loss(step)) for step in (1, 2, 3)]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("service ")
    assert line.endswith(": away")


def wandb_history(path) -> list[dict]:
    """The rows in a file of an offline run: protobuf records in LevelDB's log format, whose header has 7 bytes."""
    internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, at, parts, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = internal.Record.FromString(parts)
            items = {item.key or "/".join(item.nested_key): item for item in record.history.item}
            if items:
                found.append({name: json.loads(item.value_json) for name, item in items.items()})
            parts = b""
    return found


def test_wandb_offline_has_each_point_once(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    from ssvit.training.loggers.wandb import Wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    resumed(tmp_path, lambda: Wandb(wandb_options.Wandb(project="mine"), folder=tmp_path, **RUN), WAYS[0])
    wandb.teardown()  # ends its process, which may still be writing
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({path.name for path in files}) == 1  # the run's identity
    found = [row for path in files for row in wandb_history(path)]
    names = {"train/loss", "train/norm", "held_out/loss"}
    assert sorted((row["step"], name, row[name]) for row in found for name in names & row.keys()) == EXPECTED
    assert sorted(row["step"] for row in found if any(name.startswith("mosaic") for name in row)) == [0, 3, 6, 9]


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(wandb_options, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=r"^logger=wandb needs wandb: pip install ssvit\[wandb\]$"):
        wandb_options.Wandb()


@pytest.mark.parametrize("values", [{"project": 3}, {"entity": ""}])
def test_an_option_that_cannot_be_is_refused(values):
    with pytest.raises(OptionError, match=f"^{next(iter(values))}="):
        wandb_options.Wandb(**values)


def test_the_command_refuses_before_torch_is_loaded(tool, no_torch):
    line = one_line(tool("pretrain", *TINY, "logger=[csv,abc]", status=2, PYTHONPATH=no_torch))
    assert line == "ssvit: logger=abc: must be one of csv, tensorboard, wandb"


def test_loggers_change_no_bit_and_may_change_in_a_run(tool, pretrained, tmp_path):
    given = (*TINY, "encoder.positions=learned_1d", "probe=[]")
    tool("pretrain", *given, "logger=[csv]", "recipe.steps=6")
    own, other = (folder / "masked_patch_synthetic" for folder in (tmp_path / "outputs", pretrained))
    newest = [json.loads((run / "step_00000006" / "manifest.json").read_text())["sha256"] for run in (own, other)]
    assert newest[0] == newest[1]
    assert not list(own.glob("events.*"))
    with open(own / "metrics.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == len(rows(own))
    assert "is finished" in tool("pretrain", *given).stdout  # with the default, TensorBoard
