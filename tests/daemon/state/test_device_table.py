"""What several sources know of one device becomes one sample."""

from __future__ import annotations

import itertools

from warpwatch_daemon.state.device_table import DeviceTable
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import Device, DeviceSample

GPU = Device("GPU-1", 0, "H100")
POWER: SeriesKey = ("device_power_watts", ())
TENSOR: SeriesKey = ("device_tensor_active_ratio", ())
XID: SeriesKey = ("device_xid_errors_total", ("79",))
NVML = DeviceSample(GPU, 1.0, {POWER: 300.0})
DCGM = DeviceSample(GPU, 1.0, {POWER: 290.0, TENSOR: 0.4}, source="dcgm")


def table(*samples: DeviceSample, **by_source: float) -> DeviceTable:
    table = DeviceTable(4.0, by_source)
    for sample in samples:
        table.put(sample, 100.0)
    return table


def failed(reason: str) -> DeviceSample:
    return DeviceSample(GPU, 1.0, {XID: 1}, up=False, reason=reason)


def test_of_two_values_the_better_sources_stands_whatever_comes_first():
    for samples in itertools.permutations((NVML, DCGM)):
        (merged,) = table(*samples).merged(101.0)
        assert merged.values == {POWER: 300.0, TENSOR: 0.4}


def test_what_a_lesser_source_adds_is_only_what_the_better_one_lacks():
    known = table(NVML)
    added = known.put(DCGM, 100.0)
    assert added is not None
    assert added.values == {TENSOR: 0.4}
    assert known.put(DeviceSample(GPU, 1.0, {POWER: 290.0}, source="dcgm"), 100.0) is None
    assert known.put(NVML, 100.0) is NVML


def test_each_source_grows_old_for_itself():
    known = table(NVML, DCGM, dcgm=40.0)
    (merged,) = known.merged(110.0)
    assert (merged.up, merged.values) == (True, {POWER: 290.0, TENSOR: 0.4})
    (old,) = known.merged(141.0)
    assert (old.up, old.reason, old.values) == (False, "stale", {})


def test_a_lost_device_is_down_though_another_source_still_has_old_values():
    known = table(DCGM, failed("lost"))
    (merged,) = known.merged(100.0)
    assert (merged.up, merged.reason, merged.values) == (False, "lost", {XID: 1})
    # Nor does it come back through the log.
    assert known.put(DCGM, 100.0) is None


def test_a_device_that_only_nvml_may_not_read_is_nvmls_and_read_by_the_other():
    (merged,) = table(failed("no_permission"), DCGM).merged(100.0)
    assert (merged.up, merged.source) == (True, "nvml")
    assert merged.values == {POWER: 290.0, TENSOR: 0.4, XID: 1}


def test_a_source_that_forgets_a_device_leaves_it_to_the_others():
    known = table(NVML, DCGM)
    known.forget("GPU-1", "nvml")
    assert known.merged(100.0)[0].values[POWER] == 290.0
    known.forget("GPU-1", "dcgm")
    assert known.merged(100.0) == ()


def test_devices_come_by_index_and_instance():
    devices = [
        Device("MIG-b", 0, "A100", gpu_instance="10", profile="1g.10gb"),
        Device("GPU-2", 1, "A100"),
        Device("MIG-a", 0, "A100", gpu_instance="9", profile="1g.10gb"),
        GPU,
    ]
    known = table(*(DeviceSample(device, 1.0) for device in devices))
    uuids = [sample.device.uuid for sample in known.merged(100.0)]
    assert uuids == ["GPU-1", "MIG-a", "MIG-b", "GPU-2"]
