"""Limits on captures, the order in which they are finished, and the store's retention."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.daemon.captures.capture_node import ANOTHER, AUTOMATIC, MANUAL
from tests.daemon.state.counted import counted
from tests.manual_clock import ManualClock
from warpwatch_capturing.config import StoreConfig, TriggersConfig
from warpwatch_capturing.policy import Disk, DiskSpace, Policy
from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.store import Store
from warpwatch_capturing.store import orphan as leftover
from warpwatch_daemon.state.hub import Hub
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.errors import Refused

# 2026-09-21 23:30:00 UTC.
LATE_S = 1790033400.0


def policy(store: Path, **triggers: Any) -> Policy:
    return Policy(TriggersConfig(**triggers), Disk(store), lambda: LATE_S)


def test_budgets_and_cooldowns_go_on_after_a_restart(node):
    node.service.request(AUTOMATIC)
    node.clock.advance(300)
    node.restart(TriggersConfig(captures_per_day=1))
    judge = node.service.policy
    with pytest.raises(Refused, match="captures_per_day is 1"):
        judge.check(replace(AUTOMATIC, anomaly_id="a9", anomaly_kind="hang"), (), node.at)
    with pytest.raises(Refused, match="cooldown_s leaves 300 s"):
        judge.check(ANOTHER, (), node.at)


class FakeDisk(Disk):
    """A disk of 1,000 MiB. free_mib: its next reading."""

    def __init__(self, free_mib: int, clock: ManualClock) -> None:
        self.free_mib = free_mib
        super().__init__(Path("/store"), clock.monotonic)

    def _read(self) -> DiskSpace:
        return DiskSpace(1000 << 20, self.free_mib << 20)


def test_a_disk_that_is_full_or_gone_or_hangs_is_a_refusal_without_touching_it(monkeypatch):
    clock = ManualClock()
    disk = FakeDisk(199, clock)
    judge = Policy(TriggersConfig(), disk)
    with pytest.raises(Refused, match=r"199 MiB free in /store, 200 MiB are needed") as refused:
        judge.check(MANUAL, (), 0.0)
    assert refused.value.reason == "refused_disk"
    disk.free_mib = 200
    disk.measure()
    disk.free_mib = 0
    clock.advance(60)
    judge.check(MANUAL, (), 0.0)
    clock.advance(1)
    with pytest.raises(Refused, match=r"/store has not answered for 61 s") as refused:
        judge.check(MANUAL, (), 0.0)
    assert refused.value.reason == "refused_disk"
    # The blocks kept for root are neither used nor free.
    usage = SimpleNamespace(total=10, used=3, free=5)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: usage)
        assert Disk(Path("/dev")).space() == DiskSpace(10, 5)
    with pytest.raises(Refused, match="gone: No such file or directory"):
        policy(Path("/gone")).check(MANUAL, (), 0.0)


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
    assert leftover(store.path / "none", NOW).time == NOW
    # An empty folder goes after an hour.
    assert [path.exists() for path in (empty, new_one)] == [False, True]
    assert counted(hub, "store_bytes") == 7313
    retained(store, NOW + 1.5 * DAY)
    assert [path.exists() for path in (young, other)] == [False, True]


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
        "import sys; from warpwatch_capturing.store import Store\n"
        "from warpwatch_daemon.config import StoreConfig\n"
        "Store(StoreConfig(url=sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, first.config.url]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "is another daemon's capture store; set store.url" in done.stderr
    assert first.path == tmp_path
