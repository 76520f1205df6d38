"""The obstacles to a process's core and memory: run queues, control groups, the hypervisor."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cases import cases
from tests.waiting import eventually
from warpwatch_devices import processor_waits
from warpwatch_devices.memory_groups import group_headroom, host_headroom, memory_groups, oom_kills


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def thread(proc: Path, tid: int, run_s: float, wait_s: float) -> None:
    write(proc / f"7/task/{tid}/schedstat", f"{run_s * 1e9:.0f} {wait_s * 1e9:.0f} 12\n")


def test_the_waits_of_threads_are_summed_and_the_longest_is_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first ones count, with the main thread.
    monkeypatch.setattr(processor_waits, "MAX_THREADS", 2)
    queue = processor_waits.RunQueue(7, tmp_path)
    thread(tmp_path, 9, 1.0, 9.0)
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
    thread(tmp_path, 7, 1.5, 4.0)
    thread(tmp_path, 8, 0.1, 0.2)
    thread(tmp_path, 9, 0.5, 0.5)
    wait = queue.poll(110.0)
    # Of neither is known for how long it waited.
    assert wait is not None and (wait.wait_ns, wait.share) == (700_000_000, 0.0)
    # One that is gone when all are listed is another one if it comes again.
    (tmp_path / "7/task/8/schedstat").unlink()
    (tmp_path / "7/task/8").rmdir()
    queue.poll(120.0)
    thread(tmp_path, 8, 5.0, 0.7)
    thread(tmp_path, 9, 0.5, 20.5)
    wait = queue.poll(130.0)
    assert (wait.wait_ns, wait.share) == (20_700_000_000, 1.0)


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


FUNCTIONS: dict[str, Callable[[Path], object]] = {
    "throttling": lambda top: processor_waits.throttling(7, top / "proc", top),
    "memory_groups": lambda top: ", ".join(
        str(group.relative_to(top)) for group in memory_groups(7, top / "proc", top)
    ),
    "memory_headroom": group_headroom,
    "host_headroom": lambda top: host_headroom(top / "proc"),
    "oom_kills": oom_kills,
}


@pytest.mark.parametrize("case", cases(__file__).values(), ids=cases(__file__))
def test_limits_and_memory_are_read_from_files_of_either_version(
    tmp_path: Path, case: dict[str, dict[str, str]]
) -> None:
    for name, text in case["files"].items():
        write(tmp_path / name, text)
    assert {name: str(FUNCTIONS[name](tmp_path)) for name in case["said"]} == case["said"]


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
