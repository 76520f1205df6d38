"""Why a rank has no core, and who has it, of real and of made-up processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.daemon.ranks.sources import ranks_source
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.rank_processes import RankProcessor
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_devices.process_tree import read_process
from warpwatch_telemetry.records import RankEvent

CORE = max(os.sched_getaffinity(0))
_PIN = f"import os; os.sched_setaffinity(0, {{{CORE}}})\n"
# A training process that takes a step and then computes.
_TRAINING = f"""{_PIN}
import glob, time
import warpwatch
monitor = warpwatch.attach(job="crowded")
while not glob.glob(os.environ["WARPWATCH_DIR"] + "/ranks/*.ring"):
    with monitor.step():
        time.sleep(0.01)
print("running", flush=True)
while True:
    pass
"""
_HOG = f"""{_PIN}
print("running", flush=True)
while True:
    pass
"""


@pytest.fixture
def crowd(folder: RendezvousFolder, stack: ExitStack) -> list[int]:
    """PIDs of a training and of who computes on the same core, one as another user if it may."""
    other = "import os; os.setuid(20009)\n" if os.geteuid() == 0 else ""
    return [begun(stack, folder, program) for program in (_TRAINING, _HOG, other + _HOG)]


def begun(stack: ExitStack, folder: RendezvousFolder, program: str) -> int:
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "WARPWATCH_DIR": str(folder.path)},
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process.pid


def looked(source: RanksSource, at: float) -> RankEvent:
    (seen,) = (
        record
        for record in source.poll(time.time(), at)
        if isinstance(record, RankEvent) and record.event == "process"
    )
    return seen


def have_used(pids: list[int], cpu_s: float) -> None:
    """Each so much from now on, however many others want the core."""
    due = {pid: used_s(pid) + cpu_s for pid in pids}
    while any(used_s(pid) < until_s for pid, until_s in due.items()):
        time.sleep(0.05)


def used_s(pid: int) -> float:
    process = read_process(pid)
    assert process is not None and process.alive
    return process.cpu_s


def test_a_rank_that_waits_for_its_core_says_who_has_it(
    source: RanksSource, crowd: list[int]
) -> None:
    _, hog, other = crowd
    assert "core_wait_share" not in looked(source, 1000.0).detail
    have_used([hog, other], 0.4)
    waiting = looked(source, 1002.0).detail
    assert waiting["core_wait_share"] > 0.3
    assert "core_users" not in waiting
    have_used([hog, other], 0.4)
    users = {user["pid"]: user for user in looked(source, 1004.0).detail["core_users"]}
    assert users[hog]["core"] == CORE and users[hog]["cores"] >= 0.15
    assert users[hog]["name"].startswith("python")
    if os.geteuid() == 0:
        assert users[other].keys() == {"pid", "cores", "core"}
    (state,) = source.states(1004.0)
    assert state.core_wait_s is not None and state.core_wait_s > 0.6


def test_what_a_rank_waited_is_counted_on_over_a_restart_of_the_daemon(
    folder: RendezvousFolder, source: RanksSource, crowd: list[int]
) -> None:
    at = 1000.0
    looked(source, at)
    have_used(crowd[1:], 0.2)
    looked(source, at + 2.0)
    (before,) = source.states(at)
    source.close()
    successor = ranks_source(folder)
    looked(successor, at)
    (after,) = successor.states(at)
    assert before.core_wait_s is not None and before.core_wait_s > 0.1
    assert after.core_wait_s == before.core_wait_s


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limited(folder: Path, periods: int, throttled: int, usec: int) -> None:
    text = f"nr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec {usec}\n"
    write(folder / "cgroup/job/cpu.stat", text)
    write(folder / "cgroup/job/cpu.max", "150000 100000\n")


def test_a_limit_that_is_reached_and_cores_that_are_stolen_are_shares_of_the_time(
    tmp_path: Path,
) -> None:
    write(tmp_path / "7/cgroup", "0::/job\n")
    write(tmp_path / "7/status", "Name:\tpython\nCpus_allowed_list:\t1\n")
    write(tmp_path / "7/task/7/schedstat", "1000000000 0 5\n")
    limited(tmp_path, 100, 10, 5000)
    processor = RankProcessor(7, tmp_path, tmp_path / "cgroup")
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


def test_a_wait_has_risen_only_since_it_was_told_who_has_the_cores(tmp_path: Path) -> None:
    processor = RankProcessor(7, tmp_path, tmp_path / "cgroup")
    risen = []
    for number, wait_s in enumerate((0.0, 0.1, 0.2, 1.2, 2.2)):
        write(tmp_path / "7/task/7/schedstat", f"{number}000000000 {wait_s * 1e9:.0f} 5\n")
        processor.look(100.0 + 2 * number, {})
        risen.append((processor.waits_long, processor.has_risen))
        if number in (2, 3):
            processor.tell()
    assert risen == [(False, False), (True, False), (True, False), (True, True), (True, False)]


def test_where_the_kernel_says_nothing_nothing_is_known(tmp_path: Path) -> None:
    processor = RankProcessor(7, tmp_path, tmp_path / "cgroup")
    assert [processor.look(at, {}) for at in (100.0, 102.0)] == [{}, {}]
    assert processor.take_counts() == {}
    assert not processor.waits_long
