"""What the kernel says of ranks' processes: their signs, their memory, who killed them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.ranks.ring_files import RingFile
from warpwatch import protocol
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.process import OomKills, reading
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_devices.process_tree import Process, read_process
from warpwatch_telemetry.records import RankEvent

# A training process that takes a step and then works until it is asked to stop.
_TRAINING = """
import glob, os, sys, time
import warpwatch
monitor = warpwatch.attach(job="seen")
while not glob.glob(os.environ["WARPWATCH_DIR"] + "/ranks/*.ring"):
    with monitor.step():
        time.sleep(0.01)
print("running", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def training(folder: RendezvousFolder) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _TRAINING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "WARPWATCH_DIR": str(folder.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    yield process
    process.kill()
    process.communicate()


def events(source: RanksSource, name: str, at: float) -> list[RankEvent]:
    records = source.poll(time.time(), at)
    return [r for r in records if isinstance(r, RankEvent) and r.event == name]


def test_a_process_that_holds_its_ring_is_looked_at_every_two_seconds(
    source: RanksSource, training: subprocess.Popen[str]
) -> None:
    at = time.monotonic()
    (seen,) = events(source, "process", at)
    assert (seen.job, seen.rank) == ("seen", 0)
    assert seen.detail["cpu_s"] > 0
    assert seen.detail["io_bytes"] > 0
    assert 10**6 < seen.detail["anonymous_bytes"] < 10**9
    assert 0 < seen.detail["available_bytes"] < seen.detail["limit_bytes"]
    assert events(source, "process", at + 1.0) == []
    assert len(events(source, "process", at + 2.0)) == 1


def test_a_ring_that_names_anothers_process_says_nothing_of_it(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    # The file says this process, the kernel says who holds it.
    ring = RingFile(folder.ranks)
    with ring.held():
        ring.step()
        assert events(source, "process", time.monotonic()) == []


def test_what_the_allocator_says_is_an_event_of_its_own(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks)
    with ring.held():
        ring.record(
            protocol.RECORD_MEMORY, protocol.MEMORY.pack(100, 200, 150, 4, protocol.ABSENT, 30)
        )
        (seen,) = events(source, "memory", time.monotonic())
    assert seen.detail == {
        "allocated_bytes": 100,
        "reserved_bytes": 200,
        "peak_allocated_bytes": 150,
        "inactive_split_bytes": 30,
        "allocation_retries": 4,
    }


def test_a_client_cannot_say_what_only_the_kernel_may(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks)
    with ring.held():
        ring.record(protocol.RECORD_EVENT, b'{"event":"process","cpu_s":1}')
        assert events(source, "process", time.monotonic()) == []


def group(
    folder: Path, *, kills: int, limit: str = "max", current: int = 0, cache: int = 0
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    (folder / "memory.events").write_text(f"low 0\nmax 3\noom 1\noom_kill {kills}\n")
    return folder


def proc_of(folder: Path, pid: int, control_groups: str) -> Path:
    own = folder / str(pid)
    own.mkdir(parents=True)
    (own / "cgroup").write_text(control_groups)
    (own / "status").write_text("Name:\tpython\nVmRSS:\t 900 kB\nRssAnon:\t 700 kB\n")
    (own / "io").write_text("rchar: 40\nwchar: 2\nsyscr: 9\nread_bytes: 0\n")
    (folder / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 500 kB\n")
    return folder


def a_process(pid: int, parent: int = 1, state: str = "S", cpu_s: float = 1.0) -> Process:
    return Process(pid, state, parent, 5, cpu_s, 0.5, 4096, 0.0)


def test_a_reading_is_of_the_process_and_all_that_it_started(tmp_path: Path) -> None:
    proc = proc_of(tmp_path / "proc", 7, "0::/pods/a\n")
    child = proc_of(tmp_path / "proc", 8, "0::/pods/a\n")
    assert child == proc
    group(tmp_path / "cgroup", kills=0)
    group(tmp_path / "cgroup/pods/a", kills=0, limit="400000", current=300_000, cache=50_000)
    family = {7: a_process(7), 8: a_process(8, parent=7, state="D", cpu_s=2.0)}
    assert reading(family[7], family, proc, tmp_path / "cgroup") == {
        "cpu_s": 4.0,
        "io_bytes": 84,
        "disk_wait": True,
        "anonymous_bytes": 700 * 1024,
        "available_bytes": 150_000,
        "limit_bytes": 400_000,
    }


def test_what_may_not_be_read_is_left_out(tmp_path: Path) -> None:
    family = {7: a_process(7)}
    assert reading(family[7], family, tmp_path, tmp_path) == {"cpu_s": 1.5, "disk_wait": False}


def test_a_risen_count_of_the_innermost_group_that_is_left_tells_an_oom_kill(
    tmp_path: Path,
) -> None:
    pod, container = group(tmp_path / "pod", kills=2), group(tmp_path / "pod/c", kills=0)
    kills = OomKills()
    kills.note([container, pod])
    assert not kills.risen()
    # A neighbour in the same pod.
    group(pod, kills=3)
    assert not kills.risen()
    group(container, kills=1)
    assert kills.risen()
    # The container went with its process.
    kills.note([container, pod])
    for file in container.iterdir():
        file.unlink()
    assert not kills.risen()
    group(pod, kills=4)
    assert kills.risen()


def test_this_very_process_can_be_read() -> None:
    own = read_process(os.getpid())
    assert own is not None
    assert reading(own, {own.pid: own})["anonymous_bytes"] > 10**6
