"""The node beside its GPUs: NCCL's environment, the kernel log, schedulers, the host."""

import os
import shutil
import socket
from types import SimpleNamespace

import pytest

from tests.cases import cases
from tests.daemon.doctor.conftest import reading, surveyed
from tests.manual_clock import ManualClock
from warpwatch_capturing.config import StoreConfig
from warpwatch_daemon.cli import doctor
from warpwatch_daemon.config import Config
from warpwatch_daemon.doctor import gpus, host, interconnect
from warpwatch_daemon.doctor.check import Check
from warpwatch_devices.config import AttributionConfig
from warpwatch_devices.nvml.survey import GpuReading

CASES = cases(__file__)

INTERFACES = "Inter-| Receive\n face |bytes\n    lo: 0 0\n  eth0: 1 1\n"
HOST_PIDS = {"/proc/self/ns/pid": "-> pid:[4026531836]"}


def training(*pids: int) -> GpuReading:
    return reading(bus_id="00000000:1A:00.0", processes=pids)


def environment(pid: int, **values: str) -> dict[str, str]:
    text = "".join(f"{name}={value}\0" for name, value in values.items())
    return {f"/proc/{pid}/environ": text, f"/proc/{pid}/net/dev": INTERFACES}


def by_name(checks: list[Check]) -> dict[str, tuple[bool | None, str]]:
    return {check.name: (check.ok, check.detail) for check in checks}


def test_suspicious_variables_of_training_processes_are_explained_once(inputs):
    files = {
        **HOST_PIDS,
        **environment(7, NCCL_P2P_DISABLE="1", PASSWORD="secret", NCCL_SOCKET_IFNAME="ens5"),
        **environment(8, NCCL_P2P_DISABLE="1", NCCL_SOCKET_IFNAME="eth", NCCL_DEBUG="INFO"),
    }
    checks = list(interconnect.nccl_checks(inputs(surveyed(training(7, 8)), files)))
    assert by_name(checks) == {
        "NCCL_P2P_DISABLE": (
            False,
            "set to 1 (pid 7, pid 8): GPUs of the node copy through host memory "
            "instead of NVLink or PCIe",
        ),
        "NCCL_SOCKET_IFNAME": (
            False,
            "set to ens5 (pid 7): no such network interface: start-up fails",
        ),
    }
    assert "secret" not in repr(checks)


@pytest.mark.parametrize(("name", "value", "ok"), CASES["variables"])
def test_a_variable_of_this_shell_is_judged(inputs, name, value, ok, golden_case):
    given = inputs(files={"/proc/self/net/dev": INTERFACES}, environ={name: value})
    (check,) = interconnect.nccl_checks(given)
    golden_case("\n".join(doctor.lines([check])))
    if ok == "harmless":
        assert check == Check("environment", True, "nothing suspicious in this shell")
        return
    assert (check.name, check.ok) == (name, ok)
    assert check.detail.startswith(f"set to {value} (this shell): ")
    assert check.advice


def test_infiniband_that_is_switched_off_is_a_fault_where_there_is_some(inputs):
    files = {"/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n"}
    given = inputs(files=files, environ={"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx4"})
    found = by_name(list(interconnect.nccl_checks(given)))
    assert found["NCCL_IB_DISABLE"][0] is False
    assert found["NCCL_IB_HCA"][0] is False


def test_settings_of_the_node_are_read_from_the_file_of_nccl(inputs):
    files = {"/etc/nccl.conf": "# fast\nNCCL_PROTO = Simple\n"}
    (check,) = interconnect.nccl_checks(inputs(files=files))
    assert check.detail.startswith("set to Simple (/etc/nccl.conf): fixed")


def test_in_another_pid_namespace_processes_are_known_by_their_open_gpus(inputs):
    files = {
        **environment(7, CUDA_LAUNCH_BLOCKING="1"),
        **environment(9, NCCL_P2P_DISABLE="1"),
        "/proc/9/fd/4": "-> /dev/nvidia0",
        "/proc/7/fd/4": "-> /dev/null",
    }
    found = by_name(list(interconnect.nccl_checks(inputs(surveyed(training(7)), files))))
    assert list(found) == ["NCCL_P2P_DISABLE"]


def test_xids_of_the_kernel_log_are_explained_with_their_gpu(inputs):
    clock = ManualClock(monotonic=200_000.0)
    fallen = "-;NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus.\n"
    log = f"3,100,199998000000,{fallen}3,101,199999000000,{fallen}"
    log += f"3,102,0,-;usb 1-1: new device\n3,103,199995000000,{fallen.replace('1a', '1b')}"
    given = inputs(surveyed(training()), {"/dev/kmsg": log})
    ok, fault, elsewhere = gpus.xid_checks(given, clock.monotonic)
    assert (ok.name, ok.ok, fault.name, fault.ok) == ("kernel log", True, "XID 79", False)
    assert fault.detail.startswith("GPU 0 (0000:1a:00): ")
    assert ", 2 times, last 1 s ago. " in fault.detail
    assert fault.advice
    assert elsewhere.detail.startswith("0000:1b:00: ")
    assert ", once, 5 s ago. " in elsewhere.detail
    # A day later it is history, of a GPU that works again.
    clock.advance(24 * 3600.0)
    (_, old, _) = gpus.xid_checks(given, clock.monotonic)
    assert (old.ok, ", 2 times, last 1 d ago. " in old.detail) == (None, True)


def test_a_kernel_log_that_is_not_there_says_what_is_needed(inputs):
    (check,) = gpus.xid_checks(inputs())
    assert check.ok is None
    assert "/dev/kmsg: No such file" in check.detail
    assert "--device /dev/kmsg" in check.advice


def test_the_kubelet_is_asked_for_where_there_is_kubernetes_and_one_that_is_silent_is_a_fault(
    inputs,
):
    assert list(host.scheduler_checks(inputs())) == []
    in_pod = inputs(environ={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    check = next(host.scheduler_checks(in_pod))
    assert (check.name, check.ok) == ("kubelet", None)
    assert "hostPath" in check.advice
    config = Config(attribution=AttributionConfig(kubelet_socket="/k.sock"))
    given = inputs(config=config)
    path = given.machine.path("/k.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert next(host.scheduler_checks(given)).ok is False
        server.listen()
        check = next(host.scheduler_checks(given))
        assert (check.ok, check.detail) == (True, "/k.sock answers")


def test_infiniband_without_peer_memory_and_a_kernel_without_pressure_are_notes(inputs):
    files = {"/sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n"}
    found = by_name(list(host.host_checks(inputs(files=files))))
    assert found["InfiniBand"] == (None, "1 adapters (mlx5_0); not active: mlx5_0:1 down")
    assert (found["GPUDirect RDMA"][0], found["pressure (PSI)"][0]) == (None, None)
    files |= {"/proc/modules": "nvidia_peermem 16384 0 - Live\n", "/proc/pressure/cpu": "some\n"}
    found = by_name(list(host.host_checks(inputs(files=files))))
    assert found["GPUDirect RDMA"] == (True, "loaded: nvidia_peermem")
    assert found["pressure (PSI)"][0] is True


def test_folders_of_the_daemon_need_rights_and_200_mib(inputs, monkeypatch, golden_case):
    monkeypatch.setenv("WARPWATCH_DIR", "/no/run")
    monkeypatch.setenv("WARPWATCH_INBOX", "/no/inbox")
    node = inputs(config=Config(store=StoreConfig(url="file:///no/store")))
    text = ""
    for allowed, free in ((True, 201 << 20), (True, 200 << 20), (False, 1 << 40)):
        monkeypatch.setattr(os, "access", lambda *_, allowed=allowed: allowed)
        space = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, space=space: space)
        found = [
            one for one in host.agent_checks(node) if one.name[:5] in ("rende", "inbox", "captu")
        ]
        text += "\n".join(doctor.lines(found)) + "\n"
    golden_case(text.replace(f"uid {os.getuid()}", "uid UID"))
