"""The obstacles to a process's core and memory: run queues, control groups, the hypervisor."""

import itertools
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.waiting import eventually
from warpwatch_devices import processor_waits
from warpwatch_devices.memory_groups import group_headroom, host_headroom, memory_groups, oom_kills

MIB = 1 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def thread(proc: Path, tid: int, run_s: float, wait_s: float) -> None:
    write(proc / f"7/task/{tid}/schedstat", f"{run_s * 1e9:.0f} {wait_s * 1e9:.0f} 12\n")


def test_texts_of_the_kernel_are_read_as_it_writes_them() -> None:
    assert processor_waits.parse_schedstat(
        b"77860325 43544250 280\n"
    ) == processor_waits.ThreadTimes(77860325, 43544250)
    for unknown in (b"", b"0 0 0\n", b"1 2\n", b"1 x 3\n"):
        assert processor_waits.parse_schedstat(unknown) is None
    assert processor_waits.parse_cores("0-2,8\n") == {0, 1, 2, 8}
    assert processor_waits.parse_cores("5") == {5}
    assert processor_waits.parse_cores("") == processor_waits.parse_cores("x-2") == frozenset()


def test_the_waits_of_threads_are_summed_and_the_longest_is_the_share(tmp_path: Path) -> None:
    queue = processor_waits.RunQueue(7, tmp_path)
    thread(tmp_path, 7, 1.0, 5.0)
    thread(tmp_path, 8, 1.0, 9.0)
    assert queue.poll(100.0) is None
    thread(tmp_path, 7, 2.0, 5.8)
    thread(tmp_path, 8, 2.0, 9.2)
    wait = queue.poll(102.0)
    assert (wait.wait_ns, wait.share) == (1_000_000_000, 0.4)


def test_a_new_thread_counts_whole_and_one_of_the_same_number_anew(tmp_path: Path) -> None:
    queue = processor_waits.RunQueue(7, tmp_path)
    thread(tmp_path, 7, 1.0, 5.0)
    thread(tmp_path, 8, 3.0, 9.0)
    queue.poll(100.0)
    thread(tmp_path, 8, 0.1, 0.2)
    thread(tmp_path, 9, 0.5, 0.5)
    wait = queue.poll(110.0)
    assert wait is not None and wait.wait_ns == 700_000_000


def test_idle_threads_are_read_every_ten_seconds_alone(tmp_path: Path) -> None:
    queue, gone = processor_waits.RunQueue(7, tmp_path), processor_waits.RunQueue(8, tmp_path)
    # An exited process has no values.
    assert [gone.poll(100.0), gone.poll(102.0)] == [None, None]
    for tid in (7, 8):
        thread(tmp_path, tid, 1.0, 0.0)
    for at in (100.0, 102.0):
        queue.poll(at)
    thread(tmp_path, 8, 1.0, 3.0)
    wait = queue.poll(104.0)
    assert wait is not None and wait.wait_ns == 0
    wait = queue.poll(110.0)
    assert (wait.wait_ns, wait.share) == (3_000_000_000, 3.0 / 8.0)


def test_a_thread_beside_another_on_one_core_waits_as_the_kernel_says() -> None:
    core = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    with ExitStack() as stack:
        pids = []
        for _ in range(2):
            process = subprocess.Popen([sys.executable, "-c", pinned], stdout=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
            process.stdout.readline()
            pids.append(process.pid)
        queue = processor_waits.RunQueue(pids[0])
        queue.poll(100.0)
        # Two looks as if ten seconds were between them, until the kernel has made it wait.
        looks = (queue.poll(110.0 + 10 * number) for number in itertools.count())
        eventually(lambda: (wait := next(looks)) and wait.wait_ns)


TIMES = "nr_periods 40\nnr_throttled 30\n"
LIMITS = {
    "cpu.max": {"cpu.stat": f"{TIMES}throttled_usec 2500\n", "cpu.max": "200000 100000\n"},
    "cpu.cfs_quota_us": {
        "cpu.stat": f"{TIMES}throttled_time 2500000\n",
        "cpu.cfs_quota_us": "50000\n",
        "cpu.cfs_period_us": "100000\n",
    },
}


@pytest.mark.parametrize(("version", "limit"), [("cpu.max", 2.0), ("cpu.cfs_quota_us", 0.5)])
def test_a_limit_says_how_often_it_was_reached(tmp_path: Path, version: str, limit: float) -> None:
    is_new = version == "cpu.max"
    line, top = ("0::", tmp_path) if is_new else ("3:cpu,cpuacct:", tmp_path / "cpu")
    write(tmp_path / "proc/7/cgroup", f"{line}/pods/a/main\n")
    assert processor_waits.throttling(7, tmp_path / "proc", tmp_path) is None
    # The innermost group has a limit that was never hit.
    unhit = "nr_periods 9\nnr_throttled 0\nthrottled_usec 0\nthrottled_time 0\n"
    write(top / "pods/a/main/cpu.stat", unhit)
    found = processor_waits.throttling(7, tmp_path / "proc", tmp_path)
    assert (found.throttled_periods, found.periods) == (0, 9)
    write(top / "pods/a/cpu.stat", "usage_usec 9\n")
    for name, text in LIMITS[version].items():
        write(top / "pods/a" / name, text)
    found = processor_waits.throttling(7, tmp_path / "proc", tmp_path)
    assert (found.throttled_ns, found.throttled_periods, found.periods) == (2_500_000, 30, 40)
    assert found.limit == limit


def test_without_a_limit_there_is_no_throttling(tmp_path: Path) -> None:
    write(tmp_path / "proc/7/cgroup", "0::/a\n")
    write(tmp_path / "a/cpu.stat", "usage_usec 9\n")
    assert processor_waits.throttling(7, tmp_path / "proc", tmp_path) is None


def test_steal_is_of_the_cores_that_are_asked_for() -> None:
    before = processor_waits.parse_core_ticks(
        "cpu  9 9\ncpu0 10 0 10 80 0 0 0 0 0 0\ncpu1 10 0 10 80 0 0 0 0 0 0\n"
    )
    now = processor_waits.parse_core_ticks(
        "cpu  9 9\ncpu0 40 0 20 100 0 0 0 40 0 0\ncpu1 60 0 20 120 0 0 0 0 0 0\nintr 1 2\n"
    )
    assert now[0] == (200, 40)
    assert processor_waits.steal_share(before, now, {0}) == 0.4
    assert processor_waits.steal_share(before, now, {0, 1}) == 0.2
    assert processor_waits.steal_share(before, now, {5}) is None
    assert processor_waits.parse_core_ticks("cpu0 1 2 3\ncpu1 a b c d e f g h\n") == {}


def test_a_limit_of_either_version_counts_without_the_file_cache(tmp_path: Path) -> None:
    assert group_headroom(tmp_path) is None
    write(tmp_path / "memory.max", "max\n")
    write(tmp_path / "memory.current", f"{400 * MIB}\n")
    assert group_headroom(tmp_path) is None
    write(tmp_path / "memory.max", f"{512 * MIB}\n")
    write(tmp_path / "memory.stat", f"anon 1\ninactive_file {300 * MIB}\n")
    assert group_headroom(tmp_path) == (412 * MIB, 512 * MIB)
    write(tmp_path / "1/memory.limit_in_bytes", f"{96 * MIB}\n")
    write(tmp_path / "1/memory.usage_in_bytes", f"{60 * MIB}\n")
    assert group_headroom(tmp_path / "1") == (36 * MIB, 96 * MIB)


def test_memory_groups_are_those_of_either_version_and_never_outside(tmp_path: Path) -> None:
    write(tmp_path / "7/cgroup", "9:cpu:/x\n4:memory:/slurm/job_1\n0::/\n")
    top = tmp_path / "cgroup"
    assert list(memory_groups(7, tmp_path, top)) == [
        top / "memory/slurm/job_1", top / "memory/slurm", top / "memory", top,
    ]  # fmt: skip
    write(tmp_path / "8/cgroup", "0::/../../other\n")
    assert list(memory_groups(8, tmp_path, top)) == []
    write(tmp_path / "self/cgroup", "0::/system.slice/warpwatch.service\n")
    assert list(memory_groups("self", tmp_path, top)) == [
        top / "system.slice/warpwatch.service", top / "system.slice", top,
    ]  # fmt: skip


def test_the_host_says_what_is_available(tmp_path: Path) -> None:
    write(tmp_path / "meminfo", "MemTotal: 4096 kB\nMemAvailable:   2048 kB\n")
    assert host_headroom(tmp_path) == (2 * MIB, 4 * MIB)
    write(tmp_path / "other/meminfo", "MemAvailable:   2048 kB\n")
    assert host_headroom(tmp_path / "other") is host_headroom(tmp_path / "none") is None


def test_the_first_version_counts_kills_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 6\n")
    assert oom_kills(tmp_path) == 6
    assert oom_kills(tmp_path / "none") is None
