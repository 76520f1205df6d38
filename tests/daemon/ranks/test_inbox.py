"""The inbox is everyone's: what is taken over from it, and that nothing stops its sweep."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from warpwatch_daemon.ranks import inbox
from warpwatch_daemon.ranks.directory import Directory
from warpwatch_daemon.ranks.inbox import InboxError

DEPTH = 1100


@pytest.fixture
def abyss(tmp_path: Path) -> Iterator[Path]:
    """An inbox with folders in folders, deeper than any stack and any path."""
    folder = tmp_path / "inbox"
    folder.mkdir()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("a", dir_fd=here)
        below = os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    yield folder
    # What a sweep has left, pytest could not remove.
    subprocess.run(["rm", "-rf", folder], check=True)


def test_a_file_is_moved_out_of_the_inbox(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"{}")
    assert inbox.take(Directory(tmp_path), "a.json", os.getuid(), tmp_path / "taken") == 2
    assert (tmp_path / "taken").read_bytes() == b"{}"
    assert not (tmp_path / "a.json").exists()


@pytest.mark.parametrize("content", [b"", b"{" + bytes(99_999)])
def test_a_file_of_holes_does_not_fill_the_store(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    os.truncate(tmp_path / "a.json", 1 << 30)
    with pytest.raises(InboxError, match=r"a\.json has holes"):
        inbox.take(Directory(tmp_path), "a.json", os.getuid(), tmp_path / "taken")
    assert not (tmp_path / "taken").exists()


def test_a_store_without_room_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MIN_FREE_BYTES", 1 << 60)
    (tmp_path / "a.json").write_bytes(b"{}")
    with pytest.raises(OSError) as raised:
        inbox.take(Directory(tmp_path), "a.json", os.getuid(), tmp_path / "taken")
    assert raised.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_what_is_old_is_swept_however_deep_it_lies(tmp_path: Path, abyss: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "kept").touch()
    (abyss / "wide").mkdir()
    (abyss / "wide" / "file").touch()
    (abyss / "wide" / "link").symlink_to(secret)
    (abyss / "link").symlink_to(secret)
    (abyss / "zzz.json").touch()
    now = time.time()
    assert inbox.sweep(Directory(abyss), 3600.0, now) == 0
    # As often as it takes on a busy machine: a sweep ends early.
    while inbox.sweep(Directory(abyss), 3600.0, now + 4000):
        pass
    assert os.listdir(abyss) == []
    assert os.listdir(secret) == ["kept"]


def test_a_sweep_ends_in_time_where_nothing_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        (tmp_path / f"{number}.json").touch()
    # A second passes at each look at the clock.
    seconds = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    assert inbox.sweep(Directory(tmp_path), 3600.0, time.time(), limit_s=10.0) == 0
    assert next(seconds) == 11


def test_folders_get_little_time_and_files_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "SWEEP_FOLDERS_S", 0.0)
    (tmp_path / "folder").mkdir()
    (tmp_path / "zzz.json").touch()
    assert inbox.sweep(Directory(tmp_path), -1.0, time.time()) == 1
    assert os.listdir(tmp_path) == ["folder"]
