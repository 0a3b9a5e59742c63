"""The loggers of a run: metrics of a resumed run in the store of each service, and options."""

import json
import math
import struct

import pytest
from command import TINY
from PIL import Image
from runs import final

from ssvit.errors import OptionError, UserError
from ssvit.training.loggers import options as logger_options
from ssvit.training.metrics_log import MetricsLog
from ssvit.training.recipe import Recipe

PICTURE = Image.new("RGB", (8, 8))


def loss(step: int) -> float:
    return 1 / (1 + step)


def run(folder, logger, first: int, last: int, *, complete: bool = False) -> None:
    """A process that resumes after step `first` and ends after step `last`: an evaluation at every third step."""
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


def test_each_offline_run_of_wandb_has_all_points_up_to_its_end_once(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    from ssvit.training.loggers.wandb import Wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    options = {"name": "group/run", "hyperparameters": {"recipe.lr": 0.1}}
    for first, last in ((0, 5), (3, 9)):  # killed after step 5, with the newest checkpoint at step 3
        logger = Wandb(logger_options.Wandb(project="mine"), folder=tmp_path, **options)
        run(tmp_path, logger, first, last, complete=last == 9)
    wandb.teardown()  # ends its process, which may still be writing
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len({path.name for path in files}) == 1  # the identity of the run
    assert len(files) == 2
    for path, last in zip(files, (5, 9), strict=True):
        history = {row["_step"]: row for row in wandb_history(path)}
        assert len(history) == len(wandb_history(path))
        for name, steps in {"train/loss": range(1, last + 1), "held_out/loss": range(0, last + 1, 3)}.items():
            expected = {step: loss(step) for step in steps}
            assert {step: row[name] for step, row in history.items() if name in row} == expected
        assert {step for step, row in history.items() if "train/norm" in row} == {*range(1, last + 1)} - {2}


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch):
    monkeypatch.setattr(logger_options, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=r"^logger=wandb"):
        logger_options.Wandb()


@pytest.mark.parametrize("values", [{"project": 3}, {"entity": ""}])
def test_an_invalid_option_is_named(values):
    with pytest.raises(OptionError, match=f"^{next(iter(values))}="):
        logger_options.Wandb(**values)


def test_loggers_change_no_bit_and_may_change_in_a_run(tool, pretrained, tmp_path):
    options = (*TINY, "encoder.positions=learned_1d", "probes=[]")
    tool("pretrain", *options, "logger=[]", "recipe.steps=6")
    run, other = (folder / "masked_patch_shapes" for folder in (tmp_path / "outputs", pretrained))
    assert final(run) == final(other)
    assert not list(run.glob("events.*"))
    assert "is finished" in tool("pretrain", *options).stdout  # with the default, TensorBoard
