"""The users of the cores of a process: by processor time, named only to those permitted."""

import os
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from tests.cases import cases
from warpwatch_devices.processes import Process, read_process
from warpwatch_devices.processor_waits import ProcessorUse, Use, core_users, uses

TICKS = os.sysconf("SC_CLK_TCK")


def process(
    pid: int, cpu_s: float, *, parent: int = 1, start: int = 5, waited_s: float = 0.0
) -> Process:
    return Process(pid, "R", parent, start, cpu_s, waited_s, 4096, 0.0)


def by_identity(*processes: Process) -> dict[tuple[int, int], Process]:
    return {one.identity: one for one in processes}


class FakeProc:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "sys/kernel").mkdir(parents=True)
        (folder / "sys/kernel/overflowuid").write_text("65534\n")

    def put(self, pid: int, name: str = "python", cpu_s: float = 0.0, **more: Any) -> None:
        cores, uid, core = more.get("cores", "5"), more.get("uid", 1000), more.get("core", 5)
        own = self.folder / str(pid)
        own.mkdir(exist_ok=True)
        ticks = int(cpu_s * TICKS)
        flags, threads = more.get("flags", 0), more.get("threads", 1)
        fields = f"R 1 1 1 0 -1 {flags} 0 0 0 0 {ticks} 0 0 0 20 0 {threads} 0 50 0 9"
        (own / "stat").write_text(f"{pid} ({name}) {fields}{13 * ' 0'} 17 {core}{5 * ' 0'}\n")
        (own / "status").write_text(
            f"Name:\tx\nUid:\t{uid}\t0\t0\t0\nCpus_allowed_list:\t{cores}\n"
        )
        (own / "cgroup").write_text(more.get("cgroup", "0::/user.slice\n"))


def test_who_took_most_comes_first_and_who_took_little_is_left_out() -> None:
    before = by_identity(process(7, 10.0), process(8, 10.0), process(9, 10.0))
    now = by_identity(process(7, 10.5), process(8, 12.0), process(9, 10.09), process(10, 1.0))
    assert [(one.process.pid, one.cores) for one in uses(before, now, 2.0)] == [
        (8, 1.0), (10, 0.5), (7, 0.25),
    ]  # fmt: skip


def test_an_ended_child_is_its_parents_without_what_it_had_and_a_pid_may_come_again() -> None:
    before = by_identity(process(7, 1.0), process(8, 30.0, parent=7))
    before |= by_identity(process(9, 15.0, parent=7, waited_s=5.0))
    now = by_identity(process(7, 1.0, waited_s=51.0))
    assert [(one.process.pid, one.cores) for one in uses(before, now, 2.0)] == [(7, 0.5)]
    assert uses(before, now, 0.0) == []
    # One that nobody waited for subtracts nothing.
    assert [one.cores for one in uses(before, by_identity(process(7, 2.0)), 2.0)] == [0.5]
    before, now = by_identity(process(7, 100.0)), by_identity(process(7, 1.0, start=9))
    assert [one.cores for one in uses(before, now, 2.0)] == [0.5]


def test_all_processes_are_read_twice_and_then_not_for_half_a_minute(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    proc.put(7, cpu_s=1.0)
    look = ProcessorUse(tmp_path)
    assert look.poll(100.0, wanted=False) == []
    proc.put(7, cpu_s=3.0)
    assert look.poll(102.0, wanted=True) == []
    proc.put(7, cpu_s=5.0)
    assert [one.cores for one in look.poll(104.0, wanted=False)] == [1.0]
    for at in (106.0, 130.0):
        proc.put(7, cpu_s=at)
        assert look.poll(at, wanted=True) == []
    proc.put(7, cpu_s=134.0)
    assert [one.cores for one in look.poll(134.0, wanted=True)] == []
    proc.put(7, cpu_s=136.0)
    assert [one.cores for one in look.poll(136.0, wanted=True)] == [1.0]
    # Where waiting has risen they are read again after a few seconds.
    for at in (138.0, 139.9, 140.0):
        assert look.poll(at, wanted=True, risen=True) == []
    proc.put(7, cpu_s=138.0)
    assert [one.cores for one in look.poll(142.0, wanted=True, risen=True)] == [1.0]


@pytest.mark.parametrize("case", cases(__file__).values(), ids=cases(__file__))
def test_the_users_of_cores_are_found_and_named_to_those_permitted(
    tmp_path: Path, case: dict[str, Any]
) -> None:
    proc = FakeProc(tmp_path)
    for pid, about in case["processes"].items():
        proc.put(pid, **about)
    used = []
    for pid, cores in case["uses"]:
        process = read_process(pid, tmp_path)
        assert process is not None
        used.append(Use(process, cores))
    for name in case.get("gone", ()):
        (tmp_path / name).unlink()
    found = core_users(3, case.get("owner", 1000), used, tmp_path)
    assert [list(astuple(user)) for user in found] == case["users"]
