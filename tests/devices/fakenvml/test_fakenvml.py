"""The fake driver as pynvml sees it, in a process of its own."""

from __future__ import annotations

import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.devices.fakenvml.driver import FakeDriver, build, function_names

CLIENT = Path(__file__).with_name("client.py")
ALL_ONES = 2**64 - 1


class NvmlCode(Exception):
    """What NVML returned instead of a value."""


class Client:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)

    def send(self, expression: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = 20) -> Any:
        answer = json.loads(self._answers.get(timeout=timeout_s))
        if "error" in answer:
            raise NvmlCode(answer["error"])
        return answer["value"]

    def __call__(self, expression: str) -> Any:
        self.send(expression)
        return self.answer()

    def code(self, expression: str) -> int:
        """The return code of an expression; 0: it has a value."""
        try:
            self(expression)
        except NvmlCode as code:
            return int(code.args[0])
        return 0

    def wait_for(self, expression: str, expected: object, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while (found := self._outcome(expression)) != expected:
            assert time.monotonic() < deadline, f"{expression} stays {found}"
            time.sleep(0.01)

    def _outcome(self, expression: str) -> object:
        try:
            return self(expression)
        except NvmlCode as code:
            return code


@contextmanager
def client(driver: FakeDriver, initialise: bool = True) -> Iterator[Client]:
    process = subprocess.Popen(
        [sys.executable, str(CLIENT)],
        env=os.environ | driver.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        ask = Client(process)
        if initialise:
            ask("nvmlInit()")
        yield ask
    finally:
        process.kill()
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def wait_for_code(ask: Client, expression: str, code: int) -> None:
    deadline = time.monotonic() + 60
    while (found := ask.code(expression)) != code:
        assert time.monotonic() < deadline, f"{expression} stays {found}"
        time.sleep(0.01)


# What each kind of GPU can tell: the return code of each question.
QUESTIONS = {
    "serial": "nvmlDeviceGetSerial(gpu(0))",
    "fan": "nvmlDeviceGetFanSpeed(gpu(0))",
    "jpeg": "nvmlDeviceGetJpgUtilization(gpu(0))",
    "margin": "nvmlDeviceGetMarginTemperature(gpu(0))",
    "slowdown": "nvmlDeviceGetTemperatureThreshold(gpu(0), 1)",
    "row_remap": "nvmlDeviceGetRowRemapperHistogram(gpu(0))",
    "retired_pages": "nvmlDeviceGetRetiredPages(gpu(0), 0)",
    "ecc": "nvmlDeviceGetTotalEccErrors(gpu(0), 0, 0)",
    "nvlink": "nvmlDeviceGetNvLinkState(gpu(0), 0)",
    "nvlink_errors": "nvmlDeviceGetNvLinkErrorCounter(gpu(0), 0, 0)",
    "mig": "nvmlDeviceGetMigMode(gpu(0))",
}
UNSUPPORTED = {
    "v100": {"fan", "jpeg", "margin", "row_remap", "mig"},
    "t4": {"fan", "jpeg", "margin", "row_remap", "nvlink", "nvlink_errors", "mig"},
    "a100": {"fan", "margin", "retired_pages"},
    "h100": {"fan", "retired_pages"},
    "b200": {"fan", "slowdown", "retired_pages", "nvlink_errors"},
    "rtx4090": {
        "serial",
        "slowdown",
        "row_remap",
        "retired_pages",
        "ecc",
        "nvlink",
        "nvlink_errors",
        "mig",
    },
}
# memory temperature, average and instant power, T.Limit, PCIe bytes, NVLink bytes, recovery action
FIELDS = (82, 185, 186, 194, 197, 202, 230)
SUPPORTED_FIELDS = {
    "v100": {82},
    "t4": set(),
    "a100": {82, 186, 197, 230},
    "h100": {82, 185, 186, 194, 197, 230},
    "b200": {82, 185, 186, 194, 197, 202, 230},
    "rtx4090": {185, 186, 194},
}


@pytest.mark.parametrize("profile", sorted(UNSUPPORTED))
def test_a_profile_tells_what_it_declares_and_nothing_else(
    fake_driver: FakeDriver, profile: str
) -> None:
    fake_driver.set(profile=profile)
    with client(fake_driver) as ask:
        refused = {name for name, question in QUESTIONS.items() if ask.code(question) == 3}
        answered = {name for name, question in QUESTIONS.items() if ask.code(question) == 0}
        codes = [code for code, _ in ask(f"fields(gpu(0), *{FIELDS})")]
        gpm = ask("nvmlGpmQueryDeviceSupport(gpu(0)).isSupportedDevice")
    assert refused == UNSUPPORTED[profile]
    assert answered == QUESTIONS.keys() - refused
    supported = {field for field, code in zip(FIELDS, codes, strict=True) if code == 0}
    assert supported == SUPPORTED_FIELDS[profile]
    assert bool(gpm) == (profile in ("h100", "b200"))


def test_structures_have_the_sizes_that_pynvml_expects(fake_driver: FakeDriver) -> None:
    with client(fake_driver) as ask:
        memory = ask("nvmlDeviceGetMemoryInfo(gpu(2), version=nvmlMemory_v2)")
        old_memory = ask("nvmlDeviceGetMemoryInfo(gpu(2))")
        pci = ask("nvmlDeviceGetPciInfo(gpu(2))")
        banks = ask("nvmlDeviceGetRowRemapperHistogram(gpu(2))")
        fabric = "nvmlDeviceGetGpuFabricInfoV(gpu(2), byref(f := c_nvmlGpuFabricInfo_v{}_t())) or f"
        states = [ask(fabric.format(version))["state"] for version in (2, 3)]
        sram = (
            "nvmlDeviceGetSramEccErrorStatus(gpu(2), byref(s := c_nvmlEccSramErrorStatus_v1_t()))"
        )
        assert ask.code(sram) == 0
        texts = [
            ask(f"nvmlDeviceGet{what}(gpu(2))")
            for what in ("Name", "UUID", "Serial", "VbiosVersion", "BoardPartNumber")
        ]
    mib = 2**20
    assert memory["total"] == 81559 * mib
    assert (memory["reserved"], memory["used"]) == (512 * mib, 20480 * mib)
    assert memory["free"] == (81559 - 512 - 20480) * mib
    assert old_memory["used"] == (512 + 20480) * mib
    assert (pci["busId"], pci["bus"], pci["pciDeviceId"]) == ("00000000:1A:00.0", 0x1A, 0x233010DE)
    assert banks == {"max": 2560, "high": 0, "partial": 0, "low": 0, "none": 0}
    assert states == [3, 3]
    assert texts == [
        "NVIDIA H100 80GB HBM3",
        "GPU-00000000-0000-0000-0000-000000000002",
        "1650000000002",
        "96.00.74.00.01",
        "692-2G520-0200-000",
    ]


def test_values_follow_the_control_file_at_run_time(fake_driver: FakeDriver) -> None:
    with client(fake_driver) as ask:
        assert ask("nvmlDeviceGetUtilizationRates(gpu(1))") == {"gpu": 50, "memory": 25}
        assert ask("nvmlDeviceGetPowerUsage(gpu(1))") == 370_000
        fake_driver.set(gpu=1, load=90, temperature_c=77, remapped_uncorrectable=3, pcie_width=8)
        ask.wait_for("nvmlDeviceGetPowerUsage(gpu(1))", 610_000)
        assert ask("nvmlDeviceGetTemperatureV(gpu(1), 0)") == 77
        assert ask("nvmlDeviceGetMarginTemperature(gpu(1))") == 8
        assert ask("nvmlDeviceGetRemappedRows(gpu(1))") == [0, 3, 0, 0]
        assert ask("nvmlDeviceGetCurrPcieLinkWidth(gpu(1))") == 8
        assert ask("nvmlDeviceGetPowerUsage(gpu(0))") == 370_000


@pytest.mark.parametrize(
    ("fault", "code"),
    [("lost", 15), ("reset_required", 16), ("no_permission", 4), ("unknown", 999)],
)
def test_a_fault_is_of_one_gpu_and_ends(fake_driver: FakeDriver, fault: str, code: int) -> None:
    with client(fake_driver) as ask:
        ask("(three := gpu(3)) and None")
        fake_driver.set(gpu=3, **{fault: True})
        wait_for_code(ask, "nvmlDeviceGetPowerUsage(three)", code)
        assert ask.code("gpu(3)") == code
        assert ask.code("fields(three, 186)") == code
        assert ask.code("nvmlDeviceGetPowerUsage(gpu(2))") == 0
        fake_driver.clear()
        wait_for_code(ask, "nvmlDeviceGetPowerUsage(three)", 0)


def test_one_function_or_one_field_may_fail_alone(fake_driver: FakeDriver) -> None:
    fake_driver.fail("nvmlDeviceGetPowerUsage", 4, gpu=0)
    fake_driver.field(186, error=3)
    fake_driver.field(83, value=ALL_ONES)
    fake_driver.field(82, value=math.nan)
    with client(fake_driver) as ask:
        assert ask.code("nvmlDeviceGetPowerUsage(gpu(0))") == 4
        assert ask.code("nvmlDeviceGetPowerUsage(gpu(1))") == 0
        assert ask("fields(gpu(0), 186, 83)") == [
            [3, ask("fields(gpu(0), 186)")[0][1]],
            [0, ALL_ONES],
        ]
        assert math.isnan(ask("nvmlDeviceGetFieldValues(gpu(0), [82])[0].value.dVal"))
        fake_driver.field(269, fails_call=2)
        wait_for_code(ask, "fields(gpu(0), 83, 269)", 2)
        assert ask.code("fields(gpu(0), 83)") == 0


def test_a_call_that_hangs_returns_when_the_fault_is_taken_back(fake_driver: FakeDriver) -> None:
    fake_driver.hang("nvmlDeviceGetPowerUsage", gpu=5)
    with client(fake_driver) as ask:
        assert ask.code("nvmlDeviceGetUtilizationRates(gpu(5))") == 0
        ask.send("nvmlDeviceGetPowerUsage(gpu(5))")
        with pytest.raises(queue.Empty):
            ask.answer(timeout_s=0.3)
        fake_driver.hang("nvmlDeviceGetPowerUsage", gpu=5, on=False)
        assert ask.answer() == 370_000
        fake_driver.hang(gpu=5)
        ask("__import__('time').sleep(0.05)")
        ask.send("nvmlDeviceGetUUID(gpu(5))")
        with pytest.raises(queue.Empty):
            ask.answer(timeout_s=0.3)
        fake_driver.clear()
        assert ask.answer() == "GPU-00000000-0000-0000-0000-000000000005"


def test_a_driver_that_is_unloaded_needs_a_new_initialisation(fake_driver: FakeDriver) -> None:
    with client(fake_driver, initialise=False) as ask:
        assert ask.code("nvmlDeviceGetCount()") == 1
        ask("nvmlInit()")
        assert ask("nvmlDeviceGetCount()") == 8
        old_energy = ask("nvmlDeviceGetTotalEnergyConsumption(gpu(0))")
        fake_driver.set(driver_gone=True)
        wait_for_code(ask, "nvmlDeviceGetCount()", 1)
        # While there are users an initialisation counts one more, and does nothing else.
        assert ask.code("nvmlInit()") == 0
        ask("nvmlShutdown()")
        fake_driver.set(driver_gone=None, driver_version="590.10")
        ask("__import__('time').sleep(0.05)")
        assert ask.code("nvmlDeviceGetCount()") == 1
        fake_driver.set(driver_gone=True)
        ask("__import__('time').sleep(0.05)")
        ask("nvmlShutdown()")
        assert ask.code("nvmlInit()") == 9
        fake_driver.set(driver_gone=None)
        wait_for_code(ask, "nvmlInit()", 0)
        assert ask("nvmlSystemGetDriverVersion()") == "590.10"
        assert ask("nvmlDeviceGetTotalEnergyConsumption(gpu(0))") < old_energy
        fake_driver.set(version_mismatch=True)
        wait_for_code(ask, "nvmlDeviceGetCount()", 18)
        ask("nvmlShutdown()")
        assert ask.code("nvmlInit()") == 18


def test_a_gpu_vanishes_and_comes_back_at_another_index(fake_driver: FakeDriver) -> None:
    def uuid(gpu: int) -> str:
        return f"GPU-00000000-0000-0000-0000-{gpu:012d}"

    fake_driver.set(gpus=3)
    with client(fake_driver) as ask:
        ask("(one := gpu(1)) and None")
        fake_driver.set(gpu=1, absent=True)
        ask.wait_for("nvmlDeviceGetCount()", 2)
        assert ask("[nvmlDeviceGetUUID(gpu(i)) for i in range(2)]") == [uuid(0), uuid(2)]
        assert ask.code("nvmlDeviceGetUUID(one)") == 15
        fake_driver.set(gpu=1, absent=None)
        fake_driver.set(order="1,2,0")
        ask.wait_for("nvmlDeviceGetCount()", 3)
        ask.wait_for("[nvmlDeviceGetUUID(gpu(i)) for i in range(3)]", [uuid(1), uuid(2), uuid(0)])
        assert ask(f"nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID('{uuid(0)}'))") == 2


def test_the_energy_counter_is_the_integral_of_power(fake_driver: FakeDriver) -> None:
    read = (
        "[(f.timestamp, f.value.ullVal) for f in nvmlDeviceGetFieldValues(gpu(0), [83, 269, 197])]"
    )
    fake_driver.set(power_w=600, load=100, throttle_reasons=0x20, pcie_counter_bits=64)
    with client(fake_driver) as ask:
        first = ask(read)
        time.sleep(0.3)
        last = ask(read)
    rates = [(b - a) / ((s - r) / 1e6) for (r, a), (s, b) in zip(first, last, strict=True)]
    assert rates[0] == pytest.approx(600_000, rel=0.01)
    assert rates[1] == pytest.approx(1e9, rel=0.01)
    assert rates[2] == pytest.approx(8e9, rel=0.01)


def test_pcie_counters_start_over_at_32_bits(fake_driver: FakeDriver) -> None:
    fake_driver.set(load=100)
    with client(fake_driver) as ask:
        seen = [ask("fields(gpu(0), 197)")[0][1] for _ in range(2)]
        deadline = time.monotonic() + 60
        while seen[-1] >= seen[-2] and time.monotonic() < deadline:
            seen.append(ask("fields(gpu(0), 197)")[0][1])
    assert seen[-1] < seen[-2]
    assert max(seen) < 2**32


def test_sample_buffers_hold_what_is_newer_than_the_caller_has_seen(
    fake_driver: FakeDriver,
) -> None:
    samples = (
        "[[s.timeStamp, s.sampleValue.uiVal] for s in nvmlDeviceGetSamples(gpu(0), {}, {})[1]]"
    )
    fake_driver.set(load=40)
    with client(fake_driver) as ask:
        utilization = ask(samples.format(1, 0))
        power = ask(samples.format(0, 0))
        newest = utilization[-1][0]
        wait_for_code(ask, samples.format(1, newest), 0)
        later = ask(samples.format(1, newest))
        future = newest + 10**9
        assert ask.code(samples.format(1, future)) == 6
        assert ask.code(samples.format(7, 0)) == 3
        assert ask("nvmlDeviceGetSamples(gpu(0), 1, 0)[0]") == 1
        now_us = time.time() * 1e6
    assert len(utilization) == 120
    gaps = {round((b[0] - a[0]) / 1e4) for a, b in pairwise(utilization)}
    assert gaps == {17}
    assert {value for _, value in utilization} == {40}
    assert {value for _, value in power} == {310_000}
    assert all(stamp > newest for stamp, _ in later)
    assert abs(now_us - newest) < 60e6


def test_gpm_gives_means_between_two_samples(fake_driver: FakeDriver) -> None:
    take = "(b := nvmlGpmSampleGet(gpu(0), nvmlGpmSampleAlloc())) and None"
    with client(fake_driver) as ask:
        ask(take.replace("b", "a", 1))
        time.sleep(0.15)
        ask(take)
        metrics = ask("gpm_metrics(a, b, 1, 2, 3, 5, 7, 10, 20, 60, 30)")
        assert ask.code("gpm_metrics(b, a, 1)") == 2
        fake_driver.set(profile="a100")
        wait_for_code(ask, take, 3)
    expected = [50, 45, 20, 25, 22, 15, 4e9 / 2**20, 1e6 / 1024]
    assert [code for code, _ in metrics] == [0] * 8 + [3]
    assert [value for _, value in metrics[:8]] == pytest.approx(expected)


def test_processes_have_kind_memory_and_share(fake_driver: FakeDriver) -> None:
    fake_driver.processes(0, "11/1024", "12/na", "13/300/G", "14/500/M")
    fake_driver.processes(1)
    with client(fake_driver) as ask:
        compute = ask("nvmlDeviceGetComputeRunningProcesses(gpu(0))")
        assert [(p["pid"], p["usedGpuMemory"]) for p in compute] == [(11, 2**30), (12, None)]
        assert ask("nvmlDeviceGetGraphicsRunningProcesses(gpu(0))")[0]["pid"] == 13
        assert ask("nvmlDeviceGetMPSComputeRunningProcesses(gpu(0))")[0]["pid"] == 14
        assert ask("nvmlDeviceGetComputeRunningProcesses(gpu(1))") == []
        samples = ask("nvmlDeviceGetProcessUtilization(gpu(0), 0)")
        assert [(s["pid"], s["smUtil"]) for s in samples] == [
            (11, 12),
            (12, 12),
            (13, 12),
            (14, 12),
        ]
        assert ask.code(f"nvmlDeviceGetProcessUtilization(gpu(0), {ALL_ONES})") == 6
        assert ask.code("nvmlDeviceGetProcessUtilization(gpu(1), 0)") == 6


def test_mig_devices_are_parts_of_a_gpu(fake_driver: FakeDriver) -> None:
    fake_driver.set(profile="a100")
    fake_driver.mig(0, "default")
    names = "{i: nvmlDeviceGetName(nvmlDeviceGetMigDeviceHandleByIndex(gpu(0), i)) for i in %s}"
    with client(fake_driver) as ask:
        assert ask("nvmlDeviceGetMigMode(gpu(0))") == [1, 1]
        assert ask("nvmlDeviceGetMigMode(gpu(1))") == [0, 0]
        assert ask.code("nvmlDeviceGetMigDeviceHandleByIndex(gpu(0), 1)") == 6
        found = ask(names % "(0, 2, 3, 5, 6)")
        ask("(part := nvmlDeviceGetMigDeviceHandleByIndex(gpu(0), 6)) and None")
        attributes = ask("nvmlDeviceGetAttributes_v2(part)")
        ids = ask("[nvmlDeviceGetGpuInstanceId(part), nvmlDeviceGetComputeInstanceId(part)]")
        uuid = ask("nvmlDeviceGetUUID(part)")
        parent = ask("nvmlDeviceGetUUID(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part))")
        assert ask(f"nvmlDeviceGetUUID(nvmlDeviceGetHandleByUUID('{uuid}'))") == uuid
        refused = [
            ask.code("nvmlDeviceGetUtilizationRates(gpu(0))"),
            ask.code("nvmlDeviceGetPowerUsage(part)"),
            ask.code("nvmlDeviceGetRemappedRows(gpu(0))"),
            ask.code("nvmlDeviceGetSamples(gpu(0), 1, 0)"),
        ]
        assert ask.code("nvmlDeviceGetPowerUsage(gpu(0))") == 0
        profile = ask("nvmlDeviceGetGpuInstanceProfileInfo(gpu(0), 2)")
    board = "NVIDIA A100-SXM4-80GB MIG"
    assert found == {
        "0": f"{board} 3g.40gb",
        "2": f"{board} 1g.10gb",
        "3": f"{board} 1g.10gb",
        "5": f"{board} 1c.2g.20gb",
        "6": f"{board} 1c.2g.20gb",
    }
    assert ids == [5, 1]
    assert (attributes["gpuInstanceSliceCount"], attributes["computeInstanceSliceCount"]) == (2, 1)
    assert (attributes["multiprocessorCount"], attributes["memorySizeMB"]) == (14, 19968)
    assert uuid.startswith("MIG-")
    assert parent == "GPU-00000000-0000-0000-0000-000000000000"
    assert refused == [3, 3, 3, 3]
    assert (profile["name"], profile["sliceCount"]) == ("MIG 3g.40gb", 3)


def test_mig_is_laid_out_again_at_run_time(fake_driver: FakeDriver) -> None:
    fake_driver.mig(0, "0=1g.10gb/9/0", "1=1g.10gb/10/0")
    with client(fake_driver) as ask:
        for index in (0, 1):
            ask(f"(m{index} := nvmlDeviceGetMigDeviceHandleByIndex(gpu(0), {index})) and None")
        fake_driver.mig(0, "0=2g.20gb/3/0", "1=1g.10gb/10/0")
        wait_for_code(ask, "nvmlDeviceGetName(m0)", 2)
        assert ask("nvmlDeviceGetName(m1)") == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
        name = "nvmlDeviceGetName(nvmlDeviceGetMigDeviceHandleByIndex(gpu(0), 0))"
        assert ask(name) == "NVIDIA H100 80GB HBM3 MIG 2g.20gb"
        sample = "(s := nvmlGpmMigSampleGet(gpu(0), 3, nvmlGpmSampleAlloc())) and None"
        assert ask.code(sample) == 0
        assert ask.code(sample.replace("3", "9")) == 2
        fake_driver.mig_off(0)
        wait_for_code(ask, "nvmlDeviceGetName(m1)", 2)
        assert ask("nvmlDeviceGetMigMode(gpu(0))") == [0, 0]


def test_an_event_is_seen_once_by_each_set(fake_driver: FakeDriver) -> None:
    fake_driver.xid(gpu=2, xid=13)  # before anyone listened
    seen = (
        "[(d := nvmlEventSetWait_v2({}, {})).eventType, d.eventData, nvmlDeviceGetUUID(d.device)]"
    )
    with client(fake_driver) as ask:
        for name in ("one", "two"):
            ask(f"({name} := nvmlEventSetCreate()) and None")
            ask(f"nvmlDeviceRegisterEvents(gpu(2), 8, {name})")
        assert ask.code(seen.format("one", 20)) == 10
        fake_driver.xid(gpu=2, xid=63)
        fake_driver.xid(gpu=1, xid=31)
        fake_driver.xid(gpu=2, xid=94, instances=(3, 0))
        uuid = "GPU-00000000-0000-0000-0000-000000000002"
        for name in ("one", "two"):
            assert ask(seen.format(name, 5000)) == [8, 63, uuid]
            assert ask(f"nvmlEventSetWait_v2({name}, 5000)")["gpuInstanceId"] == 3
            assert ask.code(seen.format(name, 20)) == 10
        assert ask.code("nvmlDeviceRegisterEvents(gpu(2), 1 << 40, one)") == 3
        ask("nvmlEventSetFree(one)")
        assert ask.code("nvmlEventSetWait_v2(one, 0)") == 2


def test_a_lost_gpu_raises_its_xid_and_then_ends_the_waiting(fake_driver: FakeDriver) -> None:
    with client(fake_driver) as ask:
        ask("(events := nvmlEventSetCreate()) and None")
        ask("nvmlDeviceRegisterEvents(gpu(3), 8, events)")
        fake_driver.set(gpu=3, lost=True)
        assert ask("nvmlEventSetWait_v2(events, 10000)")["eventData"] == 79
        assert ask.code("nvmlEventSetWait_v2(events, 10000)") == 15


def test_links_are_reported_one_by_one(fake_driver: FakeDriver) -> None:
    fake_driver.set(gpu=0, nvlinks_down=0b10, nvlink_errors=7)
    with client(fake_driver) as ask:
        assert ask("[nvmlDeviceGetNvLinkState(gpu(0), i) for i in range(18)]") == [1, 0] + [1] * 16
        assert ask("fields(gpu(0), (91, 0), (161, 0), (161, 1))") == [[0, 18], [0, 7], [0, 0]]
        assert ask("nvmlDeviceGetNvLinkRemoteDeviceType(gpu(0), 0)") == 2
        assert ask("nvmlDeviceGetTopologyCommonAncestor(gpu(0), gpu(7))") == 50


def test_calls_are_counted_by_gpu_and_function(fake_driver: FakeDriver) -> None:
    with client(fake_driver) as ask:
        for _ in range(3):
            ask("nvmlDeviceGetPowerUsage(gpu(4))")
        ask("nvmlDeviceGetCount()")
    calls = fake_driver.calls()
    assert calls[4] == {"nvmlDeviceGetHandleByIndex_v2": 3, "nvmlDeviceGetPowerUsage": 3}
    assert calls[None] == {"nvmlInitWithFlags": 1, "nvmlDeviceGetCount_v2": 1}


def test_a_call_takes_the_time_that_is_set(fake_driver: FakeDriver) -> None:
    timed = "[__import__('time').monotonic(), {}, __import__('time').monotonic()]"
    fake_driver.set(latency_us=500)
    fake_driver.slow("nvmlDeviceGetPowerUsage", 30_000)
    with client(fake_driver) as ask:
        first = ask(timed.format("[nvmlDeviceGetCount() for _ in range(20)]"))
        ask("(zero := gpu(0)) and None")
        second = ask(timed.format("nvmlDeviceGetPowerUsage(zero)"))
    assert first[2] - first[0] >= 0.01
    assert second[2] - second[0] >= 0.03


def test_the_library_of_an_older_driver_lacks_functions(
    fake_driver: FakeDriver, tmp_path: Path
) -> None:
    missing = "nvmlDeviceGetTemperatureV"
    assert missing in function_names()
    fake_driver.library = build(tmp_path / "old", without=(missing,))
    with client(fake_driver) as ask:
        assert ask.code("nvmlDeviceGetTemperatureV(gpu(0), 0)") == 13
        assert ask("nvmlDeviceGetTemperature(gpu(0), 0)") == 40


def test_a_name_that_does_not_exist_is_refused(fake_driver: FakeDriver) -> None:
    with pytest.raises(ValueError, match="lots is no setting"):
        fake_driver.set(gpu=3, lots=True)
    with pytest.raises(ValueError, match="nvmlDeviceGetNothing is no function"):
        fake_driver.fail("nvmlDeviceGetNothing", 3)


def test_gpm_may_hang_on_one_gpu_alone(fake_driver: FakeDriver) -> None:
    fake_driver.hang("nvmlGpmSampleGet", gpu=3)
    with client(fake_driver) as ask:
        take = "nvmlGpmSampleGet(gpu({}), nvmlGpmSampleAlloc()) and None"
        assert ask.code(take.format(2)) == 0
        ask.send(take.format(3))
        with pytest.raises(queue.Empty):
            ask.answer(timeout_s=0.3)


def test_a_load_that_swings_keeps_its_mean(fake_driver: FakeDriver) -> None:
    fake_driver.set(load=50, load_swing=40, load_period_s=2)
    with client(fake_driver) as ask:
        samples = ask("[s.sampleValue.uiVal for s in nvmlDeviceGetSamples(gpu(0), 1, 0)[1]]")
    assert min(samples) < 20
    assert max(samples) > 80
    assert sum(samples) / len(samples) == pytest.approx(50, abs=1)
