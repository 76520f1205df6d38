"""Facts of a rank besides its steps, and of its process from the kernel."""

import json
import math
import os
import signal
from pathlib import Path

import msgspec
import pytest

from tests.cases import cases
from tests.daemon.ranks.ring_files import RingFile
from tests.daemon.ranks.sources import TRAINS, RankNode
from tests.manual_clock import ManualClock
from tests.waiting import eventually
from warpwatch import protocol
from warpwatch_daemon.agent.composition import RankLoad
from warpwatch_daemon.ranks.counts import RankCounts
from warpwatch_daemon.ranks.rank import silent_reason
from warpwatch_daemon.ranks.rank_processes import RankProcessor, reading
from warpwatch_devices import processor_waits
from warpwatch_devices.processes import Process, read_process
from warpwatch_telemetry.records import RankEvent, RankSeen
from warpwatch_telemetry.state import RankState

# PyDLL keeps the GIL, as a C extension does that does not give it back.
_HOLDS_THE_GIL = "print('running', flush=True)\nimport ctypes; ctypes.PyDLL(None).pause()\n"


def gc(ring: RingFile, seconds: float, collections: int) -> None:
    ring.record(protocol.RECORD_GC, protocol.GC.pack(int(seconds * 1e9), collections, 10**6))


def memory(ring: RingFile, *words: int) -> None:
    ring.record(protocol.RECORD_MEMORY, b"".join(w.to_bytes(8, "little") for w in words))


def test_collections_and_memory_are_known_once_a_whole_record_tells_them(node):
    ring = node.ring()
    before = node.newest()
    assert (before.gc_s, before.gc_collections_total) == (None, None)
    assert (before.allocation_retries_total, before.memory_allocated_bytes) == (None, None)
    memory(ring, 100, 200, protocol.ABSENT, 4, protocol.ABSENT, protocol.ABSENT)
    memory(ring, 1, 2)
    (event,) = node.events()
    said = {"allocated_bytes": 100, "reserved_bytes": 200, "allocation_retries": 4}
    assert (event.event, event.detail) == ("memory", said)
    (state,) = node.states()
    assert (state.memory_peak_allocated_bytes, state.out_of_memory_errors_total) == (None, None)
    gc(ring, 0.5, 3)
    memory(ring, 100, 200, 150, 4, 1, 30)
    gc(ring, 0.75, 5)
    gc(ring, 0.25, 2)
    state = node.newest()
    assert (state.gc_s, state.gc_collections_total) == (0.75, 5)
    assert (state.memory_allocated_bytes, state.memory_reserved_bytes) == (100, 200)
    assert (state.memory_peak_allocated_bytes, state.memory_inactive_split_bytes) == (150, 30)
    assert (state.allocation_retries_total, state.out_of_memory_errors_total) == (4, 1)


def test_a_successor_continues_the_counters_of_records_and_begins_without_memory(node):
    first = node.ring()
    gc(first, 2.0, 10)
    memory(first, 100, 200, 150, 4, 1, 30)
    node.poll()
    first.die()
    ended = node.newest()
    assert (ended.status, ended.gc_s, ended.allocation_retries_total) == ("died", 2.0, 4)
    assert (ended.memory_allocated_bytes, ended.memory_peak_allocated_bytes) == (None, None)
    second = node.ring()
    assert node.newest().memory_allocated_bytes is None
    gc(second, 0.5, 1)
    state = node.newest()
    assert (state.gc_s, state.gc_collections_total) == (2.5, 11)
    assert (state.allocation_retries_total, state.out_of_memory_errors_total) == (4, 1)


def test_a_restarted_daemon_knows_what_records_that_it_does_not_read_again_counted(node):
    first = node.ring()
    gc(first, 2.0, 10)
    node.poll()
    first.die()
    second = node.ring()
    gc(second, 1.0, 4)
    second.steps_of(300)
    node.poll()
    node.restart()
    (state,) = node.states()
    assert (state.gc_s, state.gc_collections_total, state.steps_total) == (3.0, 14, 300)


def test_a_pause_of_the_collector_is_an_event_and_nonsense_is_refused(node):
    ring = node.ring()
    good = {"duration_s": 0.31, "generation": 2, "step": 7}
    for wrong in ({"x": math.inf}, {"duration_s": -1.0}, {"generation": 9}, {"duration_s": "long"},
                  {"step": 10**30}):  # fmt: skip
        ring.event("gc_pause", **good | wrong)
    (pause,) = node.events()
    assert (pause.event, pause.detail) == ("gc_pause", good)
    assert node.rejects == {"bad_event": 4}


@pytest.mark.parametrize(("said", "shown"), cases(__file__)["claims"])
def test_claims_are_shown_as_far_as_they_are_of_a_closed_set(node, said, shown):
    node.ring(**said)
    found = json.loads(msgspec.json.encode(node.newest()))
    assert {name: found[name] for name in shown} == shown


@pytest.mark.parametrize("change", [{"parallel": {"pipeline": (1, 2)}}, {"device": "GPU-abc"}])
def test_records_say_where_a_rank_stands_and_again_once_that_changes(node, change):
    ring = node.ring(parallel={"pipeline": [0, 2]})

    def places() -> list[object]:
        seen = (record for record in node.poll() if isinstance(record, RankSeen))
        return [{"parallel": one.parallel, "device": one.device} for one in seen]

    before = {"parallel": {"pipeline": (0, 2)}, "device": None}
    assert [places(), places()] == [[before], []]
    said = {"job": "train", "rank": 0, "world_size": 2} | before | change
    ring.put(protocol.META_OFFSETS[1], protocol.encode_metadata(2, said))
    assert places() == [before | change]


def test_the_throughput_is_that_of_the_newest_steps_of_a_live_rank(node):
    ring = node.ring()
    assert node.newest().samples_per_s is None
    ring.steps_of(30, 1.0)
    ring.steps_of(20, 0.5)
    state = node.newest()
    # Eight samples per step, and unknown tokens.
    assert (state.steps_per_s, state.samples_per_s) == pytest.approx((2.0, 16.0))
    assert state.tokens_per_s is None
    state = node.newest(11)
    assert (state.status, state.samples_per_s) == ("stopped", None)
    for later_s, samples_per_s in ((14, 16.0), (16, None)):
        ring.heartbeat()
        state = node.newest(later_s)
        assert (state.status, state.samples_per_s) == ("running", samples_per_s)
    ring.die()
    assert node.newest().samples_per_s is None


def test_a_process_that_a_signal_stopped_is_kept_apart_from_one_that_holds_the_gil(node, begin):
    training = begin(TRAINS + _HOLDS_THE_GIL)
    node.poll()
    # Should there be one heartbeat more just now, then it is silent eleven seconds later.
    event = eventually(lambda: node.events(node.clock.wall() - node.began + 11.0))[-1]
    (state,) = node.states()
    assert (state.status, state.silent_reason) == ("stopped", "holds the GIL")
    assert (event.event, event.detail) == ("stopped", {"silent_reason": "holds the GIL"})
    training.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, training.pid, os.WSTOPPED)
    # It is looked at again, and what happened is reported once.
    node.clock.advance(2.0)
    assert node.events() == []
    (state,) = node.states()
    assert state.silent_reason == "stopped"
    training.kill()
    training.wait()
    state = node.newest()
    assert (state.status, state.silent_reason) == ("died", None)


def test_a_pid_that_the_kernel_does_not_confirm_says_nothing():
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


def test_a_device_is_as_busy_as_the_rank_on_it_that_waits_least():
    clock = ManualClock()
    ranks: list[RankState] = []
    load = RankLoad(lambda: ranks, "GPU-{}".format, clock.wall)
    assert load(0) is None

    def after(seconds: float, waited_s: float, number: int = 0) -> float | None:
        clock.advance(seconds)
        one = RankState(
            "train", number, str(number), 1, "h", device="GPU-0",
            last_step_time=clock.wall(), phases_s={"comm": waited_s, "forward": 9.0},
        )  # fmt: skip
        ranks[:] = [other for other in ranks if other.rank != number] + [one]
        return load(0)

    assert after(1.0, 5.0) == 0.97
    assert load(0) == 0.9, "no newer step"
    assert after(2.0, 6.0) == pytest.approx(0.97 / 2)
    assert after(2.0, 8.0) == 0.05
    assert after(0.0, 0.0, number=1) == 0.97
    assert load(1) is None
    clock.advance(3.1)
    assert load(0) == 0.0


CORE = max(os.sched_getaffinity(0))
_PIN = f"import os; os.sched_setaffinity(0, {{{CORE}}})\n"
_THEN_WAITS = "print('running', flush=True)\nimport sys; sys.stdin.read()\n"
_THEN_COMPUTES = "print('running', flush=True)\nwhile True: pass\n"


def looks(node: RankNode) -> list[RankEvent]:
    return [event for event in node.events(without="") if event.event == "process"]


def test_a_process_that_holds_its_ring_is_looked_at_every_two_seconds(node, begin):
    begin(TRAINS + _THEN_WAITS)
    (seen,) = looks(node)
    assert (seen.job, seen.rank) == ("seen", 0)
    assert seen.detail["cpu_s"] > 0
    assert seen.detail["io_bytes"] > 0
    assert 10**6 < seen.detail["anonymous_bytes"] < 10**9
    assert 0 < seen.detail["available_bytes"] < seen.detail["limit_bytes"]
    node.clock.advance(1.9)
    assert looks(node) == []
    node.clock.advance(0.1)
    assert len(looks(node)) == 1


def test_a_ring_that_names_anothers_process_says_nothing_of_it(node):
    # The file says this process, the kernel says who holds it.
    ring = node.ring()
    assert looks(node) == []
    # Nor one that names its own with another start.
    identity = node.source.live()[0].ring.reader.header().identity
    ring.put(0, protocol.encode_identity(identity._replace(pid=ring.holder.pid)))
    node.clock.advance(2.0)
    assert looks(node) == []


def have_used(pids: list[int], cpu_s: float) -> None:
    """Return when each has used so much from now on, however many others want the core."""
    due = {pid: used_s(pid) + cpu_s for pid in pids}
    eventually(lambda: all(used_s(pid) >= until_s for pid, until_s in due.items()))


def used_s(pid: int) -> float:
    process = read_process(pid)
    assert process is not None and process.alive
    return process.cpu_s


def test_a_rank_that_waits_for_its_core_says_who_has_it_also_over_a_restart(
    node, begin, monkeypatch
):
    # Others may compute on this core, too.
    monkeypatch.setattr(processor_waits, "MAX_TOLD", 1000)
    monkeypatch.setattr(processor_waits, "MAX_LOOKED_AT", 1000)
    begin(_PIN + TRAINS + _THEN_COMPUTES)
    as_other = "import os; os.setuid(20009)\n" if os.geteuid() == 0 else ""
    hog, other = (begin(_PIN + user + _THEN_COMPUTES).pid for user in ("", as_other))
    details = []
    for _ in range(3):
        details += [event.detail for event in looks(node)]
        have_used([hog, other], 0.15)
        node.clock.advance(2.0)
    first, waiting, told = details
    assert "core_wait_share" not in first
    # The others have used 0.3 s of the two seconds, and the rank was ready all that time.
    assert waiting["core_wait_share"] > 0.14
    assert "core_users" not in waiting
    users = {user["pid"]: user for user in told["core_users"]}
    assert users[hog]["core"] == CORE and users[hog]["cores"] >= 0.07
    assert users[hog]["name"].startswith("python")
    if as_other:
        assert users[other].keys() == {"pid", "cores", "core"}
    (before,) = node.states()
    assert before.core_wait_s is not None and before.core_wait_s > 0.5
    node.restart()
    (after,) = node.states()
    assert after.core_wait_s == before.core_wait_s


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limited(folder: Path, periods: int, throttled: int, usec: int) -> None:
    text = f"nr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec {usec}\n"
    write(folder / "cgroup/job/cpu.stat", text)
    write(folder / "cgroup/job/cpu.max", "150000 100000\n")


@pytest.fixture
def processor(tmp_path):
    return RankProcessor(7, tmp_path, tmp_path / "cgroup")


def test_a_limit_that_is_reached_and_cores_that_are_stolen_are_shares_of_the_time(
    tmp_path, processor
):
    write(tmp_path / "7/cgroup", "0::/job\n")
    write(tmp_path / "7/status", "Name:\tpython\nCpus_allowed_list:\t1\n")
    write(tmp_path / "7/task/7/schedstat", "1000000000 0 5\n")
    limited(tmp_path, 100, 10, 5000)
    assert processor.poll(100.0, {0: (100, 9), 1: (100, 10)}) == {}
    write(tmp_path / "7/task/7/schedstat", "2000000000 80000000 9\n")
    limited(tmp_path, 120, 25, 405_000)
    assert processor.poll(102.0, {0: (300, 9), 1: (300, 60)}) == {
        "core_wait_share": 0.04, "throttled_share": 0.75, "core_limit": 1.5, "steal_share": 0.25,
    }  # fmt: skip
    assert not processor.waits_long
    counts = RankCounts()
    counts.grow(taken := processor.take_counts())
    assert taken == {"core_wait_ns": 80_000_000, "throttled_ns": 400_000_000}
    shown = counts.shown([])
    assert (shown["core_wait_s"], shown["throttled_s"]) == (0.08, 0.4)
    assert processor.take_counts() == {}
    assert processor.poll(104.0, {})["throttled_share"] == 0.0


def test_where_the_kernel_says_nothing_nothing_is_known(tmp_path, processor):
    assert [processor.poll(at, {}) for at in (100.0, 102.0)] == [{}, {}]
    assert processor.take_counts() == {}
    assert not processor.waits_long
    family = {7: a_process(7)}
    assert reading(family[7], family, tmp_path, tmp_path) == {"cpu_s": 1.5, "disk_wait": False}


def a_process(pid: int, parent: int = 1, state: str = "S", cpu_s: float = 1.0) -> Process:
    return Process(pid, state, parent, 5, cpu_s, 0.5, 4096, 0.0)
