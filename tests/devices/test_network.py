"""RDMA ports on made /sys trees of two real machines' shapes: InfiniBand and RoCE; and EFA."""

from __future__ import annotations

from pathlib import Path

from tests.devices.conftest import Golden
from tests.devices.ports import BRIDGE, EFA, INFINIBAND, ROCE, make
from tests.devices.recording import RecordingSink
from warpwatch_devices.network import NetworkSource, read_ports
from warpwatch_devices.source import Surroundings
from warpwatch_telemetry.samples import Device, DeviceSample


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
        Surroundings(lambda _: None, lambda: gpus, lambda: False, lambda _: None), sys
    )


def test_infiniband_roce_and_efa_have_counters(tmp_path: Path, golden: Golden) -> None:
    make(tmp_path, "mlx5_0", INFINIBAND, f"{BRIDGE}/0000:18:00.0")
    make(tmp_path, "mlx5_2", ROCE, f"{BRIDGE}/0000:19:00.0")
    make(tmp_path, "rdmap0s6", EFA, f"{BRIDGE}/0000:1a:00.0")
    ports = dict(read_ports(tmp_path))
    lines = [f"{key} {ports[name][key]}" for name in sorted(ports) for key in sorted(ports[name])]
    # InfiniBand counts words; what holds no number, such as VL15_dropped, is absent.
    golden("network_ports.txt", "".join(f"{line}\n" for line in lines).encode())


def test_a_gpu_behind_the_same_switch_is_near_and_one_behind_another_is_not(tmp_path: Path) -> None:
    make(tmp_path, "mlx5_0", INFINIBAND, f"{BRIDGE}/0000:17:00.0/0000:18:00.0")
    near = gpu(tmp_path, "GPU-near", "0000:1b:00.0", f"{BRIDGE}/0000:17:01.0/0000:1b:00.0")
    far = gpu(tmp_path, "GPU-far", "0000:5d:00.0", "devices/pci0000:59/0000:59:01.0/0000:5d:00.0")
    host = gpu(tmp_path, "GPU-host", "0000:1f:00.0", "devices/pci0000:15/0000:15:02.0/0000:1f:00.0")
    (sample,) = read(tmp_path, source_of(tmp_path, near, far, host)).hosts
    found = [labels for name, labels in sample.values if name == "network_port_gpu_info"]
    assert found == [("mlx5_0", "1", "GPU-near")]


def test_a_port_gone_is_down_and_a_machine_without_any_is_silent(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    assert read(tmp_path, source).hosts == []
    port = make(tmp_path, "mlx5_0", INFINIBAND, f"{BRIDGE}/0000:18:00.0")
    key = ("network_port_up", ("mlx5_0", "1"))
    assert read(tmp_path, source).hosts[0].ports["mlx5_0/1"][key] == 1
    (port / "state").write_text("1: DOWN\n")
    assert read(tmp_path, source).hosts[0].ports["mlx5_0/1"][key] == 0
    port.parents[1].rename(tmp_path / "fallen-off")
    assert read(tmp_path, source).hosts[0].ports["mlx5_0/1"] == {key: 0}
