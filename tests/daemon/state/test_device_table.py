"""What several sources know of one device becomes one sample."""

from __future__ import annotations

from warpwatch_daemon.state.device_table import DeviceTable
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import Device, DeviceSample

GPU = Device("GPU-1", 0, "H100")
POWER: SeriesKey = ("device_power_watts", ())
TENSOR: SeriesKey = ("device_tensor_active_ratio", ())
XID: SeriesKey = ("device_xid_errors_total", ("79",))


def nvml(time: float = 1.0, **changes: object) -> DeviceSample:
    return DeviceSample(GPU, time, {POWER: 300.0}, **changes)  # type: ignore[arg-type]


def dcgm(time: float = 1.0) -> DeviceSample:
    return DeviceSample(GPU, time, {POWER: 290.0, TENSOR: 0.4}, source="dcgm")


def test_of_two_values_the_better_sources_stands_whatever_comes_first():
    for samples in ((nvml(), dcgm()), (dcgm(), nvml())):
        table = DeviceTable(4.0)
        for sample in samples:
            table.put(sample, 1.0)
        (merged,) = table.merged(2.0)
        assert merged.values == {POWER: 300.0, TENSOR: 0.4}


def test_what_a_lesser_source_adds_is_only_what_the_better_one_lacks():
    table = DeviceTable(4.0)
    table.put(nvml(), 1.0)
    added = table.put(dcgm(), 1.0)
    assert added is not None
    assert added.values == {TENSOR: 0.4}
    assert table.put(DeviceSample(GPU, 1.0, {POWER: 290.0}, source="dcgm"), 1.0) is None
    again = nvml(2.0)
    assert table.put(again, 1.0) is again


def test_each_source_grows_old_for_itself():
    table = DeviceTable(4.0, {"dcgm": 40.0})
    table.put(nvml(), 100.0)
    table.put(dcgm(), 100.0)
    (merged,) = table.merged(110.0)
    assert merged.up
    assert merged.values == {POWER: 290.0, TENSOR: 0.4}
    (old,) = table.merged(141.0)
    assert (old.up, old.reason, old.values) == (False, "stale", {})


def test_a_lost_device_is_down_though_another_source_still_has_old_values():
    table = DeviceTable(4.0)
    table.put(dcgm(), 1.0)
    table.put(DeviceSample(GPU, 1.0, {XID: 1}, up=False, reason="lost"), 1.0)
    (merged,) = table.merged(1.0)
    assert (merged.up, merged.reason, merged.values) == (False, "lost", {XID: 1})
    # Nor does it come back through the log.
    assert table.put(dcgm(), 1.0) is None


def test_a_device_that_only_nvml_may_not_read_is_read_by_the_other():
    table = DeviceTable(4.0)
    table.put(DeviceSample(GPU, 1.0, {XID: 0}, up=False, reason="no_permission"), 1.0)
    table.put(dcgm(), 1.0)
    (merged,) = table.merged(1.0)
    assert merged.up
    assert merged.values == {POWER: 290.0, TENSOR: 0.4, XID: 0}
    # It is still NVML's device.
    assert merged.source == "nvml"


def test_a_source_that_forgets_a_device_leaves_it_to_the_others():
    table = DeviceTable(4.0)
    table.put(nvml(), 1.0)
    table.put(dcgm(), 1.0)
    table.forget("GPU-1", "nvml")
    assert table.merged(1.0)[0].values[POWER] == 290.0
    table.forget("GPU-1", "dcgm")
    assert table.merged(1.0) == ()


def test_devices_come_by_index_and_instance():
    table = DeviceTable(4.0)
    for device in (
        Device("MIG-b", 0, "A100", gpu_instance="10", profile="1g.10gb"),
        Device("GPU-2", 1, "A100"),
        Device("MIG-a", 0, "A100", gpu_instance="9", profile="1g.10gb"),
        GPU,
    ):
        table.put(DeviceSample(device, 1.0), 1.0)
    assert [s.device.uuid for s in table.merged(1.0)] == ["GPU-1", "MIG-a", "MIG-b", "GPU-2"]
