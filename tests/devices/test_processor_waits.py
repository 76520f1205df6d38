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
