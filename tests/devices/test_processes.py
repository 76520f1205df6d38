"""Processes that use a GPU are followed with their children, who come and go."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.devices.recording import RecordingSink, wait_until
from warpwatch_daemon.agent.supervisor import Supervisor
from warpwatch_devices.process_tree import (
    Process,
    ProcessTree,
    descendants,
    parse_stat,
    read_process,
)
from warpwatch_devices.processes import (
    MAX_PROCESSES,
    ProcessesSource,
    ProcessUsage,
    gpu_processes,
    io_wait_is_accounted,
)
from warpwatch_devices.source import Surroundings
from warpwatch_telemetry.catalogue import CATALOGUE
from warpwatch_telemetry.samples import Device, DeviceProcess, DeviceSample

# Two children that compute; a line on its input ends and awaits the first of them.
PARENT = """
import subprocess, sys
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
print(*(child.pid for child in busy), flush=True)
sys.stdin.readline()
busy[0].kill()
busy[0].wait()
print("ended", flush=True)
sys.stdin.readline()
busy[1].kill()
busy[1].wait()
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        # The end of its input is a line too, and the second.
        process.communicate()


def reported(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwatch_devices.processes.sees_host_processes", lambda: True)
    monkeypatch.setattr("warpwatch_devices.processes.INTERVAL_S", 0.1)


def source_of(*pids: int, name: str = "python") -> ProcessesSource:
    processes = tuple(DeviceProcess(pid, name) for pid in pids)
    sample = DeviceSample(Device("GPU-0", 0, "H100"), 1000.0, processes=processes)
    surroundings = Surroundings(
        load_of=lambda index: None,
        devices=lambda: (sample,),
        counters_wanted=lambda: False,
        fail=lambda reason: None,
    )
    return ProcessesSource(surroundings)


def series(source: ProcessesSource, sink: RecordingSink, pid: int) -> dict[str, float]:
    """What a round says of a process: by the metric's name and ``of``."""
    source.read(sink)
    found = {}
    for (name, labels), value in sink.processes[-1].values.items():
        if labels[0] == str(pid):
            found[" ".join((name, *labels[2:]))] = value
    return found


def test_children_are_counted_and_what_they_used_stays_when_one_ends(
    parent: subprocess.Popen[str],
) -> None:
    first, second = map(int, reported(parent).split())
    source, sink = source_of(parent.pid), RecordingSink()

    def children_cpu_s() -> float:
        return series(source, sink, parent.pid)["process_cpu_seconds_total children"]

    wait_until(lambda: children_cpu_s() >= 0.4)
    before = series(source, sink, parent.pid)
    assert before["process_children"] == 2
    assert before["process_resident_memory_bytes children"] > 2 * 2**20
    assert before["process_resident_memory_bytes self"] > 2**20
    tell(parent)
    assert reported(parent) == "ended"
    after = series(source, sink, parent.pid)
    assert after["process_children"] == 1
    total_s = after["process_cpu_seconds_total children"]
    assert total_s >= before["process_cpu_seconds_total children"]
    # Of the one that ended all is counted, and once: the kernel knows it from the parent's wait.
    left, waited = read_process(second), read_process(parent.pid)
    assert left is not None
    assert waited is not None
    assert waited.waited_s > 0
    assert total_s <= left.cpu_s + waited.waited_s + 0.05
    assert read_process(first) is None
    wait_until(lambda: children_cpu_s() > total_s)


def test_everything_published_is_in_the_catalogue(parent: subprocess.Popen[str]) -> None:
    reported(parent)
    source, sink = source_of(parent.pid), RecordingSink()
    source.read(sink)
    assert sink.processes[-1].values
    for name, labels in sink.processes[-1].values:
        assert len(labels) == len(CATALOGUE[name].labels)
        assert labels[:2] == (str(parent.pid), "python")
    assert sink.healths[-1].up


def test_a_process_that_is_gone_has_no_series() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        source, sink = source_of(process.pid), RecordingSink()
        assert series(source, sink, process.pid)["process_children"] == 0
        process.communicate()
    assert series(source, sink, process.pid) == {}


def test_a_zombie_is_no_living_child() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    wait_until(lambda: (found := read_process(child.pid)) and not found.alive)
    source, sink = source_of(os.getpid()), RecordingSink()
    others = [p for p in descendants(os.getpid(), ProcessTree().read([os.getpid()])) if p.alive]
    assert series(source, sink, os.getpid())["process_children"] == len(others)
    child.wait()


def test_without_gpu_processes_there_is_nothing_to_say() -> None:
    source, sink = source_of(0), RecordingSink()
    source.read(sink)
    assert sink.processes[-1].values == {}


def test_the_source_runs_in_its_loop_and_ends() -> None:
    supervisor, sink = Supervisor(), RecordingSink()
    source = source_of(os.getpid())
    source.start(supervisor, sink)
    wait_until(lambda: len(sink.processes) >= 2)
    supervisor.stop()
    source.close()


def test_in_another_pid_namespace_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpwatch_devices.processes.sees_host_processes", lambda: False)
    surroundings = Surroundings(lambda index: None, tuple, lambda: False, lambda reason: None)
    source = ProcessesSource(surroundings)
    supervisor, sink = Supervisor(), RecordingSink()
    source.start(supervisor, sink)
    assert supervisor.loops == ()
    assert sink.healths[-1].up
    assert "PID namespace" in sink.healths[-1].reason


def test_processes_on_several_devices_are_taken_once_and_bounded() -> None:
    def sample(*pids: int) -> DeviceSample:
        processes = tuple(DeviceProcess(pid, f"p{pid}") for pid in pids)
        return DeviceSample(Device("GPU", 0, "H100"), 0.0, processes=processes)

    assert gpu_processes([sample(5, 0), sample(5, 9)]) == {5: "p5", 9: "p9"}
    assert len(gpu_processes([sample(*range(1, 1000))])) == MAX_PROCESSES == 256


def test_a_line_of_stat_is_read_with_any_name() -> None:
    line = (
        "42 (a) b (c) S 7 42 42 0 -1 4194304 100 200 0 0 150 50 1000 2000 20 0 3 0 123456 "
        "1000000 256 18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 1 0 0 300 0 0 0 0 0 0 0 0 0 0"
    )
    tick_s, page_bytes = 1 / os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    assert parse_stat(line) == Process(
        pid=42,
        state="S",
        parent=7,
        start_ticks=123456,
        cpu_s=200 * tick_s,
        waited_s=3000 * tick_s,
        resident_bytes=256 * page_bytes,
        io_wait_s=300 * tick_s,
        threads=3,
        core=1,
        name="a) b (c",
    )
    assert parse_stat(line.replace("4194304", "2129984")).is_kernel


@pytest.mark.parametrize("line", ["", "42 (a) S", "x (a) " + "1 " * 60, "42 (a) S " + "x " * 60])
def test_what_is_no_line_of_stat_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        parse_stat(line)


def process(
    pid: int, cpu_s: float = 0.0, waited_s: float = 0.0, *, parent: int = 1, start: int = 0
) -> Process:
    return Process(pid, "R", parent, start, cpu_s, waited_s, 1000, io_wait_s=cpu_s / 10)


def children_cpu_s(usage: ProcessUsage) -> float:
    values = usage.series(("1", "p"), io_wait=True)
    return values["process_cpu_seconds_total", ("1", "p", "children")]


def test_children_that_were_waited_for_count_once() -> None:
    usage = ProcessUsage()
    usage.update(process(1, waited_s=2.0), [process(2, 5.0), process(3, 1.0)])
    assert children_cpu_s(usage) == 8.0
    # Child 2 used 0.5 s more before it ended; a short one came and went unseen with 0.25 s.
    usage.update(process(1, waited_s=2.0 + 5.5 + 0.25), [process(3, 2.0)])
    assert children_cpu_s(usage) == 8.0 + 0.5 + 0.25 + 1.0


def test_children_that_no_one_waited_for_stay_counted() -> None:
    usage = ProcessUsage()
    usage.update(process(1), [process(2, 5.0), process(3, 1.0)])
    usage.update(process(1), [process(3, 1.5)])
    assert children_cpu_s(usage) == 6.5
    usage.update(process(1), [])
    assert children_cpu_s(usage) == 6.5


def test_a_grandchild_whose_parent_waited_moves_up_without_counting_again() -> None:
    usage = ProcessUsage()
    usage.update(process(1), [process(2, 1.0), process(4, 3.0, parent=2)])
    usage.update(process(1), [process(2, 1.0, waited_s=3.0)])
    assert children_cpu_s(usage) == 4.0
    usage.update(process(1, waited_s=4.0), [])
    assert children_cpu_s(usage) == 4.0


def test_a_pid_that_was_given_out_again_is_another_child() -> None:
    usage = ProcessUsage()
    usage.update(process(1), [process(2, 5.0, start=10)])
    usage.update(process(1, waited_s=5.0), [process(2, 0.5, start=20)])
    assert children_cpu_s(usage) == 5.5


def test_waiting_for_disks_is_absent_where_the_kernel_does_not_account(tmp_path: Path) -> None:
    usage = ProcessUsage()
    usage.update(process(1, 2.0), [process(2, 5.0)])
    names = {name for name, _ in usage.series(("1", "p"), io_wait=False)}
    assert "process_io_wait_seconds_total" not in names
    values = usage.series(("1", "p"), io_wait=True)
    assert values["process_io_wait_seconds_total", ("1", "p", "children")] == 0.5
    switch = tmp_path / "task_delayacct"
    assert io_wait_is_accounted(switch)
    switch.write_text("0\n")
    assert not io_wait_is_accounted(switch)
    switch.write_text("1\n")
    assert io_wait_is_accounted(switch)


def test_the_family_is_found_again_without_reading_every_process(
    parent: subprocess.Popen[str],
) -> None:
    family = {parent.pid, *map(int, reported(parent).split())}
    tree = ProcessTree()
    assert set(tree.read([parent.pid])) == family
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        assert set(tree.read([parent.pid])) == family
        # Other processes matter now, and those that did not are looked at again.
        assert {*family, stranger.pid} <= set(tree.read([os.getpid()]))
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as newer:
            assert newer.pid in tree.read([os.getpid()])
            newer.communicate()
        assert newer.pid not in tree.read([os.getpid()])
        assert set(tree.read([stranger.pid])) == {stranger.pid}
        stranger.communicate()
    assert tree.read([stranger.pid]) == {}
