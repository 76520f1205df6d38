"""What a power cut leaves in the capture store: it is counted, and goes by age and quota."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

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


def orphan(store: Store, name: str, age_s: float, trace: int = 0, record: bytes = b"") -> Path:
    """As a power cut leaves it: the record's name is on disk, its bytes are not."""
    folder = store.folder(name, NOW - age_s)
    folder.mkdir(parents=True)
    (folder / "capture.json").write_bytes(record)
    if trace:
        (folder / "rank0.pt.trace.json.gz").write_bytes(bytes(trace))
    os.utime(folder, (NOW - age_s, NOW - age_s))
    return folder


def capture(store: Store, name: str, age_s: float, trace: int = 0) -> Path:
    folder = store.folder(name, NOW - age_s)
    store.create(Capture(name, MANUAL, NOW - age_s, folder=str(folder), outcome="complete"))
    (folder / "rank0.pt.trace.json.gz").write_bytes(bytes(trace))
    return folder


def retained(store: Store, now: float = NOW) -> tuple[Hub, CaptureRegister]:
    """The daemon that starts after the power cut."""
    hub = Hub(10.0)
    register = CaptureRegister(store, hub)
    register.retain(now)
    return hub, register


def test_what_a_power_cut_left_is_counted_and_removed_by_age(tmp_path: Path) -> None:
    store = Store(StoreConfig(url=tmp_path.as_uri(), max_age=10 * DAY))
    old, young = orphan(store, "old", 11 * DAY, 5000), orphan(store, "young", 9 * DAY, 7000)
    nested = young / "more" / "deep"
    nested.mkdir(parents=True)
    (nested / "file").write_bytes(bytes(300))
    os.utime(young, (NOW - 9 * DAY, NOW - 9 * DAY))
    hub, _ = retained(store)
    assert not old.exists()
    assert young.exists()
    assert counted(hub, "store_bytes") == 7300
    retained(store, NOW + 2 * DAY)
    assert not young.exists()


def test_an_empty_folder_goes_after_an_hour(tmp_path: Path) -> None:
    store = Store(StoreConfig(url=tmp_path.as_uri()))
    old, young = orphan(store, "old", 3700.0), orphan(store, "young", 60.0)
    retained(store)
    assert not old.exists()
    assert young.exists()


def test_what_a_power_cut_left_takes_its_part_of_the_quotas(tmp_path: Path) -> None:
    store = Store(StoreConfig(url=tmp_path.as_uri(), max_bytes=20_000))
    left = orphan(store, "left", 2 * DAY, 15_000)
    newest, older = capture(store, "newest", 60.0, 4000), capture(store, "older", DAY, 4000)
    hub, register = retained(store)
    assert not left.exists()
    assert [one.id for one in register.all()] == ["older", "newest"]
    assert newest.exists()
    assert older.exists()
    assert 8000 < (counted(hub, "store_bytes") or 0) < 12_000


def test_many_small_leftovers_are_bounded_by_the_number_of_captures(tmp_path: Path) -> None:
    store = Store(StoreConfig(url=tmp_path.as_uri(), max_captures=3))
    for number in range(8):
        orphan(store, f"left{number}", DAY + number, 10)
    newest = capture(store, "newest", 60.0)
    retained(store)
    assert sorted(path.name for path in store.folders()) == ["left0", "left1", "newest"]
    assert newest.exists()


def test_a_record_of_another_version_stays_for_as_long_as_a_capture(tmp_path: Path) -> None:
    store = Store(StoreConfig(url=tmp_path.as_uri(), max_age=10 * DAY))
    other = orphan(store, "other", 9 * DAY, record=b'{"schema": 2}')
    hub, _ = retained(store)
    assert other.exists()
    assert counted(hub, "store_bytes") == 13


def test_a_capture_that_is_begun_meanwhile_is_not_taken_for_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(StoreConfig(url=tmp_path.as_uri(), max_captures=1))
    capture(store, "newest", 60.0)
    register = CaptureRegister(store, Hub(10.0))
    folder = store.folder("running", NOW)
    look = store.folders

    def begun_meanwhile() -> list[Path]:
        register.keep(Capture("running", MANUAL, NOW, folder=str(folder)))
        register.create("running")
        return look()

    monkeypatch.setattr(store, "folders", begun_meanwhile)
    register.retain(NOW)
    assert (folder / "capture.json").exists()


def test_a_capture_is_on_disk_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(StoreConfig(url=(tmp_path / "store").as_uri()))
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
    folder = store.folder("c1", NOW)
    store.create(Capture("c1", MANUAL, NOW, folder=str(folder), outcome="complete"))
    year, month, day = time.strftime("%Y/%m/%d", time.gmtime(NOW)).split("/")
    assert calls == [
        "fsync store",
        f"fsync {year}",
        f"fsync {month}",
        f"fsync {day}",
        "fsync capture.json.part",
        "rename capture.json",
        "fsync c1",
    ]


def test_captures_are_their_daemons_alone(tmp_path: Path) -> None:
    store = Store(StoreConfig(url=(tmp_path / "store").as_uri()))
    folder = capture(store, "c1", 60.0)
    made = [store.path, *folder.parents[:3], folder, folder / "capture.json"]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_dir()}
    assert modes == {0o700}
    assert stat.S_IMODE((folder / "capture.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((store.path / ".lock").stat().st_mode) == 0o600
