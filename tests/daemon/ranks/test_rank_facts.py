"""What a rank tells beside its steps: memory, garbage collector, step clock, why it is silent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.daemon.ranks.ring_files import RingFile
from tests.daemon.ranks.sources import ranks_source
from warpwatch import protocol
from warpwatch_daemon.ranks.counts import RecentSteps
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.process import silent_reason
from warpwatch_daemon.ranks.saved import FILE
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_telemetry.records import RankEvent, RankSeen, Record, Step
from warpwatch_telemetry.state import RankState

# A training process: takes a step, then does what its argument says.
_TRAINING = """
import ctypes, glob, os, signal, sys, time
import warpwatch
monitor = warpwatch.attach(job="silent")
while not glob.glob(os.environ["WARPWATCH_DIR"] + "/ranks/*.ring"):
    with monitor.step():
        time.sleep(0.01)
if sys.argv[1] == "gil":
    print("holding", flush=True)
    # PyDLL keeps the GIL, as a C extension does that does not give it back.
    ctypes.PyDLL(None).usleep(ctypes.c_uint(60_000_000))
print("running", flush=True)
signal.pause()
"""


def newest(source: RanksSource) -> RankState:
    source.poll(time.time(), time.monotonic())
    (state,) = source.states(time.monotonic())
    return state


def gc(ring: RingFile, seconds: float, collections: int) -> None:
    ring.record(protocol.RECORD_GC, protocol.GC.pack(int(seconds * 1e9), collections, 10**6))


def memory(ring: RingFile, *words: int) -> None:
    ring.record(protocol.RECORD_MEMORY, b"".join(w.to_bytes(8, "little") for w in words))


def test_collections_and_memory_are_known_once_a_record_tells_them(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks)
    with ring.held():
        before = newest(source)
        assert (before.gc_s, before.gc_collections_total) == (None, None)
        assert (before.allocation_retries_total, before.memory_allocated_bytes) == (None, None)
        gc(ring, 0.5, 3)
        memory(ring, 100, 200, 150, 4, 1, 30)
        gc(ring, 0.75, 5)
        state = newest(source)
    assert (state.gc_s, state.gc_collections_total) == (0.75, 5)
    assert (state.memory_allocated_bytes, state.memory_reserved_bytes) == (100, 200)
    assert (state.memory_peak_allocated_bytes, state.memory_inactive_split_bytes) == (150, 30)
    assert (state.allocation_retries_total, state.out_of_memory_errors_total) == (4, 1)


def test_what_a_memory_record_does_not_know_is_absent_and_a_short_one_says_nothing(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks)
    with ring.held():
        memory(ring, 100, 200, protocol.ABSENT, 4, protocol.ABSENT, protocol.ABSENT)
        state = newest(source)
        assert (state.memory_reserved_bytes, state.allocation_retries_total) == (200, 4)
        assert state.memory_peak_allocated_bytes is None
        assert state.memory_inactive_split_bytes is None
        assert state.out_of_memory_errors_total is None
        memory(ring, 1, 2)
        assert newest(source).memory_reserved_bytes == 200


def test_a_successor_continues_the_counters_of_records_and_begins_without_memory(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    first = RingFile(folder.ranks)
    with first.held():
        gc(first, 2.0, 10)
        memory(first, 100, 200, 150, 4, 1, 30)
        newest(source)
    ended = newest(source)
    assert (ended.status, ended.gc_s, ended.allocation_retries_total) == ("died", 2.0, 4)
    assert (ended.memory_allocated_bytes, ended.memory_peak_allocated_bytes) == (None, None)
    second = RingFile(folder.ranks)
    with second.held():
        assert newest(source).memory_allocated_bytes is None
        gc(second, 0.5, 1)
        state = newest(source)
    assert (state.gc_s, state.gc_collections_total) == (2.5, 11)
    assert (state.allocation_retries_total, state.out_of_memory_errors_total) == (4, 1)


def test_a_restarted_daemon_knows_what_records_that_it_does_not_read_again_counted(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    first = RingFile(folder.ranks)
    with first.held():
        gc(first, 2.0, 10)
        newest(source)
    second = RingFile(folder.ranks)
    with second.held():
        gc(second, 1.0, 4)
        for _ in range(300):
            second.step()
        newest(source)
        source.close()
        successor = ranks_source(folder)
        state = newest(successor)
    assert (state.gc_s, state.gc_collections_total, state.steps_total) == (3.0, 14, 300)


def test_positions_of_a_version_that_saved_nothing_of_records_are_used(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks)
    with ring.held():
        ring.step()
        newest(source)
        source.close()
        path = folder.path.parent / FILE
        saved = json.loads(path.read_text())
        del saved["ranks"][0]["recorded"], saved["ranks"][0]["base"]["recorded"]
        path.write_text(json.dumps(saved))
        successor = ranks_source(folder)
        gc(ring, 0.25, 1)
        state = newest(successor)
    assert (sum(state.durations.counts), state.gc_s) == (1, 0.25)


def test_a_pause_of_the_collector_is_an_event_and_nonsense_is_refused(
    folder: RendezvousFolder, source: RanksSource, rejects: Counter[str]
) -> None:
    ring = RingFile(folder.ranks)
    with ring.held():
        ring.event("gc_pause", duration_s=0.31, generation=2, step=7)
        ring.event("gc_pause", duration_s=-1.0, generation=2, step=7)
        ring.event("gc_pause", duration_s=0.3, generation=9, step=7)
        ring.event("gc_pause", duration_s="long", generation=2, step=7)
        ring.event("gc_pause", duration_s=0.3, generation=2, step=10**30)
        records = source.poll(time.time(), time.monotonic())
    (pause,) = [record for record in records if isinstance(record, RankEvent)]
    assert pause.event == "gc_pause"
    assert pause.detail == {"duration_s": 0.31, "generation": 2, "step": 7}
    assert rejects == {"bad_event": 4}


@pytest.mark.parametrize(
    ("said", "shown"),
    [({"step_clock": "lightning"}, "lightning"), ({"step_clock": "x" * 200}, "other"), ({}, "")],
)
def test_the_step_clock_is_one_of_a_closed_set(
    folder: RendezvousFolder, source: RanksSource, said: dict[str, str], shown: str
) -> None:
    ring = RingFile(folder.ranks, **said)
    with ring.held():
        assert newest(source).step_clock == shown


def test_places_in_parallelism_are_checked(
    folder: RendezvousFolder, source: RanksSource, rejects: dict[str, int]
) -> None:
    good = RingFile(folder.ranks, parallel={"tensor": [1, 2], "of tomorrow": "any"})
    with good.held():
        assert newest(source).parallel == {"tensor": (1, 2)}
    bad = RingFile(folder.ranks, rank=1, parallel={"tensor": [2, 2]})
    with bad.held():
        source.poll(time.time(), time.monotonic())
    assert rejects == {"bad_metadata": 1}


def test_records_say_where_a_rank_stands_and_again_once_that_changes(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    first, then = {"pipeline": [0, 2]}, {"pipeline": [1, 2]}
    ring = RingFile(folder.ranks, parallel=first)

    def places() -> list[object]:
        records = source.poll(time.time(), time.monotonic())
        return [record.parallel for record in records if isinstance(record, RankSeen)]

    with ring.held():
        assert places() == [{"pipeline": (0, 2)}]
        assert places() == []
        said = {"job": "train", "rank": 0, "world_size": 2, "parallel": then}
        ring.put(protocol.META_OFFSETS[1], protocol.encode_metadata(2, said))
        assert places() == [{"pipeline": (1, 2)}]


def test_what_is_said_of_the_models_flops_is_checked(
    folder: RendezvousFolder, source: RanksSource, rejects: dict[str, int]
) -> None:
    good = RingFile(folder.ranks, flops_per_token=4.2e10, precision="bfloat16")
    with good.held():
        said = newest(source)
        assert (said.flops_per_token, said.precision) == (4.2e10, "bfloat16")
    bad = RingFile(folder.ranks, rank=1, flops_per_sample=-1)
    with bad.held():
        source.poll(time.time(), time.monotonic())
    assert rejects == {"bad_metadata": 1}


def test_the_throughput_is_that_of_the_newest_steps_of_a_live_rank(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    ring = RingFile(folder.ranks)
    with ring.held():
        assert newest(source).samples_per_s is None
        for _ in range(30):
            ring.step(1.0)
        for _ in range(20):
            ring.step(0.5)
        state = newest(source)
        # Eight samples a step, of tokens it says nothing.
        assert (state.steps_per_s, state.samples_per_s) == pytest.approx((2.0, 16.0))
        assert state.tokens_per_s is None
        _, _, at = silent(source)
        (state,) = source.states(at)
        assert (state.status, state.samples_per_s) == ("stopped", None)
    assert newest(source).samples_per_s is None


def training(folder: RendezvousFolder, what: str, until: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "WARPWATCH_DIR": str(folder.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", _TRAINING, what],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"{until}\n"
    return process


def silent(source: RanksSource) -> tuple[RankState, RankEvent, float]:
    """The rank after eleven seconds without a sign, the event that says so, and when that is."""
    now, at = time.time(), time.monotonic()
    events = reported(source.poll(now, at))
    # Should there be one heartbeat more just now, then it is silent eleven seconds later.
    while not events:
        now, at = now + 11, at + 11
        events = reported(source.poll(now, at))
    (state,) = source.states(at)
    return state, events[-1], at


def reported(records: list[Record]) -> list[RankEvent]:
    """The events but those that say how the process is doing."""
    events = [record for record in records if isinstance(record, RankEvent)]
    return [event for event in events if event.event != "process"]


def test_a_process_that_a_signal_stopped_is_kept_apart_from_one_that_holds_the_gil(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    process = training(folder, "gil", "holding")
    try:
        state, event, at = silent(source)
        assert (state.status, state.silent_reason) == ("stopped", "holds the GIL")
        assert (event.event, event.detail) == ("stopped", {"silent_reason": "holds the GIL"})
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        # It is looked at again, and what happened is reported once.
        assert reported(source.poll(time.time(), at + 2)) == []
        (state,) = source.states(at + 2)
        assert state.silent_reason == "stopped"
    finally:
        process.kill()
        process.communicate()
    source.poll(time.time(), time.monotonic())
    (state,) = source.states(time.monotonic())
    assert (state.status, state.silent_reason) == ("died", None)


def test_a_stopped_process_that_goes_on_is_running_again(
    folder: RendezvousFolder, source: RanksSource
) -> None:
    process = training(folder, "run", "running")
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        state, _, _ = silent(source)
        assert (state.status, state.silent_reason) == ("stopped", "stopped")
        process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + 30
        while newest(source).status != "running" and time.monotonic() < deadline:
            time.sleep(0.05)
        state = newest(source)
        assert (state.status, state.silent_reason) == ("running", None)
    finally:
        process.kill()
        process.communicate()


def test_a_pid_that_the_kernel_does_not_confirm_says_nothing() -> None:
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    pid, uid = os.getpid(), os.getuid()
    own = protocol.Identity(pid, bytes(16), int(fields[19]), 0, 0, 1)
    assert silent_reason(own, pid, uid) == "holds the GIL"
    # Another holds the lock, in another PID namespace (0) or here, or no one does.
    assert {silent_reason(own, other, uid) for other in (0, pid + 1, None)} == {"unknown"}
    # A ring of one user, a process of another.
    assert silent_reason(own, pid, uid + 1) == "unknown"
    assert silent_reason(own._replace(process_start=1), pid, uid) == "unknown"
    gone = 2**31 - 1
    assert silent_reason(own._replace(pid=gone), gone, uid) == "unknown"


def test_a_process_in_a_frozen_control_group_is_stopped(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc/7", tmp_path / "cgroup/pod/c"
    proc.mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "stat").write_text("7 (a) b) S " + "0 " * 18 + "4711 " + "0 " * 30)
    (proc / "cgroup").write_text("0::/pod/c\n")
    (group / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    identity = protocol.Identity(7, bytes(16), 4711, 0, 0, 1)
    seen = identity, 7, os.getuid(), tmp_path / "proc", tmp_path / "cgroup"
    assert silent_reason(*seen) == "stopped"
    (group / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    assert silent_reason(*seen) == "holds the GIL"


def test_the_newest_steps_can_be_read_while_others_come() -> None:
    recent = RecentSteps()
    recent.add(Step(1.0, "train", 0, 1, 0.1))
    read = iter(recent)
    recent.add(Step(2.0, "train", 0, 2, 0.2))
    assert list(read) == [0.1]
    assert list(recent) == [0.1, 0.2]
