"""The users of the cores of a process: by processor time, named only to those permitted."""

import os
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from tests.cases import cases
from warpwatch_devices.processes import read_process
from warpwatch_devices.processor_waits import Use, core_users

TICKS = os.sysconf("SC_CLK_TCK")


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
