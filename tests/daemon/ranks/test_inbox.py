"""The inbox is everyone's: what is taken over from it, and that nothing stops its sweep."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
from pathlib import Path

import pytest

from warpwatch_daemon.ranks import inbox
from warpwatch_daemon.ranks.directory import Directory
from warpwatch_daemon.ranks.inbox import InboxError

DEPTH = 1100
OWN = os.getuid()


@pytest.fixture
def abyss(tmp_path):
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


def take(folder: Path, uid: int = OWN) -> int:
    return inbox.take(Directory(folder), "a.json", uid, folder / "taken")


def test_a_file_is_moved_out_of_the_inbox(tmp_path):
    (tmp_path / "a.json").write_bytes(b"{}")
    assert take(tmp_path) == 2
    assert (tmp_path / "taken").read_bytes() == b"{}"
    assert not (tmp_path / "a.json").exists()


HOLES = 1 << 30
TOO_LARGE = inbox.MAX_FILE_BYTES + 1


@pytest.mark.parametrize(
    ("content", "size", "uid", "said"),
    [
        (b"", HOLES, OWN, "has holes"),
        (b"{" + bytes(99_999), HOLES, OWN, "has holes"),
        (b"", TOO_LARGE, OWN, f"has {TOO_LARGE} bytes, at most {TOO_LARGE - 1}"),
        (None, 2, OWN, "has 2 links"),
        (b"", 0, 4711, f"belongs to uid {OWN}, not 4711"),
    ],
)
def test_a_file_that_may_not_be_believed_is_not_taken(tmp_path, content, size, uid, said):
    (tmp_path / "a.json").write_bytes(content or b"")
    os.truncate(tmp_path / "a.json", size)
    if content is None:
        os.link(tmp_path / "a.json", tmp_path / "b.json")
    with pytest.raises(InboxError, match=rf"a\.json {said}"):
        take(tmp_path, uid)
    assert not (tmp_path / "taken").exists()


def test_a_store_without_room_takes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(inbox, "MIN_FREE_BYTES", 1 << 60)
    (tmp_path / "a.json").write_bytes(b"{}")
    with pytest.raises(OSError) as raised:
        take(tmp_path)
    assert raised.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_what_is_old_is_swept_however_deep_it_lies(tmp_path, abyss):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "kept").touch()
    (abyss / "wide").mkdir()
    (abyss / "wide" / "file").touch()
    (abyss / "wide" / "link").symlink_to(secret)
    (abyss / "link").symlink_to(secret)
    (abyss / "zzz.json").touch()
    made = abyss.stat().st_ctime
    assert inbox.sweep(Directory(abyss), 3600.0, made + 3500) == 0
    # As often as it takes on a busy machine: a sweep ends early.
    while inbox.sweep(Directory(abyss), 3600.0, made + 3700):
        pass
    assert os.listdir(abyss) == []
    assert os.listdir(secret) == ["kept"]


def test_a_file_that_a_clock_ahead_has_dated_is_swept_too(tmp_path):
    (tmp_path / "a.json").touch()
    made = (tmp_path / "a.json").stat().st_ctime
    assert inbox.sweep(Directory(tmp_path), 3600.0, made - 3500) == 0
    assert inbox.sweep(Directory(tmp_path), 3600.0, made - 3700) == 1


def test_a_sweep_ends_in_time_where_nothing_is_old(tmp_path):
    for number in range(100):
        (tmp_path / f"{number}.json").touch()
    now = tmp_path.stat().st_ctime
    # A second passes at each look at the clock.
    seconds = itertools.count()
    swept = inbox.sweep(
        Directory(tmp_path), 3600.0, now, limit_s=10.0, monotonic=lambda: next(seconds)
    )
    assert swept == 0
    assert next(seconds) == 11


def test_folders_get_little_time_and_files_go_first(tmp_path, monkeypatch):
    monkeypatch.setattr(inbox, "SWEEP_FOLDERS_S", 0.0)
    (tmp_path / "folder").mkdir()
    (tmp_path / "zzz.json").touch()
    assert inbox.sweep(Directory(tmp_path), -1.0, tmp_path.stat().st_ctime) == 1
    assert os.listdir(tmp_path) == ["folder"]
