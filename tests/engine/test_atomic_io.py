"""Locks of files between processes, and files that several replace."""

import os
from pathlib import Path

import pytest

from ssvit.engine import atomic_io
from ssvit.errors import UserError


def test_a_forked_process_holds_no_lock(tmp_path: Path) -> None:
    (from_parent, to_child), (from_child, to_parent) = os.pipe(), os.pipe()
    with atomic_io.lock(tmp_path / "lock", ValueError):
        child = os.fork()
        if not child:
            os.close(to_child)
            os.write(to_parent, b"started")
            os.read(from_parent, 1)  # until the parent has closed its end
            os._exit(0)
        os.read(from_child, 1)
        with pytest.raises(ValueError, match=f"process {os.getpid()} on "):
            atomic_io.lock(tmp_path / "lock", ValueError)
    try:
        atomic_io.lock(tmp_path / "lock", ValueError).close()
    finally:
        os.close(to_child)
        os.waitpid(child, 0)


def test_a_lock_registers_no_handler_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.register_at_fork")
    atomic_io.lock(tmp_path / "lock", ValueError).close()


def test_of_several_processes_that_replace_a_file_each_writes_a_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = atomic_io.write

    def interrupted(path: Path, data: bytes) -> None:
        write(path, data)
        monkeypatch.setattr(atomic_io, "write", write)
        child = os.fork()
        if not child:
            atomic_io.replace(tmp_path / "file", b"other")
            os._exit(0)
        os.waitpid(child, 0)
        assert (tmp_path / "file").read_bytes() == b"other"

    monkeypatch.setattr(atomic_io, "write", interrupted)
    atomic_io.replace(tmp_path / "file", b"own")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"own"}


def test_only_one_process_replaces_a_folder(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with atomic_io.replaced_folder(target) as part:
        (part / "file").write_bytes(b"first")
        with pytest.raises(UserError, match=f"^{target}: "), atomic_io.replaced_folder(target):
            pass
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {"file": b"first"}
    assert [*tmp_path.iterdir()] == [target]


@pytest.mark.parametrize("letter", ["a", "\u00fc"])
def test_a_file_may_have_the_longest_name(tmp_path: Path, letter: str) -> None:
    name = letter * (255 // len(os.fsencode(letter)))
    atomic_io.replace(tmp_path / name, b"data")
    assert (tmp_path / name).read_bytes() == b"data"
