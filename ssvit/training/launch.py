"""Start and connect the processes of a run: those of torchrun or srun, or further processes of the same command."""

import atexit
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not exported

from ssvit.devices import Launch
from ssvit.engine.processes import Place, launched
from ssvit.engine.randomness import key
from ssvit.errors import UserError
from ssvit.training.recipe import Recipe
from ssvit.training.runtime import PeerGone, Processes, detect_lost_peers, precision

_GRACE = 30  # seconds until this process ends after a process that it has started has failed
T = TypeVar("T")


def start(recipe: Recipe, options: Launch) -> Processes:
    """Start the processes of a run, connect them, and return them.

    Args:
        recipe: The hyperparameters, with the precision and the seed.
        options: Options of devices and processes.

    Raises:
        UserError: The machine lacks the devices, or another process does not start in time.
    """
    local, place = _local_devices(options), launched()
    world = place.world if place and options.devices == "auto" else len(local) * options.num_nodes
    device = local[place.local_rank % len(local)] if place and world > 1 else local[0]
    is_sharded, rank = options.strategy == "fsdp", 0
    if world > 1 or is_sharded:
        try:
            if not distributed.is_initialized():
                _connect(place, world, device, options)
        except (ValueError, RuntimeError, OSError) as error:
            raise UserError(f"{_values(options)}: {' '.join(str(error).split())}") from None
        rank, world = distributed.get_rank(), distributed.get_world_size()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(key(recipe.seed, "weights"))
    return Processes(device, precision(recipe, device), rank=rank, world=world, is_sharded=is_sharded)


def in_all_processes(recipe: Recipe, options: Launch, function: Callable[[Processes], T]) -> T | None:
    """Call a function in all processes; afterwards only the main process continues.

    Args:
        recipe: The hyperparameters, with the precision.
        options: Options of devices and processes.
        function: The function, called with the processes.

    Returns:
        The result in the main process; None in all other processes, also after a UserError.
    """
    threads = torch.get_num_threads()
    processes = start(recipe, options)
    try:
        with detect_lost_peers():
            result = function(processes)
    except PeerGone:
        raise
    except UserError:
        if processes.is_main:
            raise
        return None
    destroy_process_group()
    torch.set_num_threads(threads)
    return result if processes.is_main else None


def destroy_process_group() -> None:
    """Destroy the process group; each process continues independently."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _values(options: Launch) -> str:
    return ", ".join(f"launch.{name}={getattr(options, name)}" for name in ("accelerator", "devices", "num_nodes"))


def _local_devices(options: Launch) -> list[torch.device]:
    """Return the devices of this machine, one for each of its processes."""
    text = str(options.devices).strip("[]")
    is_list = text != str(options.devices) or "," in text
    # Apple's MPS is excluded: it lacks float64, which random numbers and labels require.
    if options.accelerator == "cpu" or (options.accelerator == "auto" and not torch.cuda.is_available()):
        if is_list or text == "-1":
            raise UserError(f"{_values(options)}: must be auto or a number of processes on a CPU")
        return [torch.device("cpu")] * (1 if text == "auto" else int(text))
    available = torch.cuda.device_count()
    if is_list:
        indices = [int(index) for index in text.split(",")]
    else:
        indices = list(range(available if text in ("auto", "-1") else int(text)))
    if not indices or max(indices) >= available:
        raise UserError(f"{_values(options)}: must be among the {available} GPUs of this machine")
    return [torch.device("cuda", index) for index in indices]


def _connect(place: Place | None, world: int, device: torch.device, options: Launch) -> None:
    """Create the process group. Without a launcher, first start further processes on this machine."""
    rank, connected = 0, threading.Event()
    if world == 1:
        store: Store = HashStore()
    elif place:
        if world != place.world:
            raise ValueError(f"the launcher has started {place.world} processes, not {world}")
        rank, store = place.rank, _rendezvous(place, options.timeout)
    elif options.num_nodes > 1:
        raise ValueError("several machines require torchrun or srun")
    else:
        store = _start_others(world, options.timeout, connected)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (place.local_world if place else world)))
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=options.timeout),
        device_id=device if device.type == "cuda" else None,
    )
    connected.set()
    atexit.register(_end)


def _end() -> None:
    """End gloo's threads before the interpreter exits: one that frees a tensor later aborts (torch issue 190489).

    A sharded model keeps the threads running, and a reference cycle keeps the model alive.
    """
    destroy_process_group()
    gc.collect()


def _start_others(count: int, timeout: float, connected: threading.Event) -> Store:
    """Start further processes with the command line of this one, and return their common store.

    Args:
        count: Number of processes, including this one.
        timeout: Seconds to wait for other processes.
        connected: Is set when the processes are connected.
    """
    host = "127.0.0.1"
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    main = sys.modules["__main__"].__spec__
    program = [os.path.abspath(sys.argv[0])] if main is None else ["-m", main.name]
    world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    environment = {**os.environ, **world, "MASTER_ADDR": host, "MASTER_PORT": str(store.port)}
    others = [
        subprocess.Popen(
            [sys.executable, *program, *sys.argv[1:]],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(1, count)
    ]

    def watch() -> None:
        while not any(process.poll() for process in others):
            if all(process.poll() == 0 for process in others):
                return
            time.sleep(1)
        if is_alone := not connected.is_set():
            print(f"ssvit: launch.devices={count}: another process ended at its start", file=sys.stderr, flush=True)
        else:
            time.sleep(_GRACE)
        if is_alone or distributed.is_initialized():  # this process still waits for one that has failed
            for process in others:
                process.kill()
            os._exit(1)

    threading.Thread(target=watch, daemon=True, name="processes").start()
    return store


def _rendezvous(place: Place, timeout: float) -> Store:
    """Return the store of the processes of a launcher.

    torchrun's store survives a restart and keeps the addresses of dead processes: gloo then fails, and NCCL waits. It
    is used only to publish the port of a new store, which the main process serves.
    """
    host, port, is_main, limit = place.host, place.port, place.rank == 0, timedelta(seconds=timeout)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return TCPStore(host, port, is_master=is_main, wait_for_workers=False, timeout=limit)
    agent = PrefixStore("ssvit", TCPStore(host, port, is_master=False, timeout=limit))
    if not is_main:
        return TCPStore(host, _served_port(agent, host, timeout), is_master=False, timeout=limit)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
    agent.set("port", str(store.port))
    return store


def _served_port(store: Store, host: str, timeout: float) -> int:
    """Return the published port as soon as it accepts connections; the port of an earlier attempt is closed.

    Args:
        store: The store with the port of the main process.
        host: Host of the main process.
        timeout: Maximum number of seconds to wait.

    Raises:
        OSError: The main process has not started in that time.
    """
    until = time.monotonic() + timeout
    while True:
        port = int(store.get("port").decode())
        try:
            socket.create_connection((host, port), timeout).close()
            return port
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
        time.sleep(0.1)
