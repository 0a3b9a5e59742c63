"""Sharded checkpoints contain the state at the time of the call, and can be merged into complete ones."""

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import tiny
import torch
from ranks import own_rank, start
from runs import assert_close, final, states
from test_sharding import in_processes
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as torch_load

from ssvit.checkpoints import storage
from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.manifest import CheckpointError

FILES = {"model.safetensors", "optimizer.safetensors", "ema.safetensors"}


@pytest.mark.parametrize("notes", [None, {"b": "ü", "a": '"'}])
def test_a_file_has_the_bytes_of_safetensors(tmp_path, notes):
    kinds = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.int32,
             torch.float32, torch.float64, torch.int64)  # fmt: skip
    tensors = {f"{kind}": torch.arange(6).view(2, 3).to(kind) for kind in kinds}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "ä": torch.arange(12.0).view(3, 4).T}
    checksum = storage.write_tensors(tmp_path / "file", tensors, notes)
    expected = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, notes)
    if len(notes or ()) < 2:  # safetensors keeps them in no order
        assert (tmp_path / "file").read_bytes() == expected
    loaded = safetensors.torch.load_file(tmp_path / "file")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert storage.metadata((tmp_path / "file").read_bytes()) == (notes or {})
    assert checksum == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()


def snapshot(folder: Path) -> None:
    """Save a sharded state and change it at once; the main process stores the expected state next to it."""
    state, _ = tiny.state(tiny.dino(), strategy="fsdp")
    for weight in state.objective.parameters():
        if weight.requires_grad:
            weight.grad = torch.ones_like(weight)
    state.optimizer.step()
    flat = {f"{kind}/{name}": value for kind, one in state._states().items() for name, value in one.items()}
    whole = {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for name, v in flat.items()}
    state.save(folder, 3, {"stage": "pretrain"}, wait=False)
    with torch.no_grad():
        for weight in state.objective.parameters():
            weight.zero_()
    state._finish_saving()
    if state.processes.is_main:
        safetensors.torch.save_file(whole, folder / "whole.safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    in_processes(snapshot, folder, 3)
    return folder


@pytest.fixture
def parted(saved, tmp_path):
    """The folder of a checkpoint in three parts."""
    return Path(shutil.copytree(saved / "step_00000003", tmp_path / "step_00000003"))


def flat(path: Path) -> dict[str, torch.Tensor]:
    return {f"{kind}/{name}": value for kind, state in states(path).items() for name, value in state.items()}


def assert_equal(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0)


def test_parts_make_the_whole_of_the_moment_when_they_were_asked_for(saved, parted):
    expected = safetensors.torch.load_file(saved / "whole.safetensors")
    assert {path.name for path in parted.iterdir()} == {
        "manifest.json",
        *(f"part_0000{i}.safetensors" for i in range(3)),
    }
    assert_equal(flat(parted), expected)
    sizes = [(parted / f"part_0000{i}.safetensors").stat().st_size for i in range(3)]
    assert max(sizes) < 0.5 * sum(sizes)
    assert storage.load(Checkpoint.open(parted), without="optimizer").keys() == {"model", "ema"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_them_too(saved, parted):
    expected = safetensors.torch.load_file(saved / "whole.safetensors")
    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    torch_load(found, storage_reader=HuggingFaceStorageReader(str(parted)), no_dist=True)
    assert_equal(found, expected)


def test_merged_they_are_the_same_checkpoint(parted):
    before = flat(parted)
    merged = storage.merge(Checkpoint.open(parted))
    assert set(merged.manifest["sha256"]) == FILES
    assert {path.name for path in parted.iterdir()} == {"manifest.json", *FILES}
    assert_equal(flat(parted), before)
    assert storage.merge(merged) is merged


def unmerged(folder: Path) -> None:
    """A sharded run that is killed after its last checkpoint, before the parts of that are merged."""
    storage.merge = lambda checkpoint: checkpoint
    tiny.train(folder, steps=4, strategy="fsdp")


def test_a_finished_run_that_was_killed_before_its_parts_were_merged_merges_them(tmp_path):
    in_processes(unmerged, tmp_path, 2)
    assert storage.is_in_parts(Checkpoint.open(tmp_path))
    before = flat(tmp_path)
    worked, _ = tiny.train(tmp_path, steps=4)
    assert not worked
    assert set(Checkpoint.open(tmp_path).manifest["sha256"]) == FILES
    assert_equal(flat(tmp_path), before)


@pytest.mark.parametrize("call", range(4))
def test_a_merge_that_fails_leaves_a_checkpoint_that_is_whole(parted, monkeypatch, call):
    """Writing one of the files or the manifest fails."""
    before, calls = flat(parted), []

    def refusing(write):
        def writes(path, *rest):
            calls.append(path)
            if len(calls) == call + 1:
                raise OSError(28, "No space left on device", str(path))
            return write(path, *rest)

        return writes

    monkeypatch.setattr(storage, "write_tensors", refusing(storage.write_tensors))
    monkeypatch.setattr(storage, "replace", refusing(storage.replace))
    with pytest.raises(CheckpointError, match=f"^{parted}.*: "):
        storage.merge(Checkpoint.open(parted))
    assert_equal(flat(parted), before)


def test_a_damaged_part_is_named_and_passed_over(saved, tmp_path):
    storage.save(tmp_path, 2, {"model": {"weight": torch.ones(2)}}, {})
    shutil.copytree(saved / "step_00000003", tmp_path / "step_00000003")
    part = tmp_path / "step_00000003" / "part_00001.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"part_00001\.safetensors: "):
        storage.load(Checkpoint.open(tmp_path / "step_00000003"))
    warnings = []
    assert storage.newest(tmp_path, warnings.append)[0].path.name == "step_00000002"
    assert "falling back" in "".join(warnings)


@pytest.mark.parametrize("offset", [[1 << 40, 0], "none", None])
def test_parts_that_do_not_fit_are_refused(parted, offset):
    """Damaged parts do not allocate the memory of the sizes in their headers."""
    manifest = json.loads((parted / "manifest.json").read_text())
    part = parted / "part_00000.safetensors"
    data = part.read_bytes()
    tensors, places = safetensors.torch.load(data), json.loads(storage.metadata(data)[storage.PLACES])
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    places[name] = {"saved_offsets": offset}
    manifest["sha256"][part.name] = storage.write_tensors(part, tensors, {storage.PLACES: json.dumps(places)})
    checkpoint = Checkpoint(parted, manifest)
    with pytest.raises(CheckpointError, match="shards"):
        storage.load(checkpoint)


def train(folder: Path, strategy: str, killed: bool) -> None:
    """One process of a run; `killed` kills the second one while it writes its part of the second checkpoint."""
    write, calls = storage.write_tensors, []

    def write_or_die(path, *rest):
        calls.append(path)
        if killed and own_rank() == 1 and len(calls) == 2:
            Path(path).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, *rest)

    storage.write_tensors = write_or_die
    tiny.train(folder, strategy=strategy, double=True, steps=6)


def run(folder: Path, world: int, strategy: str = "fsdp", killed: bool = False) -> list[int]:
    return start(train, world, folder, strategy, killed)


@pytest.mark.parametrize(("world", "strategy"), [(1, "auto"), pytest.param(4, "fsdp", marks=pytest.mark.slow)])
def test_a_kill_during_a_save_loses_nothing_on_any_number_of_processes(tmp_path, world, strategy):
    assert run(tmp_path / "whole", 2) == [0, 0]
    assert run(tmp_path / "broken", 2, killed=True) == [1, -signal.SIGKILL]
    assert [path.name for path in sorted((tmp_path / "broken").glob("step_*"))] == ["step_00000003"]
    shutil.copytree(tmp_path / "broken", tmp_path / "other")
    assert run(tmp_path / "broken", 2) == [0, 0]
    assert run(tmp_path / "other", world, strategy) == [0] * world
    assert set(final(tmp_path / "whole")) == FILES
    assert final(tmp_path / "broken") == final(tmp_path / "whole")
    assert_close(tmp_path / "other", tmp_path / "whole")


def test_a_command_merges(tool, parted):
    done = tool("merge", f"checkpoint={parted}")
    assert done.stdout == f"{parted}: ema.safetensors, model.safetensors, optimizer.safetensors\n"
    assert {path.name for path in parted.iterdir()} == {"manifest.json", *FILES}
