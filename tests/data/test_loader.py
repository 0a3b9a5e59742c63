"""A batch is a function of the seed and the step alone, whatever the workers, processes and restarts."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_batch
import tiny
import torch
from command import LIMIT
from leftovers import alive
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ssvit.data import sampler
from ssvit.data.augment.options import CenterCrop, InceptionCrop, MultiCrop, ShiftCrop
from ssvit.data.loader import Batch, Loader, Tally, evaluation_batches
from ssvit.data.sources.base import Source, Unreadable
from ssvit.data.sources.base_options import check_shares
from ssvit.data.sources.files import Files
from ssvit.data.sources.memory import Memory
from ssvit.engine.private import end_workers
from ssvit.errors import OptionError, UserError

TAG = CenterCrop(size=1).build()  # leaves one pixel, which identifies the image


def tagged(count: int) -> Memory:
    return Memory(torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1))


def folder(root: Path, count: int, damaged: Iterable[int] = ()) -> Files:
    """Write files where image i has grey level i everywhere; damaged files contain text."""
    paths = [root / f"{i:03d}.png" for i in range(count)]
    for i, path in enumerate(paths):
        if i in damaged:
            path.write_text("damaged")
        else:
            Image.new("L", (5 + i % 3, 6), i).save(path)
    return Files(paths, [i % 2 for i in range(count)], ("even", "odd"))


def tags(batches: Iterable[Batch]) -> list[int]:
    return [tag for batch in batches for tag in batch.images[:, 0, 0, 0].tolist()]


def indices(batches: Iterable[Batch]) -> list[int]:
    return [index for batch in batches for index in batch.indices.tolist()]


def same(first: Iterable[Batch], second: Iterable[Batch]) -> bool:
    return all(test_batch.same(*both) for both in zip(first, second, strict=True))


@pytest.mark.parametrize("order", ["permutation", "bijection"])
def test_each_image_comes_once_an_epoch_in_an_order_of_seed_and_slot(order):
    slots = torch.arange(5 * 37)
    every = sampler.indices(slots, size=37, seed=5, order=order)
    epochs = every.view(5, 37)
    assert torch.equal(epochs.sort(1).values, torch.arange(37).expand(5, 37))
    assert len(epochs.unique(dim=0)) == 5
    scattered = torch.randperm(len(slots), generator=torch.Generator().manual_seed(0))
    assert torch.equal(sampler.indices(scattered, size=37, seed=5, order=order), every[scattered])
    assert not torch.equal(sampler.indices(slots, size=37, seed=6, order=order), every)
    loader = Loader(source=tagged(37), transform=TAG, seed=5, batch_size=8, order=order)
    batches = list(loader.batches(3, 23))
    assert tags(batches) == indices(batches) == every[24:184].tolist()  # batches straddle epochs


def test_processes_and_micro_batches_part_the_same_global_batch():
    source = Memory(torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8), [0] * 40, ("a",))

    def load(**options: int) -> list[Batch]:
        loader = Loader(source=source, transform=InceptionCrop(size=6).build(), seed=1, batch_size=24, **options)
        return list(loader.batches(2, 5))

    whole = load()
    for world, accumulate in ((4, 1), (1, 3), (2, 2), (4, 6)):
        parts = [load(rank=rank, world=world, accumulate=accumulate) for rank in range(world)]
        for step in range(3):
            ordered = [part[step * accumulate + micro] for part in parts for micro in range(accumulate)]
            assert {slot // 24 for batch in ordered for slot in batch.slots.tolist()} == {step + 2}
            assert torch.equal(torch.cat([batch.slots for batch in ordered]), whole[step].slots)
            assert torch.equal(torch.cat([batch.images for batch in ordered]), whole[step].images)
            assert torch.equal(torch.cat([batch.indices for batch in ordered]), whole[step].indices)


@pytest.mark.parametrize(("batch_size", "accumulate", "processes"), [(12, 1, 8), (12, 2, 5), (7, 1, 4), (64, 4, 15)])
def test_a_batch_that_cannot_be_shared_names_the_most_processes_that_can_share_it(batch_size, accumulate, processes):
    most = max(count for count in range(1, processes) if batch_size % (accumulate * count) == 0)
    with pytest.raises(OptionError, match=f"; {most} "):
        check_shares(batch_size=batch_size, accumulate=accumulate, processes=processes)


@pytest.mark.parametrize(("batch_size", "repeats"), [(12, 1), (12, 3), (16, 3), (9, 2), (4, 4)])
def test_the_copies_of_an_image_are_in_one_batch_or_at_its_ends_and_never_neighbours(batch_size, repeats):
    slots = torch.arange(12 * batch_size)
    found = sampler.positions(slots, batch_size=batch_size, repeats=repeats)
    batches = found.view(12, batch_size)
    in_succession = [slot // repeats for slot in range(12 * batch_size)]
    assert batches.sort(1).values.flatten().tolist() == in_succession
    if batch_size > repeats:
        assert (batches != batches.roll(1, 1)).all()
    scattered = torch.randperm(len(slots), generator=torch.Generator().manual_seed(0))
    assert torch.equal(sampler.positions(scattered, batch_size=batch_size, repeats=repeats), found[scattered])


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_batch_has_copies_of_its_images_which_differ_in_slot_and_pixels(repeats):
    source = Memory(torch.randint(0, 256, (20, 3, 24, 24), dtype=torch.uint8))
    options = {"transform": InceptionCrop(size=6).build(), "seed": 1, "batch_size": 12, "repeats": repeats}
    batches = list(Loader(source=source, **options).batches(0, 5 * repeats))
    distinct = 12 // repeats
    order = sampler.indices(torch.arange(60), size=20, seed=1).view(-1, distinct)  # three epochs of distinct images
    for batch, expected in zip(batches, order, strict=True):
        copies = batch.indices.view(repeats, distinct)
        assert torch.equal(copies, expected.expand(repeats, distinct))
        assert len(batch.images.flatten(1).unique(dim=0)) == 12
    counts = torch.cat([batch.indices for batch in batches]).bincount(minlength=20)
    assert counts.tolist() == [3 * repeats] * 20
    parts = [list(Loader(source=source, rank=rank, world=3, **options).batches(1, 4)) for rank in range(3)]
    for step, whole in enumerate(batches[1:4]):  # resumed at step 1, in three processes
        for name in ("slots", "indices", "images"):
            assert torch.equal(torch.cat([getattr(part[step], name) for part in parts]), getattr(whole, name))


@pytest.mark.parametrize("workers", [None, 0])
def test_fingerprints_of_all_images_are_recorded_once_each_was_shown(tmp_path, workers):
    source = folder(tmp_path, 20) if workers is not None else tagged(20)
    loader = Loader(source=source, transform=TAG, seed=0, batch_size=12, repeats=2, records=True)
    rows = []
    for _ in loader.batches(0, 4):  # 24 distinct images
        shown = loader.take_fingerprints()
        rows += [int.from_bytes(shown[at : at + 8], "little") for at in range(0, len(shown), 32)]
    assert set(rows) == set(range(20))


CHANGED = InceptionCrop(
    size=6, vertical_flip=0.5, quarter_turns=True, rotation=180, randaugment=2, jitter=0.8, grayscale=0.2, blur=0.5,
    sigma=(0.1, 1.0), solarize=0.2, erasing=0.25,
).build()  # fmt: skip


VIEWS = MultiCrop(size=8, local_size=6, local_views=3, sigma=(0.1, 1.0)).build()


@pytest.mark.parametrize(
    "transform", [InceptionCrop(size=6).build(), ShiftCrop(size=8, padding=2).build(), CHANGED, VIEWS]
)
def test_batches_depend_neither_on_the_first_step_nor_on_the_workers(tmp_path, transform):
    images, labels = torch.randint(0, 256, (120, 3, 12, 14), dtype=torch.uint8), torch.arange(120) % 2
    paths = [str(tmp_path / f"{i:03d}.png") for i in range(120)]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    memory, files = Memory(images, labels, ("a", "b")), Files(paths, labels, ("a", "b"))

    def load(source: Source, first: int = 0, workers: int = 0) -> list[Batch]:
        options = {"seed": 3, "batch_size": 40, "accumulate": 2, "workers": workers}
        repeats = 2 if transform is CHANGED else 1
        return list(Loader(source=source, transform=transform, repeats=repeats, **options).batches(first, 6))

    of_memory = load(memory)
    assert same(of_memory[6:], load(memory, first=3))
    if transform is VIEWS:
        shapes = {name: tuple(view.shape) for name, view in of_memory[0].views.items()}
        assert shapes == {"global": (20, 2, 3, 8, 8), "local": (20, 3, 3, 6, 6)}
        assert same(of_memory, load(files))
    Path(paths[17]).write_text("damaged")
    of_files = load(files)
    assert same(of_files, load(files, workers=2))
    assert same(of_files[6:], load(files, first=3, workers=3))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_file_is_replaced_by_another_with_its_label_and_index(tmp_path, workers):
    source = folder(tmp_path, 120, damaged=[7])
    loader = Loader(source=source, transform=TAG, seed=0, batch_size=30, workers=workers)
    batches = list(loader.batches(0, 8))
    whole = tags(Loader(source=tagged(120), transform=TAG, seed=0, batch_size=30).batches(0, 8))
    replaced = [(a, b) for a, b in zip(tags(batches), whole, strict=True) if a != b]
    assert [b for _, b in replaced] == [7, 7]
    assert tags(batches) == indices(batches)
    assert all((batch.images[:, 0, 0, 0] % 2 == batch.labels).all() for batch in batches)
    assert list(loader.unreadable) == [source.paths[7]]


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_readable_stops_at_once(tmp_path, workers):
    source = folder(tmp_path, 10, damaged=range(10))
    loader = Loader(source=source, transform=TAG, seed=0, batch_size=5, workers=workers)
    with pytest.raises(UserError, match=r"^[^\n]*\.png: [^\n]*$"):
        next(loader.batches(0, 100))


def test_more_than_one_in_a_hundred_stops():
    failures = [Unreadable(f"{i}.jpg", "damaged") for i in range(4)]
    Tally(250).add(250, failures[:2])  # 0.8 %
    with pytest.raises(UserError, match=r"^4 of 250 [^\n]* 1%[^\n]* 0\.jpg: damaged$"):
        Tally(250).add(250, failures)  # 1.6 %


def test_few_failures_early_in_a_large_set_do_not_stop():
    failures = [Unreadable(f"{i}.jpg", "damaged") for i in range(200)]
    Tally(100_000).add(299, failures)  # too few seen to judge
    tally = Tally(100_000)
    tally.add(400, failures[:9])  # 2.25 %, by chance perhaps: 4 expected, 6 more allowed
    for _ in range(5):
        tally.add(0, failures[:9])  # seen again, they count no more
    with pytest.raises(UserError, match="11 of 401"):
        tally.add(1, failures[9:11])


class _Exits:
    """A transform in which the worker is killed, as for lack of memory."""

    def __call__(self, images: list[Tensor], slots: Tensor, seed: int) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@pytest.fixture
def polling(monkeypatch):
    """Make torch look for dead workers every 0.1 seconds instead of every 5."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)


@pytest.mark.parametrize("transform", [_Exits(), TAG])
def test_a_dead_worker_is_reported_in_one_line(tmp_path, transform, polling):
    """A worker is killed while it reads, or while the main process has not yet received its batches."""
    batches = Loader(source=folder(tmp_path, 10), transform=transform, seed=0, batch_size=5, workers=1).batches(0, 100)
    if transform is TAG:
        next(batches)
        time.sleep(0.5)
        active_children()[0].kill()
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        list(batches)


class _Stopping:
    """A transform that stops its process."""

    def __call__(self, images, slots, seed):
        os.kill(os.getpid(), signal.SIGSTOP)
        return TAG(images, slots, seed)


def test_a_stopped_worker_is_reported_after_the_timeout(tmp_path, polling):
    loader = Loader(source=folder(tmp_path, 10), transform=_Stopping(), seed=0, batch_size=5, workers=1, timeout=0.5)
    with pytest.raises(UserError, match=r"^loader_timeout=0\.5: [^\n]*$"):
        list(loader.batches(0, 100))
    assert not active_children()


SETUP = """
import multiprocessing, resource, sys, time
import torch
from ssvit.data.augment.options import CenterCrop
from ssvit.data.loader import Loader
from ssvit.data.sources.files import Files
from ssvit.errors import UserError

def batches(images=64, batch_size=8, workers=2, transform=CenterCrop(size=4).build()):
    source = Files([sys.argv[1]] * images)
    loader = Loader(source=source, transform=transform, seed=0, batch_size=batch_size, workers=workers)
    return loader.batches(0, 10_000)
"""
SMALL = """
class Large:
    def __call__(self, images, slots, seed):
        return torch.zeros(len(images), 3, 500, 500, dtype=torch.uint8)

try:
    next(batches(512, 256, transform=Large()))
except UserError as error:
    print(error)
"""
FEW = """
import os
for limit in sys.argv[2:]:
    if os.fork() == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit),) * 2)
        list(batches(workers=8))
    os.wait()
    print("end", file=sys.stderr)
"""
ORPHANS = """
multiprocessing.set_start_method(sys.argv[3])
multiprocessing.set_forkserver_preload(["ssvit.data.loader"])
images = batches()
next(images), next(images)  # one of each worker, which has then taken its signals
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
if sys.argv[2] == "wait":
    time.sleep(60)
raise RuntimeError("a mistake in the loop")
"""


def test_too_small_a_shared_memory_is_reported(tmp_path):
    Image.new("RGB", (6, 6)).save(tmp_path / "a.png")
    (tmp_path / "small.py").write_text(SETUP + SMALL)
    mounted = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mounted], capture_output=True, timeout=LIMIT).returncode:
        pytest.skip("needs the right to mount a small /dev/shm")
    command = f"{mounted} && exec '{sys.executable}' '{tmp_path}/small.py' '{tmp_path}/a.png'"
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, timeout=LIMIT)
    assert "/dev/shm" in done.stdout
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_too_low_a_limit_of_open_files_is_reported(tmp_path):
    Image.new("RGB", (6, 6)).save(tmp_path / "a.png")
    limits = ["30", "50"]  # too few for the workers and for the tensors that they share
    command = [sys.executable, "-W", "ignore", "-c", SETUP + FEW, str(tmp_path / "a.png"), *limits]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    *errors, rest = done.stderr.split("end\n")
    assert (len(errors), rest) == (2, "")
    for error in errors:
        assert error.splitlines()[-1].startswith("ssvit.errors.UserError: ")
        assert "ulimit -n" in error.splitlines()[-1]
        assert error.count("Traceback") == 1


def test_an_error_of_the_transform_reaches_the_user_in_one_line(tmp_path):
    loader = Loader(
        source=folder(tmp_path, 10), transform=ShiftCrop(size=50, padding=6).build(), seed=0, batch_size=5, workers=1
    )
    with pytest.raises(UserError, match=r"^[^\n]*\b\dx6\b[^\n]*\bpadding=6$"):
        list(loader.batches(0, 2))


def run_orphans(tmp_path: Path, then: str, method: str = "fork") -> tuple[subprocess.Popen, list[int]]:
    Image.new("RGB", (6, 6)).save(tmp_path / "a.png")
    command = [sys.executable, "-c", SETUP + ORPHANS, str(tmp_path / "a.png"), then, method]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return process, [int(pid) for pid in process.stdout.readline().split()]


def wait_until_gone(pids: list[int]) -> bool:
    until = time.monotonic() + LIMIT
    while (left := alive().keys() & pids) and time.monotonic() < until:
        time.sleep(0.05)
    return not left


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_ignore_signals_and_die_with_the_main_process(tmp_path, method):
    process, pids = run_orphans(tmp_path, "wait", method)
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.3)
    assert alive().keys() >= set(pids)
    if method == "fork":
        os.kill(pids[0], signal.SIGSTOP)
    process.kill()
    process.wait()
    assert wait_until_gone(pids)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_an_error_amid_the_batches_leaves_no_worker(tmp_path):
    process, pids = run_orphans(tmp_path, "raise")
    assert process.wait(timeout=LIMIT) == 1
    assert wait_until_gone(pids)


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_has_each_readable_image_once_in_order(tmp_path, workers):
    batches = list(evaluation_batches(folder(tmp_path, 120, damaged=[3]), TAG, batch_size=7, workers=workers))
    readable = [i for i in range(120) if i != 3]
    assert tags(batches) == torch.cat([batch.slots for batch in batches]).tolist() == readable
    assert torch.cat([batch.labels for batch in batches]).tolist() == [i % 2 for i in readable]


@pytest.mark.parametrize("limit", [None, 1, 22, 200])
def test_evaluation_parts_add_up(limit):
    whole = tags(evaluation_batches(tagged(50), TAG, batch_size=7, limit=limit))
    assert len(whole) == min(limit or 50, 50)
    assert whole == sorted(set(whole))
    parts = [tags(evaluation_batches(tagged(50), TAG, batch_size=7, limit=limit, rank=r, world=4)) for r in range(4)]
    assert [tag for part in parts for tag in part] == whole


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 12, "world": 5}, r"^batch_size=12: .*\b5 \* 1\b"),
        ({"batch_size": 12, "accumulate": 8}, "^batch_size=12: "),
        ({"batch_size": 51}, r"^batch_size=51: .*\b50\b"),
    ],
)
def test_wrong_options_are_named(options, words):
    with pytest.raises(OptionError, match=words):
        Loader(source=tagged(50), transform=TAG, seed=0, **options)


def test_waiting_is_counted(tmp_path):
    loader = Loader(source=folder(tmp_path, 20), transform=TAG, seed=0, batch_size=10)
    assert loader.waited == 0
    list(loader.batches(0, 2))
    assert loader.waited > 0


@pytest.fixture
def device(monkeypatch):
    """A simulated GPU with a log of the operations of each stream, and a clock in seconds."""
    gpu = SimpleNamespace(current="main", log=[], clock=0.0)

    class Event:
        def __init__(self, enable_timing):
            self.query = lambda: True

        def record(self, name):
            self.time = gpu.clock
            gpu.log.append(f"event on {name}")

        def elapsed_time(self, later):
            return 1000 * (later.time - self.time)

    def stream_called(name):
        wait = lambda other: gpu.log.append(f"{name} waits for {other.name}")  # noqa: E731
        return SimpleNamespace(name=name, wait_stream=wait, record_event=lambda event: event.record(name))

    @contextlib.contextmanager
    def stream(chosen):
        gpu.current = chosen.name
        yield
        gpu.current = "main"

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream_called("main"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream_called("side"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    record = lambda tensor, stream: gpu.log.append(f"recorded on {stream.name}")  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    return gpu


def test_batches_for_a_gpu_are_made_on_a_second_stream_for_which_the_step_waits(device, monkeypatch):
    crop = InceptionCrop(size=16, scale=(0.5, 1.0)).build()
    loader = Loader(source=tiny.labelled(), transform=crop, seed=0, batch_size=8)
    expected = list(loader.batches(0, 2))

    def logged(units):
        for unit in units:
            device.log.append(f"made on {device.current}")
            device.clock += 0.5
            yield expected[unit]

    monkeypatch.setattr(loader, "_from_memory", logged)
    loader.device, loader.waited = "cuda", 0.0
    assert list(loader.batches(0, 2)) == expected
    of_one = ["event on main", "made on side", "main waits for side", "event on main", *["recorded on main"] * 4]
    assert device.log == ["side waits for main", *of_one, *of_one, "event on main"]
    assert loader.waited == 1.0


def test_workers_end_even_if_a_killed_one_held_the_lock_of_their_event(monkeypatch, polling):
    monkeypatch.setattr("ssvit.engine.private._GRACE", 0.1)
    batches = iter(DataLoader(range(8), num_workers=2, batch_size=2))
    next(batches)
    batches._workers_done_event._cond.acquire()
    batches._workers[0].kill()
    batches._workers[0].join()
    ended = threading.Thread(target=end_workers, args=(batches,), daemon=True)
    ended.start()
    ended.join(LIMIT)
    assert not ended.is_alive()
    batches._workers[1].join(LIMIT)
    assert not any(worker.is_alive() for worker in batches._workers)
