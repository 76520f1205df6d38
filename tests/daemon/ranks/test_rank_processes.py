"""What the kernel says of ranks' processes: signs, memory, who killed them, who has their cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.daemon.ranks.sources import TRAINS, RankNode
from tests.waiting import eventually
from warpwatch_daemon.ranks.process import OomKills, reading
from warpwatch_daemon.ranks.rank_processes import LONG_WAIT, RankProcessor
from warpwatch_devices.process_tree import Process, read_process
from warpwatch_telemetry.records import RankEvent

CORE = max(os.sched_getaffinity(0))
_PIN = f"import os; os.sched_setaffinity(0, {{{CORE}}})\n"
_THEN_WAITS = "print('running', flush=True)\nimport sys; sys.stdin.read()\n"
_THEN_COMPUTES = "print('running', flush=True)\nwhile True: pass\n"


def looks(node: RankNode) -> list[RankEvent]:
    """The events that say how the ranks' processes are."""
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
    node.ring().step()
    assert looks(node) == []


def have_used(pids: list[int], cpu_s: float) -> None:
    """Return when each has used so much from now on, however many others want the core."""
    due = {pid: used_s(pid) + cpu_s for pid in pids}
    eventually(lambda: all(used_s(pid) >= until_s for pid, until_s in due.items()))


def used_s(pid: int) -> float:
    process = read_process(pid)
    assert process is not None and process.alive
    return process.cpu_s


def test_a_rank_that_waits_for_its_core_says_who_has_it_also_over_a_restart(node, begin):
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
    assert LONG_WAIT < 0.14 < waiting["core_wait_share"]
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
    assert processor.look(100.0, {0: (100, 9), 1: (100, 10)}) == {}
    write(tmp_path / "7/task/7/schedstat", "2000000000 80000000 9\n")
    limited(tmp_path, 120, 25, 405_000)
    assert processor.look(102.0, {0: (300, 9), 1: (300, 60)}) == {
        "core_wait_share": 0.04,
        "throttled_share": 0.75,
        "core_limit": 1.5,
        "steal_share": 0.25,
    }
    assert not processor.waits_long
    assert processor.take_counts() == {"core_wait_ns": 80_000_000, "throttled_ns": 400_000_000}
    assert processor.take_counts() == {}


def test_a_wait_has_risen_only_since_it_was_told_who_has_the_cores(tmp_path, processor):
    risen = []
    for number, wait_s in enumerate((0.0, 0.1, 0.2, 1.2, 2.2)):
        write(tmp_path / "7/task/7/schedstat", f"{number}000000000 {wait_s * 1e9:.0f} 5\n")
        processor.look(100.0 + 2 * number, {})
        risen.append((processor.waits_long, processor.has_risen))
        if number in (2, 3):
            processor.tell()
    assert risen == [(False, False), (True, False), (True, False), (True, True), (True, False)]


def test_where_the_kernel_says_nothing_nothing_is_known(tmp_path, processor):
    assert [processor.look(at, {}) for at in (100.0, 102.0)] == [{}, {}]
    assert processor.take_counts() == {}
    assert not processor.waits_long
    family = {7: a_process(7)}
    assert reading(family[7], family, tmp_path, tmp_path) == {"cpu_s": 1.5, "disk_wait": False}


def group(
    folder: Path, *, kills: int, limit: str = "max", current: int = 0, cache: int = 0
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    (folder / "memory.events").write_text(f"low 0\nmax 3\noom 1\noom_kill {kills}\n")
    return folder


def a_process(pid: int, parent: int = 1, state: str = "S", cpu_s: float = 1.0) -> Process:
    return Process(pid, state, parent, 5, cpu_s, 0.5, 4096, 0.0)


def test_a_reading_is_of_the_process_and_all_that_it_started(tmp_path):
    for pid in "7", "8":
        write(tmp_path / "proc" / pid / "cgroup", "0::/pods/a\n")
        status = "Name:\tpython\nVmRSS:\t 900 kB\nRssAnon:\t 700 kB\n"
        write(tmp_path / "proc" / pid / "status", status)
        write(tmp_path / "proc" / pid / "io", "rchar: 40\nwchar: 2\nsyscr: 9\nread_bytes: 0\n")
    write(tmp_path / "proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 500 kB\n")
    group(tmp_path / "cgroup", kills=0)
    group(tmp_path / "cgroup/pods/a", kills=0, limit="400000", current=300_000, cache=50_000)
    family = {7: a_process(7), 8: a_process(8, parent=7, state="D", cpu_s=2.0)}
    assert reading(family[7], family, tmp_path / "proc", tmp_path / "cgroup") == {
        "cpu_s": 4.0,
        "io_bytes": 84,
        "disk_wait": True,
        "anonymous_bytes": 700 * 1024,
        "available_bytes": 150_000,
        "limit_bytes": 400_000,
    }


def test_a_risen_count_of_the_innermost_group_that_is_left_tells_an_oom_kill(tmp_path):
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
