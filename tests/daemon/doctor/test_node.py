"""The node beside its GPUs: NCCL's environment, the kernel log, schedulers, the host."""

import os
import shutil
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import cases
from tests.daemon.doctor.conftest import reading, surveyed
from tests.daemon.ranks.ring_files import Holder
from tests.manual_clock import ManualClock
from warpwatch_capturing.config import StoreConfig
from warpwatch_daemon.cli import doctor
from warpwatch_daemon.config import Config
from warpwatch_daemon.doctor import gpus, host
from warpwatch_daemon.doctor.check import Check, CheckInputs, Group
from warpwatch_daemon.doctor.interconnect import nccl_checks
from warpwatch_devices.config import AttributionConfig
from warpwatch_devices.nvml.survey import GpuReading

INTERFACES = "Inter-| Receive\n face |bytes\n    lo: 0 0\n  eth0: 1 1\n"


def training(*pids: int) -> GpuReading:
    return reading(bus_id="00000000:1A:00.0", processes=pids)


def host_checks(inputs: CheckInputs) -> Iterator[Check]:
    """Without the limits of this very process."""
    own = ("open files", "locked memory")
    return (check for check in host.host_checks(inputs) if check.name not in own)


CASES = cases(__file__)
GROUPS: dict[str, Group] = {"nccl": nccl_checks, "host": host_checks, "xid": gpus.xid_checks}
NODES: dict[str, dict[str, Any]] = CASES["nodes"] | {
    f"{name}={value}": {
        "checks": "nccl",
        "files": {"/proc/self/net/dev": INTERFACES},
        "environ": {name: value},
    }
    for name, value in CASES["variables"]
}


@pytest.mark.parametrize("case", NODES.values(), ids=NODES)
def test_what_is_found_and_what_to_do_is_said(inputs, case, golden_case):
    survey = surveyed(training(*case["training"])) if "training" in case else None
    node = inputs(survey, case.get("files"), environ=case.get("environ"))
    golden_case("\n".join(doctor.lines(GROUPS[case["checks"]](node))))


def test_xids_of_the_kernel_log_are_explained_with_their_gpu(inputs, golden_case):
    clock = ManualClock(monotonic=200_000.0)
    fallen = "-;NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.\n"
    log = f"3,100,199998000000,{fallen}3,101,199999000000,{fallen}"
    log += f"3,102,0,-;usb 1-1: new device\n3,103,199995000000,{fallen.replace('1a', '1b')}"
    given = inputs(surveyed(training()), {"/dev/kmsg": log})
    text = ""
    # A day later it is history, of a GPU that works again.
    for later_s in (0.0, 24 * 3600.0):
        clock.advance(later_s)
        text += "\n".join(doctor.lines(gpus.xid_checks(given, clock.monotonic))) + "\n"
    golden_case(text)


def test_the_kubelet_is_asked_for_where_there_is_kubernetes_and_one_that_is_silent_is_a_fault(
    inputs, golden_case
):
    node = inputs(config=Config(attribution=AttributionConfig(kubelet_socket="/k.sock")))
    # In a folder of which the kubelet has its own.
    other = inputs(files={"/var/lib/dpkg/status": ""})
    pod = inputs(environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    found = [list(host.scheduler_checks(one)) for one in (other, pod, node)]
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(node.machine.path("/k.sock")))
        found.append(list(host.scheduler_checks(node)))
        server.listen()
        found.append(list(host.scheduler_checks(node)))
    golden_case("\n".join(line for checks in found for line in doctor.lines(checks)))


def test_folders_need_rights_and_200_mib_and_shared_memory_8_gib(inputs, monkeypatch, golden_case):
    monkeypatch.setenv("WARPWATCH_DIR", "/no/run")
    monkeypatch.setenv("WARPWATCH_INBOX", "/no/inbox")
    node = inputs(config=Config(store=StoreConfig(url="file:///dev/null/store")))
    text = ""
    for allowed, mib, shared_mib in ((True, 201, 8192), (True, 200, 8191), (False, 1 << 20, 63)):
        monkeypatch.setattr(os, "access", lambda *_, allowed=allowed: allowed)
        space = SimpleNamespace(free=mib << 20)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, space=space: space)
        found = [
            one for one in host.agent_checks(node) if one.name[:5] in ("rende", "inbox", "captu")
        ]
        shared = SimpleNamespace(f_blocks=9 << 10, f_frsize=1 << 20, f_bavail=shared_mib)
        monkeypatch.setattr(os, "statvfs", lambda _, shared=shared: shared)
        found += [one for one in host_checks(node) if one.name == "/dev/shm"]
        text += "\n".join(doctor.lines(found)) + "\n"
    golden_case(text.replace(f"uid {os.getuid()}", "uid UID"))


def test_the_daemon_that_trainings_find_is_examined(inputs, tmp_path, monkeypatch):
    monkeypatch.delenv("WARPWATCH_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    lock = tmp_path / "warpwatch" / "daemon.lock"
    lock.parent.mkdir()
    lock.touch()
    holder = Holder(lock)
    (found,) = (one for one in host.agent_checks(inputs()) if one.name == "rendezvous")
    holder.close()
    assert found.detail == f"{lock.parent}, held by pid {holder.pid}"
