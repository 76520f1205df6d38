"""The capture store: what stays of it by age and quota, and what a power cut leaves."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.captures.capture_node import MANUAL
from tests.daemon.state.counted import counted
from warpwatch_daemon.captures.capture_register import CaptureRegister
from warpwatch_daemon.captures.store import Store
from warpwatch_daemon.config.sections import StoreConfig
from warpwatch_daemon.state.hub import Hub
from warpwatch_telemetry.captures import Capture

NOW = 1_800_000_000.0
DAY = 86400.0
New = Callable[..., Store]


@pytest.fixture
def new(tmp_path: Path) -> New:
    return lambda **limits: Store(StoreConfig(url=tmp_path.as_uri(), **limits))


def orphan(store: Store, name: str, age_s: float, trace: int = 0, record: bytes = b"") -> Path:
    """As a power cut leaves it: the record's name is on disk, its bytes are not."""
    folder = store.folder(name, NOW - age_s)
    folder.mkdir(parents=True)
    (folder / "capture.json").write_bytes(record)
    if trace:
        (folder / "rank0.pt.trace.json.gz").write_bytes(bytes(trace))
    os.utime(folder, (NOW - age_s, NOW - age_s))
    return folder


def capture(store: Store, name: str, age_s: float, trace: int = 0, **changes: Any) -> Capture:
    folder, request = store.folder(name, NOW - age_s), replace(MANUAL, **changes)
    made = Capture(name, request, NOW - age_s, folder=str(folder), outcome="complete")
    store.create(made)
    (folder / "rank0.pt.trace.json.gz").write_bytes(bytes(trace))
    return made


def retained(store: Store, now: float = NOW) -> tuple[Hub, CaptureRegister]:
    """The daemon that starts after the power cut."""
    hub = Hub(10.0)
    register = CaptureRegister(store, hub)
    register.retain(now)
    return hub, register


@pytest.mark.parametrize(
    ("limits", "after_s", "last", "kept"),
    [
        ({"max_captures": 2}, 0, set(), ["c2", "c3"]),
        # The baseline of a job that runs is not the first to go, but its age holds for it too.
        ({"max_captures": 2}, 0, {"c0"}, ["c0", "c3"]),
        ({"max_captures": 2, "max_age": 2.5 * DAY}, 0, {"c0"}, ["c2", "c3"]),
        ({"max_age": 3600.0}, 3600, set(), ["c3"]),
        ({"max_age": 3600.0}, 3601, set(), []),
        # The newest was just asked for.
        ({"max_bytes": 100}, 0, set(), ["c3"]),
    ],
)
def test_the_newest_captures_stay(new, limits, after_s, last, kept):
    store = new(**limits)
    captures = [capture(store, f"c{number}", (3 - number) * DAY) for number in range(4)]
    stay, size = store.retain(captures, NOW + after_s, last)
    assert [one.id for one in stay] == [one.id for one in store.load(10)] == kept
    assert (size > 0) == bool(kept)


def test_what_has_a_copy_goes_before_what_has_none(new):
    store = new(max_captures=2)
    captures = [capture(store, f"c{number}", (3 - number) * DAY) for number in range(3)]
    captures[1] = replace(captures[1], remote="s3://ours/elsewhere/")
    assert [one.id for one in store.retain(captures, NOW)[0]] == ["c0", "c2"]


def test_the_captures_of_who_has_the_most_give_way(new):
    store = new(max_bytes=100 << 10)
    # The newest is too large by itself, and the others' are small and old.
    captures = [
        capture(store, f"c{number}", (3 - number) * DAY, kib << 10, owner=owner)
        for number, (owner, kib) in enumerate((("ns/a", 10), ("ns/b", 10), ("ns/c", 95)))
    ]
    assert [one.id for one in store.retain(captures, NOW)[0]] == ["c0", "c1"]
    assert [one.id for one in store.load(10)] == ["c0", "c1"]


def test_what_a_power_cut_left_is_counted_and_removed_by_age(new):
    store = new(max_age=10 * DAY)
    old, young = orphan(store, "old", 11 * DAY, 5000), orphan(store, "young", 9 * DAY, 7000)
    empty, new_one = orphan(store, "empty", 3601.0), orphan(store, "new", 3599.0)
    # A record of another version stays for as long as a capture.
    other = orphan(store, "other", 8 * DAY, record=b'{"schema": 2}')
    nested = young / "more" / "deep"
    nested.mkdir(parents=True)
    (nested / "file").write_bytes(bytes(300))
    os.utime(young, (NOW - 9 * DAY, NOW - 9 * DAY))
    hub, _ = retained(store)
    assert [path.exists() for path in (old, young, other)] == [False, True, True]
    # An empty folder goes after an hour.
    assert [path.exists() for path in (empty, new_one)] == [False, True]
    assert counted(hub, "store_bytes") == 7313
    retained(store, NOW + 1.5 * DAY)
    assert [path.exists() for path in (young, other)] == [False, True]


def test_what_a_power_cut_left_takes_its_part_of_the_quotas(new):
    store = new(max_bytes=20_000)
    left = orphan(store, "left", 2 * DAY, 15_000)
    for name, age_s in (("newest", 60.0), ("older", DAY)):
        capture(store, name, age_s, 4000)
    hub, register = retained(store)
    assert not left.exists()
    assert [one.id for one in register.all()] == ["older", "newest"]
    assert 8000 < (counted(hub, "store_bytes") or 0) < 12_000


def test_many_small_leftovers_are_bounded_by_the_number_of_captures(new):
    store = new(max_captures=3)
    for number in range(8):
        orphan(store, f"left{number}", DAY + number, 10)
    capture(store, "newest", 60.0)
    retained(store)
    assert sorted(path.name for path in store.folders()) == ["left0", "left1", "newest"]


def test_a_capture_that_is_begun_meanwhile_is_not_taken_for_a_leftover(new, monkeypatch):
    store = new(max_captures=1)
    capture(store, "newest", 60.0)
    register = CaptureRegister(store, Hub(10.0))
    folder = store.folder("running", NOW)
    look = store.folders

    def begun_meanwhile():
        register.keep(Capture("running", MANUAL, NOW, folder=str(folder)))
        register.create("running")
        return look()

    monkeypatch.setattr(store, "folders", begun_meanwhile)
    register.retain(NOW)
    assert (folder / "capture.json").exists()


def test_a_capture_is_on_disk_before_it_takes_its_name(new, tmp_path, monkeypatch):
    store = new()
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def seen_fsync(fd: int) -> None:
        calls.append(f"fsync {os.readlink(f'/proc/self/fd/{fd}').rpartition('/')[2]}")
        fsync(fd)

    def seen_rename(old: str, new: str, **folders: int) -> None:
        calls.append(f"rename {new}")
        rename(old, new, **folders)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "rename", seen_rename)
    capture(store, "c1", 0.0)
    days = time.strftime("%Y/%m/%d", time.gmtime(NOW)).split("/")
    folders = [f"fsync {name}" for name in (tmp_path.name, *days)]
    record = ["fsync capture.json.part", "rename capture.json", "fsync c1"]
    assert calls == [*folders, *record]


def test_captures_are_their_daemons_alone(tmp_path):
    store = Store(StoreConfig(url=(tmp_path / "store").as_uri()))
    folder = Path(str(capture(store, "c1", 60.0).folder))
    modes = {
        stat.S_IMODE(path.stat().st_mode) for path in (store.path, folder, *folder.parents[:3])
    }
    assert modes == {0o700}
    for path in (folder / "capture.json", store.path / ".lock"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_second_daemon_on_the_store_is_refused(tmp_path, new):
    first = new()
    code = (
        "import sys; from warpwatch_daemon.captures.store import Store\n"
        "from warpwatch_daemon.config.sections import StoreConfig\n"
        "Store(StoreConfig(url=sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, first.config.url]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "is another daemon's capture store; set store.url" in done.stderr
    assert first.path == tmp_path
