"""The host source reads this very machine; RDMA ports are on made /sys trees of two real ones."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import psutil
import pytest

from tests.devices.conftest import Golden
from tests.devices.hand_loops import HandLoops
from tests.devices.ports import BRIDGE, EFA, INFINIBAND, ROCE, make
from tests.devices.recording import RecordingSink
from tests.manual_clock import ManualClock
from warpwatch_devices import host
from warpwatch_devices.config import HostConfig
from warpwatch_devices.host import NetworkSource, read_ports
from warpwatch_devices.source import SourceContext
from warpwatch_telemetry.catalogue import CATALOGUE, CPU_MODES
from warpwatch_telemetry.samples import Device, DeviceSample


def test_everything_read_is_in_the_catalogue_and_of_this_machine_in_base_units() -> None:
    values, missing = host.read_host()
    assert missing == []
    for name, labels in values:
        assert CATALOGUE[name].scope in ("host", "agent")
        assert len(labels) == len(CATALOGUE[name].labels)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert values["host_memory_total_bytes", ()] == pytest.approx(pages, rel=0.01)


def test_the_number_of_interfaces_is_bounded() -> None:
    assert len(host.real_interfaces(f"eth{i}" for i in range(500))) == 64


def test_the_source_publishes_at_its_interval() -> None:
    loops, sink = HandLoops(ManualClock()), RecordingSink()
    host.HostSource(HostConfig(interval_s=7)).start(loops, sink)
    assert loops["host"].interval_s == 7
    loops.run("host", "host")
    first, last = sink.hosts
    assert last.time >= first.time
    key = ("host_cpu_seconds_total", ("idle",))
    assert last.values[key] >= first.values[key]
    assert (sink.healths[-1].up, sink.healths[-1].reason) == (True, "")


def test_what_cannot_be_read_is_named_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    loops, sink = HandLoops(ManualClock()), RecordingSink()
    host.HostSource(HostConfig()).start(loops, sink)
    errors = 2 * (OSError, RuntimeError, psutil.AccessDenied)
    parts: dict[str, Any] = {
        name: Mock(side_effect=of) for name, of in zip(host._PARTS, errors, strict=True)
    }
    monkeypatch.setattr(host, "_PARTS", parts)
    loops.run("host", "host")
    health = sink.healths[-1]
    assert (health.name, health.up, health.errors) == ("host", False, 2 * 6)
    assert health.reason == "not readable: cpu, memory, pressure, disks, network, agent"
    parts["cpu"] = Mock(return_value={("host_cpu_cores", ()): 4})
    loops.run("host")
    assert sink.healths[-1].up and "cpu" not in sink.healths[-1].reason


def test_counters_have_their_own_series(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = ("read_bytes", "write_bytes", "read_count", "write_count", "busy_time")
    network = ("bytes_recv", "bytes_sent", "errin", "errout", "dropin", "dropout")
    memory = ("total", "available", "used", "cached", "shared")
    answers = {
        "disk_io_counters": {"sda": numbered(disk, 1000)},
        "net_io_counters": {"eth0": numbered(network, 2000)},
        "virtual_memory": numbered(memory, 3000),
        "swap_memory": numbered(("total", "used", "sin", "sout"), 4000),
        # The hypervisor has stolen nothing.
        "cpu_times": numbered(CPU_MODES[::-1], 0),
        "cpu_count": 64,
        "boot_time": 1.7e9,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(psutil, name, lambda answer=answer, **_: answer)
    monkeypatch.setattr(host, "_BLOCK_DEVICES", Path("/nowhere"))
    monkeypatch.setattr(os, "getloadavg", lambda: (1.0, 2.0, 3.0))
    numbers = {f"{name}.return_value": at for at, name in enumerate(("num_fds", "num_threads"), 7)}
    own = MagicMock(**{"memory_info.return_value.rss": 5, "create_time.return_value": 6}, **numbers)
    own.cpu_times.return_value = numbered(("user", "system"), 100)
    monkeypatch.setattr(host, "_PROCESS", own)
    monkeypatch.setattr(host, "_PRESSURE", tmp_path)
    (tmp_path / "cpu").write_text("some avg10=0.00 avg60=0.10 avg300=0.20 total=1500000\n")
    (tmp_path / "io").write_text("some avg10=0.00 total=2000000\nfull avg10=0.00 total=250000\n")
    values, _ = host.read_host()
    lines = [f"{key} {values[key]}" for key in sorted(values)]
    golden("host_counters.txt", "".join(f"{line}\n" for line in lines).encode())


def numbered(names: tuple[str, ...], first: int) -> SimpleNamespace:
    return SimpleNamespace(**{name: first + at for at, name in enumerate(names)})


def gpu(sys: Path, uuid: str, address: str, bus: str) -> DeviceSample:
    folder = sys / bus
    folder.mkdir(parents=True)
    (sys / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (sys / "bus/pci/devices" / address).symlink_to(folder)
    info = {"pci_bus_id": f"0000{address}".upper()}
    return DeviceSample(Device(uuid, 0, "H100", info=info), 0.0)


def read(sys: Path, source: NetworkSource) -> RecordingSink:
    sink = RecordingSink()
    source._read(sink)
    return sink


def source_of(sys: Path, *gpus: DeviceSample) -> NetworkSource:
    return NetworkSource(
        SourceContext(lambda _: None, lambda: gpus, lambda: False, lambda _: None), sys
    )


def test_infiniband_roce_and_efa_have_counters(
    tmp_path: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "mlx5_0", INFINIBAND, f"{BRIDGE}/0000:18:00.0")
    make(tmp_path, "mlx5_2", ROCE, f"{BRIDGE}/0000:19:00.0")
    make(tmp_path, "rdmap0s6", EFA, f"{BRIDGE}/0000:1a:00.0")
    ports = dict(read_ports(tmp_path))
    lines = [f"{key} {ports[name][key]}" for name in sorted(ports) for key in sorted(ports[name])]
    # InfiniBand counts words; what holds no number, such as VL15_dropped, is absent.
    golden("network_ports.txt", "".join(f"{line}\n" for line in lines).encode())
    monkeypatch.setattr(host, "MAX_PORTS", 2)
    assert sorted(dict(read_ports(tmp_path))) == ["mlx5_0/1", "mlx5_2/1"]


def test_a_gpu_behind_the_same_switch_is_near_and_one_behind_another_is_not(tmp_path: Path) -> None:
    make(tmp_path, "mlx5_0", INFINIBAND, f"{BRIDGE}/0000:17:00.0/0000:18:00.0")
    near = gpu(tmp_path, "GPU-near", "0000:1b:00.0", f"{BRIDGE}/0000:17:01.0/0000:1b:00.0")
    far = gpu(tmp_path, "GPU-far", "0000:5d:00.0", "devices/pci0000:59/0000:59:01.0/0000:5d:00.0")
    host = gpu(tmp_path, "GPU-host", "0000:1f:00.0", "devices/pci0000:15/0000:15:02.0/0000:1f:00.0")
    # A MIG instance has the address of its GPU, and an unknown one none.
    part = replace(near, device=replace(near.device, uuid="MIG-near", gpu_instance="1"))
    odd = replace(near, device=replace(near.device, uuid="GPU-odd", info={}))
    (sample,) = read(tmp_path, source_of(tmp_path, near, far, host, part, odd)).hosts
    found = [labels for name, labels in sample.values if name == "network_port_gpu_info"]
    assert found == [("mlx5_0", "1", "GPU-near")]


def test_a_port_gone_is_down_and_a_machine_without_any_is_silent(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    assert read(tmp_path, source).hosts == []
    # A virtual function that vanishes may be in a pod.
    virtual = make(tmp_path, "mlx5_2", INFINIBAND, f"{BRIDGE}/0000:18:00.2")
    (virtual.parents[1] / "device/physfn").symlink_to(tmp_path / BRIDGE)
    assert sorted(read(tmp_path, source).hosts[0].ports) == ["mlx5_2/1"]
    virtual.parents[1].rename(tmp_path / "in-a-pod")
    assert read(tmp_path, source).hosts[0].ports == {}
    port = make(tmp_path, "mlx5_0", INFINIBAND, f"{BRIDGE}/0000:18:00.0")
    key = ("network_port_up", ("mlx5_0", "1"))
    assert read(tmp_path, source).hosts[0].ports["mlx5_0/1"][key] == 1
    (port / "state").write_text("1: DOWN\n")
    assert read(tmp_path, source).hosts[0].ports["mlx5_0/1"][key] == 0
    port.parents[1].rename(tmp_path / "fallen-off")
    assert read(tmp_path, source).hosts[0].ports["mlx5_0/1"] == {key: 0}
