"""The other processes of a run: when one ends, the others end at once, with one line that says so.

Each process keeps a connection to the main one. The system closes it when a process ends, however it ends, so the
others know at once; NCCL alone would wait for its time-out.
"""

import contextlib
import os
import re
import secrets
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning_fabric import Fabric

from ssvit.options import UserError

GRACE = 1.0  # seconds in which the main thread can raise PeerGone by itself, before the process ends
_LONGEST = 2000  # characters of another process's failure that are shown
_BROKEN = re.compile(r"connection (closed|reset|refused)|broken pipe|timed? ?out", re.IGNORECASE)


class PeerGone(UserError):
    """Another process of the run has ended, has failed, or does not answer."""


class Shared(UserError):
    """A failure that all processes have agreed on: each raises it by itself."""


class Peers:
    """The connections of this process, made by all processes of a launched Fabric together; a thread reads each.

    timeout: seconds to wait for another process; the process group has the same.
    """

    def __init__(self, fabric: Fabric, timeout: float) -> None:
        self.rank, self.world, self.timeout = fabric.global_rank, fabric.world_size, timeout
        self._inside, self._blocks = False, 0
        self._ended: dict[int, int] = {}  # by rank: how many blocks it has ended
        self._lost: dict[int, str] = {}  # by rank: why, "" if that is not known
        self._changed = threading.Condition()
        self._links = self._connect(fabric)
        for rank, link in self._links.items():
            threading.Thread(target=self._listen, args=(rank, link), daemon=True, name=f"rank {rank}").start()
        # A data worker that outlives its process for a moment must not seem to be it.
        os.register_at_fork(after_in_child=self._forget)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """While the block runs, this process needs all others; each must enter the same blocks, which may be nested.

        PeerGone if one of them ends before it has left the block. If the main thread cannot raise it, since it waits
        for that process, the line is printed and this process ends.
        """
        if self._inside:
            yield
            return
        self._inside, self._blocks = True, self._blocks + 1
        try:
            if self.missing():
                raise PeerGone(self._line())
            yield
        except BaseException as error:
            with self._changed:
                self._inside = False
                self._changed.notify_all()
            if self._is_broken(error):
                raise PeerGone(self._line()) from None
            if isinstance(error, Shared):
                self._tell(f"ended {self._blocks}")
            elif not isinstance(error, PeerGone):
                text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                self._tell(f"failed {' '.join(text.split())[:_LONGEST]}")
            raise
        with self._changed:
            self._inside = False
            self._changed.notify_all()
        self._tell(f"ended {self._blocks}")

    def close(self) -> None:
        """End the connections."""
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _forget(self) -> None:
        for link in self._links.values():
            os.close(link.detach())
        self._links = {}

    def _connect(self, fabric: Fabric) -> dict[int, socket.socket]:
        """A connection to each other process in the main one, and to that one in the others."""
        if self.rank:
            told: tuple[int, str] | None = fabric.broadcast(None)
            assert told is not None
            port, word = told
            link = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=self.timeout)
            link.sendall(f"{word} {self.rank}\n".encode())
            link.settimeout(None)
            return {0: link}
        links: dict[int, socket.socket] = {}
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
            word = secrets.token_hex(16)
            fabric.broadcast((server.getsockname()[1], word))
            server.settimeout(self.timeout)
            while len(links) < self.world - 1:
                link, _ = server.accept()
                link.settimeout(self.timeout)
                line = b""
                with contextlib.suppress(OSError):
                    line = link.makefile("rb", buffering=0).readline(100)  # byte by byte: what follows is left unread
                given, _, rank = line.decode(errors="replace").strip().partition(" ")
                if given == word:
                    link.settimeout(None)
                    links[int(rank)] = link
                else:
                    link.close()  # somebody else's
        return links

    def _listen(self, rank: int, link: socket.socket) -> None:
        """Follow the messages of another process until its end."""
        with contextlib.suppress(OSError):
            for line in link.makefile("r", encoding="utf-8", errors="replace"):
                kind, _, rest = line.rstrip("\n").partition(" ")
                if kind == "ended":
                    self._ended[rank] = int(rest)
                elif kind == "failed":
                    self._lose(rank, rest)
                elif kind == "lost":  # the main process, of another one
                    other, ended, why = rest.split(" ", 2)
                    self._ended[int(other)] = int(ended)
                    self._lose(int(other), why)
        self._lose(rank, "")

    def _lose(self, rank: int, why: str) -> None:
        with self._changed:
            if rank in self._lost or rank == self.rank:
                return
            self._lost[rank] = why
            self._changed.notify_all()
        if self.rank == 0:
            self._tell(f"lost {rank} {self._ended.get(rank, 0)} {why}")
        with self._changed:
            if self._changed.wait_for(lambda: not (self._inside and self.missing()), GRACE):
                return
        os.write(2, f"{Path(sys.argv[0]).name}: {self._line()}\n".encode(errors="backslashreplace"))
        os._exit(1)

    def missing(self) -> list[int]:
        """Those that have ended before leaving the block that this process is in, or was in last."""
        return [rank for rank in self._lost if self._ended.get(rank, 0) < self._blocks]

    def _is_broken(self, error: BaseException) -> bool:
        """Whether an error is what a backend makes of another process's end, and no fault of this one."""
        of_backend = isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()
        if not (isinstance(error, RuntimeError) and of_backend):
            return False
        with self._changed:  # the backend can be faster than the thread that learns which process it was
            return bool(self._changed.wait_for(self.missing, GRACE)) or bool(_BROKEN.search(str(error)))

    def _line(self) -> str:
        missing = self.missing()
        if not missing:
            return f"another of the {self.world} processes does not answer (fabric.timeout={self.timeout:g} seconds)"
        why = self._lost[missing[0]]
        return f"rank {missing[0]} of {self.world} {f'has failed: {why}' if why else 'is gone, so the others end too'}"

    def _tell(self, line: str) -> None:
        with self._changed:
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.sendall(f"{line}\n".encode())
