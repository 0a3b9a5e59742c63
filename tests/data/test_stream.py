"""Batches on a stream of their own, with a stand-in for CUDA that keeps a list of what it is told."""

import contextlib
from types import SimpleNamespace

import pytest
import tiny
import torch

from ssvit.data import loader as loader_module
from ssvit.data.augment.crop import InceptionCrop
from ssvit.data.loader import Loader, streamed

CUDA = torch.device("cuda")


class Device:
    """current: the stream on which work lands; told: what happened, in order."""

    def __init__(self):
        self.current, self.told, self.clock = "main", [], 0.0

    def stream_of(self, name):
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.told.append(f"{name} waits for {other.name}"),
            record_event=lambda event: event.record(name),
        )

    @contextlib.contextmanager
    def stream(self, stream):
        self.current = stream.name
        yield
        self.current = "main"

    def event(self, enable_timing):
        found = SimpleNamespace(time=None, query=lambda: True)

        def record(name):
            found.time = self.clock
            self.told.append(f"event on {name}")

        found.record, found.elapsed_time = record, lambda later: 1000 * (later.time - found.time)
        return found


@pytest.fixture
def device(monkeypatch):
    found = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.stream_of("main"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: found.stream_of("own"))
    monkeypatch.setattr(torch.cuda, "stream", found.stream)
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    kept = lambda tensor, stream: found.told.append(f"kept for {stream.name}")  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", kept)
    return found


def parts(**given):
    crop = InceptionCrop(size=16, scale=(0.5, 1.0))
    return Loader(source=tiny.labelled(), transform=crop, seed=0, batch_size=8, **given)


def test_a_batch_is_made_on_its_own_stream_and_the_step_waits_for_it(device):
    def made():
        for batch in parts().batches(0, 2):
            device.told.append(f"made on {device.current}")
            device.clock += 0.5
            yield batch

    waits = []
    batches = list(streamed(made(), CUDA, waits.append))
    of_one = ["event on main", "made on own", "main waits for own", "event on main", *["kept for main"] * 3]
    assert device.told == ["own waits for main", *of_one, *of_one, "event on main"]
    assert waits == [0.5, 0.5]
    for batch, expected in zip(batches, parts().batches(0, 2), strict=True):
        assert all(one.equal(other) for one, other in zip(batch.tensors, expected.tensors, strict=True))


def test_a_loader_for_a_gpu_streams_and_counts_what_the_gpu_waited(device, monkeypatch):
    loader = parts()
    monkeypatch.setattr(loader_module, "streamed", lambda batches, device, waited: waited(2.0) or batches)
    monkeypatch.setattr(loader, "_from_memory", lambda units: (unit for unit in units))
    loader.device = "cuda"
    assert list(loader.batches(0, 3)) == [0, 1, 2]
    assert loader.waited == 2.0
