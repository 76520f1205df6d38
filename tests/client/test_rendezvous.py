"""Where a process looks for a daemon, and the files that it hands over."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from warpwatch import rendezvous


def test_folders_are_searched_in_order_and_each_has_an_inbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(**environ: str) -> list[tuple[str, bool, str]]:
        folders = rendezvous.candidates(environ, 7)
        return [(*folder, rendezvous.inbox(folder, environ, 7)) for folder in folders]

    system, own = ("/run/warpwatch", False), ("/tmp/warpwatch-7", False, "/tmp/warpwatch-7/inbox")
    monkeypatch.setattr(rendezvous, "SYSTEM_INBOX", str(tmp_path / "none"))
    assert found() == [(*system, str(tmp_path / "none")), own]
    runtime = ("/run/user/7/warpwatch", False, "/tmp/warpwatch-7/inbox")
    assert found(XDG_RUNTIME_DIR="/run/user/7")[1:] == [runtime, own]
    assert found(WARPWATCH_DIR="/x") == [("/x", True, "/x/inbox")]
    assert found(WARPWATCH_DIR="/x", WARPWATCH_INBOX="/y") == [("/x", True, "/y")]
    monkeypatch.setattr(rendezvous, "SYSTEM_INBOX", str(tmp_path))
    assert found(WARPWATCH_DIR="/x") == [("/x", True, str(tmp_path))]


def test_a_file_appears_complete_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        rendezvous.write(fd, b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rendezvous.hand_over(str(tmp_path / "c-1"), ".json", fail)
    assert list(tmp_path.iterdir()) == []
    before = os.umask(0o077)
    token = rendezvous.hand_over(
        str(tmp_path / "c-1"), ".json", lambda fd: rendezvous.write(fd, b"1")
    )
    os.umask(before)
    (path,) = tmp_path.iterdir()
    assert (path.name, path.read_bytes()) == (f"c-1.{token}.json", b"1")
    assert path.stat().st_mode & 0o777 == 0o644
    # An inbox that may be entered, but not written.
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)
    assert rendezvous.inbox_problem(str(tmp_path)) == "no_inbox"


LOCKS = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
for how in (fcntl.LOCK_SH, fcntl.LOCK_EX):
    fcntl.lockf(file, how, 1)
    print(flush=True)
    sys.stdin.readline()
"""


def test_a_lock_that_any_reader_may_take_is_no_daemons(tmp_path: Path) -> None:
    path, pipe = tmp_path / "daemon.lock", subprocess.PIPE
    path.touch()
    command = [sys.executable, "-c", LOCKS, str(path)]
    with (
        path.open("rb") as file,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        for holder in (None, process.pid):
            process.stdout.readline()
            assert rendezvous.lock_holder(file.fileno()) == holder
            process.stdin.write("\n")
            process.stdin.flush()


@pytest.mark.parametrize("chunk_bytes", [4, 5, 7, 100])
def test_events_are_counted_over_the_borders_of_chunks(chunk_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "_CHUNK_BYTES", chunk_bytes)
    source, packed, beats = tmp_path / "trace", tmp_path / "packed", list[int]()
    source.write_bytes(b'{"ph":"X"},"ph""ph"')
    with packed.open("wb") as file:
        events = rendezvous.write_gzip(str(source), file.fileno(), lambda: beats.append(1))
    assert (events, len(beats)) == (3, -(-19 // chunk_bytes))
