"""Processes that use a GPU are followed with their children, who come and go."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cases import cases
from tests.devices.hand_loops import HandLoops
from tests.devices.recording import RecordingSink
from tests.manual_clock import ManualClock
from tests.waiting import eventually
from warpwatch_devices.processes import (
    Process,
    ProcessesSource,
    ProcessTree,
    ProcessUsage,
    read_process,
)
from warpwatch_devices.source import SourceContext
from warpwatch_telemetry.catalogue import CATALOGUE
from warpwatch_telemetry.samples import Device, DeviceProcess, DeviceSample

# Two children that compute; a line on its input ends and awaits the first of them.
PARENT = """
import subprocess, sys
code = "x = 0\\nwhile x < 3_000_000: x += 1\\nprint(flush=True)\\ninput()"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
busy = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(2)]
for child in busy:
    child.stdout.readline()
print(*(child.pid for child in busy), flush=True)
for child in busy:
    sys.stdin.readline()
    child.communicate(b"\\n")
    print("ended", flush=True)
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.communicate("\n\n")


def reported(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()


def source_of(*pids: int) -> ProcessesSource:
    processes = tuple(DeviceProcess(pid, "python") for pid in pids)
    sample = DeviceSample(Device("GPU-0", 0, "H100"), 1000.0, processes=processes)
    return ProcessesSource(
        SourceContext(lambda index: None, lambda: (sample,), lambda: False, lambda reason: None)
    )


def series(source: ProcessesSource, pid: int) -> dict[str, float]:
    sink = RecordingSink()
    source.read(sink)
    assert sink.healths[-1].up
    for name, labels in sink.processes[-1].values:
        assert len(labels) == len(CATALOGUE[name].labels)
        assert labels[:2] == (str(pid), "python")
    return {
        " ".join((name, *labels[2:])): value
        for (name, labels), value in sink.processes[-1].values.items()
    }


def test_children_count_and_what_they_used_stays(parent):
    first, second = map(int, reported(parent).split())
    source = source_of(parent.pid)
    before = series(source, parent.pid)
    assert before["process_children"] == 2
    assert before["process_cpu_seconds_total children"] > 0.05
    assert before["process_resident_memory_bytes children"] > 2 * 2**20
    assert before["process_resident_memory_bytes self"] > 2**20
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert reported(parent) == "ended"
    after = series(source, parent.pid)
    assert after["process_children"] == 1
    # All usage of the exited child counts once: the kernel knows it from the parent's wait.
    left, waited = read_process(second), read_process(parent.pid)
    assert left is not None and waited is not None and waited.waited_s > 0
    total_s = after["process_cpu_seconds_total children"]
    assert total_s >= before["process_cpu_seconds_total children"]
    assert total_s == pytest.approx(left.cpu_s + waited.waited_s, abs=0.05)
    assert read_process(first) is None


def test_a_process_that_is_gone_has_no_series_and_a_zombie_is_no_living_child():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own, of_child = source_of(os.getpid()), source_of(child.pid)
    assert series(of_child, child.pid)["process_children"] == 0
    living = series(own, os.getpid())["process_children"]
    child.stdin.close()
    eventually(lambda: (found := read_process(child.pid)) and not found.alive)
    assert series(own, os.getpid())["process_children"] == living - 1
    child.wait()
    assert series(of_child, child.pid) == {}
    # Where no process uses a GPU there is nothing to say.
    assert series(source_of(0), 0) == {}


def test_it_is_read_in_a_loop_not_in_a_pid_namespace(monkeypatch):
    for sees in (True, False):
        monkeypatch.setattr("warpwatch_devices.processes.sees_host_processes", lambda: sees)  # noqa: B023
        loops, sink = HandLoops(ManualClock()), RecordingSink()
        source_of(os.getpid()).start(loops, sink)
        loops.round()
        assert loops.names == ["processes"][: int(sees)]
        assert bool(sink.processes) is sees
        assert sink.healths[-1].up
        assert ("PID namespace" in sink.healths[-1].reason) is not sees


def process(pid: int, cpu_s: float = 0.0, waited_s: float = 0.0, **more: int) -> Process:
    parent, start = more.get("parent", 1), more.get("start", 0)
    return Process(pid, "R", parent, start, cpu_s, waited_s, 1000, io_wait_s=cpu_s / 10)


@pytest.mark.parametrize("looks", cases(__file__).values())
def test_what_children_used_counts_once(looks):
    usage = ProcessUsage()
    for waited_s, children, seen_s in looks:
        seen = [process(pid, **of) for pid, of in children.items()]
        usage.update(process(1, waited_s=waited_s), seen)
        values = usage.series(("1", "p"), io_wait=True)
        resident_bytes = values["process_resident_memory_bytes", ("1", "p", "children")]
        assert resident_bytes == 1000 * len(seen)
        assert values["process_cpu_seconds_total", ("1", "p", "children")] == seen_s


def test_few_reads_find_a_family(parent, monkeypatch):
    read: list[int] = []

    def noted(pid: int) -> Process | None:
        read.append(pid)
        return read_process(pid)

    monkeypatch.setattr("warpwatch_devices.processes.read_process", noted)
    clock = ManualClock()
    family = {parent.pid, *map(int, reported(parent).split())}
    tree = ProcessTree(clock.monotonic)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        for due in (True, False, True, False):
            read.clear()
            assert set(tree.read([parent.pid])) == family
            assert (stranger.pid in read) is due
            clock.advance(30)
        # Other processes matter now, and those that did not are looked at again.
        assert {*family, stranger.pid} <= set(tree.read([os.getpid()]))
        assert set(tree.read([stranger.pid])) == {stranger.pid}
        stranger.communicate()
    assert tree.read([stranger.pid]) == {}
