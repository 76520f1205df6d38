"""The users of the cores of a process: by processor time, named only to those permitted."""

import os
from pathlib import Path
from typing import Any

from warpwatch_devices.processes import Process
from warpwatch_devices.processor_waits import CoreUser, ProcessorUse, Use, core_users, uses

TICKS = os.sysconf("SC_CLK_TCK")
POD = "0::/kubepods.slice/kubepods-pod{}.slice/cri-containerd-1.scope\n"
ONE, OTHER = POD.format("1" * 32), POD.format("2" * 32)


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
        fields = f"R 1 1 1 0 -1 {more.get('flags', 0)} 0 0 0 0 {ticks} 0 0 0 20 0 1 0 50 0 9"
        (own / "stat").write_text(f"{pid} ({name}) {fields}{13 * ' 0'} 17 {core}{5 * ' 0'}\n")
        (own / "status").write_text(
            f"Name:\tx\nUid:\t{uid}\t0\t0\t0\nCpus_allowed_list:\t{cores}\n"
        )
        (own / "cgroup").write_text(more.get("cgroup", "0::/user.slice\n"))

    def used(self, pid: int, cores: float = 0.95) -> list[Use]:
        look = ProcessorUse(self.folder)
        look.poll(100.0, wanted=True)
        stat = self.folder / str(pid) / "stat"
        words = stat.read_text().rpartition(") ")
        fields = words[2].split(" ")
        fields[11] = str(int(fields[11]) + int(2 * cores * TICKS))
        stat.write_text(f"{words[0]}) {' '.join(fields)}")
        return look.poll(102.0, wanted=True)


def test_who_took_most_comes_first_and_who_took_little_is_left_out() -> None:
    before = by_identity(process(7, 10.0), process(8, 10.0), process(9, 10.0))
    now = by_identity(process(7, 10.5), process(8, 12.0), process(9, 10.01), process(10, 1.0))
    assert [(one.process.pid, one.cores) for one in uses(before, now, 2.0)] == [
        (8, 1.0), (10, 0.5), (7, 0.25),
    ]  # fmt: skip


def test_an_ended_child_is_its_parents_without_what_it_had_and_a_pid_may_come_again() -> None:
    before = by_identity(process(7, 1.0), process(8, 50.0, parent=7))
    now = by_identity(process(7, 1.0, waited_s=51.0))
    assert [(one.process.pid, one.cores) for one in uses(before, now, 2.0)] == [(7, 0.5)]
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


def test_a_process_of_the_user_is_named_with_its_core_until_it_is_gone(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    proc.put(3, name="train")
    proc.put(4711, name="make -j")
    used = proc.used(4711)
    assert core_users(3, 1000, used, tmp_path) == [CoreUser(4711, 0.95, "make -j", 5)]
    (tmp_path / "4711/status").unlink()
    assert core_users(3, 1000, used, tmp_path) == []


def test_of_another_user_or_pod_the_name_stays_untold_but_not_of_the_kernel(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    proc.put(3, uid=0, cgroup=ONE)
    for pid, uid, cgroup, name in (
        (11, 1001, ONE, None),
        (12, 0, OTHER, None),
        (13, 0, "0::/system.slice\n", None),
        (14, 0, ONE, "python"),
    ):
        proc.put(pid, uid=uid, cgroup=cgroup)
        assert [user.name for user in core_users(3, 0, proc.used(pid), tmp_path)] == [name]
    proc.put(15, uid=0, name="kswapd0", cgroup="0::/\n", flags=0x00200000)
    assert [user.name for user in core_users(3, 0, proc.used(15), tmp_path)] == ["kswapd0"]


def test_users_that_cannot_be_told_apart_are_nobodys(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    proc.put(3, uid=65534)
    proc.put(11, uid=65534)
    assert [user.name for user in core_users(3, 65534, proc.used(11), tmp_path)] == [None]
    (tmp_path / "11/cgroup").unlink()
    (tmp_path / "3/cgroup").unlink()
    assert [user.name for user in core_users(3, 65534, proc.used(11), tmp_path)] == [None]


def test_only_who_may_run_on_these_cores_and_was_there_used_them(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    proc.put(3, cores="4-5")
    proc.put(11, cores="0-3")
    assert core_users(3, 1000, proc.used(11), tmp_path) == []
    proc.put(12, cores="0-7", core=2)
    assert core_users(3, 1000, proc.used(12), tmp_path) == []
    proc.put(12, cores="0-7", core=4)
    assert core_users(3, 1000, proc.used(12), tmp_path) == [CoreUser(12, 0.95, "python", None)]


def test_who_may_run_only_here_is_first_and_itself_with_two_cores(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    proc.put(3)
    for pid, cores in ((11, "0-7"), (12, "5")):
        proc.put(pid, cores=cores)
    found = [*proc.used(11, 0.9), *proc.used(12, 0.3)]
    assert [user.pid for user in core_users(3, 1000, found, tmp_path)] == [12, 11]
    proc.put(3, cores="0-7")
    assert core_users(3, 1000, proc.used(3), tmp_path) == []
    assert core_users(3, 1000, proc.used(3, 4.0), tmp_path) == [CoreUser(3, 4.0, "python", None)]
