"""MIG: instances as devices beside their GPU, while they come and go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.devices.fakenvml.driver import FakeDriver
from tests.devices.nvml_stepping import Stepper, stepping
from tests.devices.nvml_watched import watched
from tests.devices.recording import wait_until

SLOW = 10
COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"
GPU = "GPU-00000000-0000-0000-0000-000000000000"


@pytest.fixture(scope="module")
def process(fake_nvml: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stepper]:
    fake = FakeDriver(fake_nvml, tmp_path_factory.mktemp("driver"), profile="a100", gpus=1)
    with stepping(fake) as stepper:
        yield stepper


def begin(process: Stepper, *instances: str) -> FakeDriver:
    fake = process.begin("a100")
    fake.mig(0, *(instances or ("0=3g.40gb/1/0", "2=2g.20gb/5/0", "5=2g.20gb/5/1")))
    return fake


def test_instances_are_devices_and_their_gpu_keeps_its_own_values(process: Stepper) -> None:
    begin(process)
    values = process.step()
    by_place = {(d["gpu_instance"], d["profile"]) for d in process.instances.values()}
    memory = sorted(d["values"].get("memory_total_bytes", 0) for d in process.instances.values())
    indices = {d["index"] for d in process.instances.values()}
    parents = {d["info"]["parent_uuid"] for d in process.instances.values()}
    assert by_place == {("1", "3g.40gb"), ("5", "1c.2g.20gb")}
    assert len(memory) == 3
    # The two compute instances of one GPU instance share its memory: it is reported once.
    assert memory[0] == 0 < memory[1] < memory[2]
    assert indices == {0}
    assert parents == {GPU}
    assert values["mig_mode"] == 1
    assert {"power_watts", "temperature_celsius{sensor=gpu}", "energy_joules_total"} <= set(values)
    assert "utilization_ratio" not in values
    assert "busy_seconds_total" not in values


def test_a_process_is_on_its_instance_alone(process: Stepper) -> None:
    fake = begin(process)
    fake.processes(0, "4000001/100/C/1/0", "4000002/200/C/5/1")
    process.step(2)
    on_gpu = process.gpu["processes"]
    on = {
        (d["gpu_instance"], p[0], p[2]) for d in process.instances.values() for p in d["processes"]
    }
    assert on_gpu == []
    assert on == {("1", 4000001, 100 * 2**20), ("5", 4000002, 200 * 2**20)}


def test_instances_are_asked_for_their_processes_where_the_gpu_may_not_be(process: Stepper) -> None:
    fake = begin(process)
    fake.processes(0, "4000001/100/C/1/0")
    process.step()
    fake.fail("nvmlDeviceGetComputeRunningProcesses_v3", 4)
    process.step(2)
    fake.fail("nvmlDeviceGetComputeRunningProcesses_v3", 0)
    process.step(SLOW)
    on = [p[0] for d in process.instances.values() for p in d["processes"]]
    assert on == [4000001]


def test_who_was_on_an_instance_that_is_gone_is_not_on_the_gpu(process: Stepper) -> None:
    fake = begin(process)
    fake.processes(0, "4000001/100/C/1/0", "4000002/200/C/5/1")
    process.step()
    fake.fail(COMPUTE, 4)
    process.step(2)
    fake.fail(COMPUTE, 0)
    process.step(SLOW)
    on = {p[0] for d in process.instances.values() for p in d["processes"]}
    assert on == {4000001, 4000002}
    fake.processes(0, "4000001/100/C/1/0")
    fake.mig(0, "0=3g.40gb/1/0")
    process.step(SLOW + 1)
    on = {p[0] for d in process.instances.values() for p in d["processes"]}
    assert on == {4000001}
    assert process.gpu["processes"] == []


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetMaxMigDeviceCount",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetMigMode",
    ],
)
def test_instances_stay_while_they_cannot_be_asked_for(process: Stepper, function: str) -> None:
    fake = begin(process)
    process.step()
    before = process.instances.keys()
    fake.fail(function, 999)
    process.step(SLOW + 1)
    assert process.instances.keys() == before
    assert len(before) == 3
    assert not [uuid for uuid in process.forgotten if uuid.startswith("MIG-")]
    fake.mig(0, "0=3g.40gb/1/0")
    fake.fail(function, 0)
    process.step(SLOW + 1)
    assert len(process.instances) == 1


def test_a_whole_gpu_has_its_counters_again_after_mig_was_turned_off(
    fake_nvml: Path, tmp_path: Path
) -> None:
    fake = FakeDriver(fake_nvml, tmp_path, profile="h100", gpus=1)

    def has(mig_mode: int, counters: bool) -> bool:
        values = source.newest(0).get("values", {})
        reported = [name in values for name in ("sm_active_ratio", "pcie_receive_bytes_total")]
        return bool(values) and values.get("mig_mode") == mig_mode and reported == [counters] * 2

    with watched(fake.environment) as source:
        wait_until(lambda: has(mig_mode=0, counters=True))
        fake.mig(0, "default")
        wait_until(lambda: has(mig_mode=1, counters=False))
        fake.mig_off(0)
        wait_until(lambda: has(mig_mode=0, counters=True))
        totals = [
            sample["values"]["pcie_receive_bytes_total"]
            for sample in source.samples(source.newest(0)["device"])
            if "pcie_receive_bytes_total" in sample["values"]
        ]
    assert totals == sorted(totals)


def test_instances_come_and_go_while_running(process: Stepper) -> None:
    fake = begin(process)
    process.step()
    before = process.instances
    fake.mig(0, "0=3g.40gb/1/0", "1=1g.10gb/9/0")
    # The memory of the instance that is not there any more is asked for within two rounds.
    process.step(3)
    after = process.instances
    forgotten = process.forgotten
    assert process.gpu["up"]
    gone, new = before.keys() - after.keys(), after.keys() - before.keys()
    assert len(gone) == 2
    assert gone <= set(forgotten)
    assert [after[uuid]["profile"] for uuid in new] == ["1g.10gb"]
    assert all(d["up"] and d["values"]["memory_total_bytes"] for d in after.values())


def test_mig_is_turned_off_and_on_while_running(process: Stepper) -> None:
    fake = begin(process)
    assert "utilization_ratio" not in process.step()
    fake.mig_off(0)
    values = process.step(SLOW + 1)
    assert process.instances == {}
    assert len([uuid for uuid in process.forgotten if uuid.startswith("MIG-")]) == 3
    assert values["utilization_ratio"] == 0.5
    assert values["mig_mode"] == 0
    fake.mig(0, "default")
    values = process.step(SLOW + 1)
    assert len(process.instances) == 5
    assert "utilization_ratio" not in values
    assert "power_watts" in values


def test_instances_of_a_gpu_that_is_lost_are_lost_with_it(process: Stepper) -> None:
    fake = begin(process)
    process.step()
    fake.set(0, lost=1)
    process.step()
    down = [process.gpu, *process.instances.values()]
    assert [(d["up"], d["reason"]) for d in down] == [(False, "lost")] * 4
    fake.set(0, lost=0)
    process.step(2)
    assert [d["up"] for d in (process.gpu, *process.instances.values())] == [True] * 4


def test_seven_instances_cost_few_calls(process: Stepper) -> None:
    fake = begin(process)
    fake.mig(0, *(f"{slot}=1g.10gb/{7 + slot}/0" for slot in range(7)))
    process.step(SLOW + 1)
    before = process.calls()
    process.step(60)
    assert (process.calls() - before) / 60 <= 14
    assert len(process.instances) == 7
