"""Atomic writing of files that survives a power cut, and checksums that reveal damage. Standard library only."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO
from weakref import WeakSet

from ssvit.errors import UserError

MANIFEST_BYTES = 1 << 25  # maximum size of a manifest: hostile JSON takes about 20 times the memory when it is parsed


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Set the file name of an OSError raised in the block if it has no name, such as for a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write within the block, and flush it to the disk afterwards. An OSError names the file."""
    with naming(path), open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write(path: Path, data: bytes | memoryview) -> None:
    """Write a file and wait until it is on the disk; its name is on the disk after `synchronise` of its folder."""
    with written(path) as file:
        file.write(data)


def replace(path: Path, data: bytes | memoryview) -> None:
    """Write a file completely or not at all: the old file stays until the new one is complete.

    Of several processes that replace a file at the same time, the last one to finish determines its content.
    """
    beside = path.with_name(f".{path.name[:40]}.{os.getpid()}.part")  # file systems limit the length of a name
    try:
        write(beside, data)
        beside.replace(path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)  # not the temporary file
        raise


def write_files(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """Write files by their names into a folder, each completely or not at all; return their paths.

    Raises:
        UserError: A file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            replace(folder / name, data)
        synchronise(folder)
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be written ({error.strerror or error})") from None
    return [folder / name for name in files]


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """Yield a folder next to `target`, which takes its place after the block; the old one stays if the block fails.

    Raises:
        UserError: Another process is replacing the folder.
    """
    part, old, busy = (target.with_name(f".{target.name}.{suffix}") for suffix in ("part", "old", "lock"))
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(busy, lambda holder: UserError(f"{target}: {holder} is writing to it")):
        remove(part)
        part.mkdir()
        try:
            yield part
            synchronise(part)
            if target.exists():
                remove(old)
                target.rename(old)
            part.rename(target)
            synchronise(target.parent)
        finally:
            if old.exists() and not target.exists():  # renaming the new folder failed
                old.rename(target)
            remove(part)
            remove(old)


def synchronise(path: Path) -> None:
    """Flush a folder's entries, or the content of a file, to the disk."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def lock(path: Path, refusal: Callable[[str], Exception]) -> TextIO:
    """Lock a file, which then contains this process's id and host, until the returned file is closed.

    Args:
        path: The lock file, created where there is none. The system releases the lock of a process that is killed.
        refusal: Builds the exception raised where another process holds the lock, from that process's id and host.
    """
    file = open(path, "a+")  # noqa: SIM115 (closing it releases the lock)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The process that held the lock may have removed the file meanwhile.
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):
        file.seek(0)
        holder = file.read() or "another process"
        file.close()
        raise refusal(holder) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _locks.add(file)
    return file


_locks: WeakSet[TextIO] = WeakSet()  # the files that `lock` has returned


def _close_locks() -> None:
    """Close the locked files in a forked process: a worker that outlives its parent must not hold the lock."""
    for file in _locks:
        file.close()


os.register_at_fork(after_in_child=_close_locks)


@contextmanager
def locked(path: Path, refusal: Callable[[str], Exception]) -> Iterator[None]:
    """Hold the lock of `lock` during the block, and remove its file afterwards."""
    with lock(path, refusal):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder during the block; other processes wait for it, where the file system has such locks."""
    with ExitStack() as stack:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def remove(path: Path) -> None:
    """Delete a file, a link or a folder with its content; errors are ignored."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def check_regular(path: Path) -> None:
    """Raise OSError unless `path` is a regular file, as opposed to a pipe, a device or a folder."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_json(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the object in a JSON file, such as a manifest, and the file's bytes.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file contains no JSON object, or exceeds MANIFEST_BYTES.
        RecursionError: The JSON is nested too deeply.
    """
    check_regular(path)
    with naming(path), open(path, "rb") as file:
        data = file.read(MANIFEST_BYTES + 1)
    if len(data) > MANIFEST_BYTES:
        raise ValueError(f"larger than {MANIFEST_BYTES:,} bytes")
    content = json.loads(data)
    if not isinstance(content, dict):
        raise ValueError("must contain a JSON object")
    return content, data


def check_schema(stored: object, expected: int, path: Path, error: Callable[[str], Exception]) -> None:
    """Check the number of a stored format.

    Args:
        stored: The number in the file, None if there is none.
        expected: The number of the format that this version reads and writes.
        path: The file or its folder.
        error: The class of the error.

    Raises:
        error: The numbers differ; one line names both.
    """
    if stored != expected:
        age = "a newer" if isinstance(stored, int) and stored > expected else "an older"
        raise error(f"{path}: has schema {stored}, and this version of ssvit reads {expected}: {age} version wrote it")


def sealed(manifest: Mapping[str, object]) -> bytes:
    """Return the text of a manifest: its entries and their checksum, which replaces an older one."""
    data = json.dumps({**manifest, "seal": seal(manifest)}, indent=1).encode()
    if len(data) > MANIFEST_BYTES:
        raise OSError(
            errno.EFBIG, f"a manifest of {len(data):,} bytes exceeds the limit of {MANIFEST_BYTES:,} for reading it"
        )
    return data


def seal(manifest: Mapping[str, object]) -> str:
    """Return the sha256 of a manifest without its checksum, which reveals any changed bit."""
    manifest = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
