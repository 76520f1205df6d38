"""MIG: instances as devices beside their GPU, while they come and go."""

from itertools import groupby

import pytest

from tests.devices.fakenvml.driver import FakeDriver
from tests.devices.nvml_by_hand import Stepper, texts, uuid

SLOW = 10
COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"
INSTANCES = ("0=3g.40gb/1/0", "2=2g.20gb/5/0", "5=2g.20gb/5/1")
ON_TWO = ("4000001/100/C/1/0", "4000002/200/C/5/1")


def begin(process: Stepper, *instances: str, profile: str = "a100") -> FakeDriver:
    fake = process.begin(profile)
    fake.mig(0, *(instances or INSTANCES))
    return fake


def pids_on_instances(process: Stepper) -> list[int]:
    return sorted(p.pid for part in process.instances.values() for p in part.processes)


def test_instances_are_devices_and_their_gpu_keeps_its_own_values(process: Stepper) -> None:
    begin(process)
    values = process.step()
    parts = sorted(process.instances.values(), key=lambda part: part.device.info["mig_index"])
    devices = [part.device for part in parts]
    assert [(d.index, d.gpu_instance, d.profile, d.info["mig_index"]) for d in devices] == [
        (0, "1", "3g.40gb", "0"),
        (0, "5", "1c.2g.20gb", "2"),
        (0, "5", "1c.2g.20gb", "5"),
    ]
    assert {d.info["parent_uuid"] for d in devices} == {uuid(0)}
    assert all(d.uuid.startswith("MIG-") for d in devices)
    # The two compute instances of one GPU instance share its memory: it is reported once.
    memory = [texts(part.values).get("memory_total_bytes", 0) for part in parts]
    assert memory == [40192 * 2**20, 19968 * 2**20, 0]
    assert values["mig_mode"] == 1
    assert {"power_watts", "temperature_celsius{sensor=gpu}", "energy_joules_total"} <= set(values)
    assert "utilization_ratio" not in values
    assert "busy_seconds_total" not in values


def test_processes_are_on_instances_asked_of_these_if_need_be(process: Stepper) -> None:
    fake = begin(process)
    fake.processes(0, *ON_TWO)
    process.step(2)
    on = {
        (part.device.gpu_instance, p.pid, p.memory_bytes)
        for part in process.instances.values()
        for p in part.processes
    }
    assert on == {("1", 4000001, 100 * 2**20), ("5", 4000002, 200 * 2**20)}
    assert process.gpu.processes == ()
    fake.fail(COMPUTE, 4)
    process.step(2)
    assert pids_on_instances(process) == []
    fake.fail(COMPUTE, 0)
    process.step(SLOW)
    assert pids_on_instances(process) == [4000001, 4000002]
    # Processes of a removed instance are not on the GPU.
    fake.processes(0, ON_TWO[0])
    fake.mig(0, INSTANCES[0])
    process.step(SLOW + 1)
    assert pids_on_instances(process) == [4000001]
    assert process.gpu.processes == ()


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetMaxMigDeviceCount",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetMemoryInfo_v2",
    ],
)
def test_instances_stay_while_they_cannot_be_asked_for(process: Stepper, function: str) -> None:
    fake = begin(process)
    process.step()
    before = process.instances.keys()
    assert len(before) == 3
    fake.fail(function, 999)
    process.step(SLOW + 1)
    assert process.instances.keys() == before
    assert not [name for name in process.nvml.sink.forgotten if name.startswith("MIG-")]
    # It is asked again in the next round, not in ten seconds.
    fake.mig(0, *INSTANCES, "6=1g.10gb/9/0")
    fake.fail(function, 0)
    process.step(3)
    assert len(process.instances) == 4 or function == "nvmlDeviceGetMigMode"
    fake.mig(0, INSTANCES[0])
    process.step(SLOW + 1)
    (left,) = process.instances.values()
    assert ("device_memory_used_bytes", ()) in left.values
    fake.mig(0, *INSTANCES)
    process.step(SLOW + 1)
    assert process.instances.keys() == before


def test_an_instance_without_a_name_has_its_gpus_and_a_profile_by_its_sizes(
    process: Stepper,
) -> None:
    fake = process.begin("a100")
    name = process.step() and process.gpu.device.name
    fake.fail("nvmlDeviceGetName", 999)
    fake.mig(0, *INSTANCES)
    process.step(SLOW + 1)
    found = [part.device for part in process.instances.values()]
    assert {device.name for device in found} == {name}
    assert sorted(device.profile for device in found) == ["1c.2g.20gb", "1c.2g.20gb", "3g.40gb"]


def test_the_lowest_compute_instance_has_the_memory_while_others_come_and_go(
    process: Stepper,
) -> None:
    kept = ("0=3g.40gb/1/0", "2=2g.20gb/5/1")
    fake = begin(process, *kept)
    process.step()
    shown = []
    for more in (("5=2g.20gb/5/0",), (), ("1=2g.20gb/5/0",), ()):
        fake.mig(0, *kept, *more)
        for _ in range(SLOW):
            process.step()
            parts = [p.device for p in process.instances.values() if p.values]
            shown.append("".join(sorted(device.info["mig_index"] for device in parts)))
    # One that is gone is noticed when its memory cannot be read, and its successor is read at once.
    rounds = [(slots, len([*of])) for slots, of in groupby(shown)]
    added, removed = [("02", 9), ("05", 2), ("0", 1)], [("02", 17), ("01", 1), ("0", 1), ("02", 9)]
    assert rounds == added + removed


def test_mig_is_turned_off_and_on_while_running(process: Stepper) -> None:
    fake = begin(process)
    assert "utilization_ratio" not in process.step()
    fake.mig_off(0)
    values = process.step(SLOW + 1)
    assert process.instances == {} and process.device.devices == (process.gpu.device,)
    forgotten = process.nvml.sink.forgotten
    assert len([name for name in forgotten if name.startswith("MIG-")]) == 3
    assert values["utilization_ratio"] == 0.5
    assert values["mig_mode"] == 0
    fake.mig(0, "default")
    values = process.step(SLOW + 1)
    assert len(process.instances) == 5
    assert "utilization_ratio" not in values
    assert "power_watts" in values


def test_counters_are_those_of_the_gpu_or_of_its_instances(process: Stepper) -> None:
    def rounds(number: int = 2 * SLOW) -> dict[str, float]:
        for _ in range(number):
            process.step()
        return process.step()

    fake = process.begin("h100")
    own = {"sm_active_ratio", "pcie_receive_bytes_total"}
    values = rounds()
    received = values["pcie_receive_bytes_total"]
    assert own <= values.keys()
    fake.mig(0, *INSTANCES)
    values = rounds()
    assert values["mig_mode"] == 1 and not own & values.keys()
    counting = [
        d.device for d in process.instances.values() if "sm_active_ratio" in texts(d.values)
    ]
    assert {(d.gpu_instance, d.info["mig_index"]) for d in counting} == {("1", "0"), ("5", "2")}
    fake.mig_off(0)
    values = rounds()
    assert values["mig_mode"] == 0 and own <= values.keys()
    assert values["pcie_receive_bytes_total"] >= received > 0
    process.device.close()
    buffers = [process.nvml.calls(f"nvmlGpmSample{does}") for does in ("Alloc", "Free")]
    assert buffers == [10, 10]


def test_instances_of_a_gpu_that_is_lost_are_lost_with_it(process: Stepper) -> None:
    fake = begin(process, profile="h100")
    process.step()
    process.nvml.ledger.observe(process.gpu.device.info["pci_bus_id"], 79, "kernel log")
    assert process.device.settled
    fake.set(0, lost=1)
    process.step()
    assert not process.device.settled
    down = [process.gpu, *process.instances.values()]
    assert [(d.up, d.reason) for d in down] == [(False, "lost")] * 4
    # XIDs are the GPU's: its instances do not count them again.
    assert [bool(d.values) for d in down] == [True, False, False, False]
    fake.set(0, lost=0)
    process.step(SLOW)
    assert [d.up for d in (process.gpu, *process.instances.values())] == [True] * 4
    used = ("device_memory_used_bytes", ())
    assert [used in d.values for d in process.instances.values()] == [True, True, False]
    process.step(2)
    counts = ("device_sm_active_ratio", ())
    assert [counts in d.values for d in process.instances.values()] == [True, True, False]
    # Buffers of the GPU's and of two GPU instances' counters, before and after.
    process.device.close()
    buffers = [process.nvml.calls(f"nvmlGpmSample{does}") for does in ("Alloc", "Free")]
    assert buffers == [12, 12]
    # One that is lost may say so first when it is asked for its instances.
    fake.fail("nvmlDeviceGetMaxMigDeviceCount", 15)
    process.step(SLOW)
    assert (process.gpu.up, process.gpu.reason) == (False, "lost")


def test_seven_instances_cost_few_calls(process: Stepper) -> None:
    begin(process, *(f"{slot}=1g.10gb/{7 + slot}/0" for slot in range(7)))
    process.step(SLOW + 1)
    before = process.calls()
    process.step(60)
    assert (process.calls() - before) / 60 <= 14
    assert len(process.instances) == 7
