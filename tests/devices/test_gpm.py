"""GPM on a fake driver: right numbers, few calls, and no device that costs the others theirs."""

import math

import pynvml
import pytest

from tests.devices.conftest import Golden
from tests.devices.nvml_by_hand import HandNvml, texts, uuid
from warpwatch_devices.nvml import gpm as worker
from warpwatch_devices.nvml.gpm import GpmRequest, refused, shares_of, traffic_of
from warpwatch_devices.nvml.library import Meaning, initialise
from warpwatch_telemetry.catalogue import CATALOGUE

STUCK_AFTER_S = 5.0
GIB = 2**30
SAMPLE, METRICS = "nvmlGpmSampleGet", "nvmlGpmMetricsGet"
RECEIVED = "pcie_receive_bytes_total"


class Gpm:
    def __init__(self, nvml: HandNvml) -> None:
        self.nvml = nvml
        self.worker = worker.GpmWorker(nvml.loops, 1.0, STUCK_AFTER_S, nvml.clock.monotonic)
        nvml.closing.append(self.worker.close)

    def begin(self, gpus: int) -> None:
        self.nvml.driver.set(gpus=gpus)
        initialise()
        for gpu in range(gpus):
            self.add(gpu)

    def add(self, gpu: int) -> None:
        self.worker.add(uuid(gpu), pynvml.nvmlDeviceGetHandleByUUID(uuid(gpu)))

    def round(self, after_s: float = 1.0) -> None:
        self.nvml.advance(after_s)
        self.worker.watch()
        self.nvml.loops.run("gpm")

    def values(self, gpu: int) -> dict[str, float]:
        return texts(self.worker.values(uuid(gpu)))

    def reported(self, gpus: int) -> list[bool]:
        return [bool(self.values(gpu)) for gpu in range(gpus)]

    def samples(self, gpu: int) -> int:
        return self.nvml.calls(SAMPLE, gpu)

    @property
    def unfreed(self) -> int:
        return self.nvml.calls("nvmlGpmSampleAlloc") - self.nvml.calls("nvmlGpmSampleFree")

    def give_up(self, gpu: int, function: str) -> None:
        self.nvml.hang("gpm", function, gpu)
        self.nvml.advance(STUCK_AFTER_S - 0.01)
        self.worker.watch()
        assert uuid(gpu) not in self.worker.given_up
        self.nvml.advance(0.02)
        self.worker.watch()
        assert uuid(gpu) in self.worker.given_up


@pytest.fixture
def gpm(nvml: HandNvml) -> Gpm:
    return Gpm(nvml)


def test_shares_are_a_devices_and_its_instances(gpm: Gpm, golden: Golden) -> None:
    gpm.begin(1)
    gpm.round()
    assert gpm.values(0) == {}
    gpm.round()
    of_gpu = gpm.values(0)
    assert {name for name, _ in gpm.worker.values(uuid(0))} <= set(CATALOGUE)
    gpm.nvml.driver.set(load=80)
    gpm.round()
    assert gpm.values(0)["sm_active_ratio"] == 0.72
    assert gpm.values(0)[RECEIVED] == 4_000_000_000 + 6_400_000_000
    gpm.nvml.driver.set(load=50)
    gpm.nvml.driver.mig(0, "0=3g.40gb/1/0", "2=1g.10gb/9/0")
    parent = pynvml.nvmlDeviceGetHandleByIndex(0)
    for slot, instance in ((0, 1), (2, 9)):
        handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, slot)
        gpm.worker.add(f"MIG-{instance}", handle, instance, parent)
    gpm.round()
    gpm.round()
    of_instances = [texts(gpm.worker.values(f"MIG-{instance}")) for instance in (1, 9)]
    assert gpm.nvml.calls("nvmlGpmMigSampleGet", 0) == 4
    lines = [f"{name} {of[name]}" for of in (of_gpu, *of_instances) for name in sorted(of)]
    golden("nvml_gpm.txt", "".join(f"{line}\n" for line in lines).encode())


def test_traffic_is_integrated_over_the_real_time_with_two_calls_a_round(gpm: Gpm) -> None:
    gpm.begin(1)
    for after_s in (1.0, 0.5, 2.5, 0.09):
        gpm.round(after_s)
    # The last window would be too short.
    assert gpm.values(0)[RECEIVED] == 12_000_000_000
    assert gpm.samples(0) == 3
    gpm.round(0.1)
    assert gpm.values(0)[RECEIVED] == pytest.approx(12_760_000_000)
    # Values expire soon, and over a long window counters may wrap.
    gpm.nvml.advance(3)
    assert gpm.values(0) != {}
    gpm.nvml.advance(0.01)
    assert gpm.values(0) == {}
    gpm.round(600)
    assert gpm.values(0) == {}
    gpm.round(600)
    assert gpm.values(0)[RECEIVED] == pytest.approx(12_760_000_000 + 600 * 4e9)
    gpm.worker.close()
    assert (gpm.samples(0), gpm.nvml.calls(METRICS, 0)) == (6, 4)
    assert gpm.nvml.calls("nvmlGpmQueryDeviceSupport", 0) == 1
    assert gpm.nvml.calls("nvmlGpmSampleAlloc") == 2
    assert gpm.unfreed == 0


def test_a_hanging_call_costs_that_device_only(gpm: Gpm, caplog: pytest.LogCaptureFixture) -> None:
    gpm.begin(4)
    gpm.round()
    gpm.nvml.hang("gpm", METRICS, 2)
    # One that is removed while it is stuck.
    gpm.worker.remove(uuid(2))
    gpm.nvml.advance(STUCK_AFTER_S)
    gpm.worker.watch()
    assert gpm.worker.given_up == {uuid(2)}
    gpm.round()
    assert gpm.reported(4) == [True, True, False, True]
    gpm.give_up(1, SAMPLE)
    assert gpm.worker.in_flight
    begun = [gpm.samples(gpu) for gpu in range(4)]
    # It is begun again only when it may be.
    gpm.add(1)
    for _ in range(3):
        gpm.round()
    assert gpm.reported(4) == [True, False, False, True]
    assert [gpm.samples(gpu) - begun[gpu] for gpu in range(4)] == [3, 0, 0, 3]
    gpm.worker.close()
    assert [record.message for record in caplog.records] == [
        f"GPM of device {uuid(gpu)} does not return: given up until it does" for gpu in (2, 1)
    ]
    # The buffers of devices that were given up are no one's to free.
    assert gpm.unfreed == 4


def test_a_gpu_is_taken_back_three_times(gpm: Gpm, caplog: pytest.LogCaptureFixture) -> None:
    gpm.begin(1)
    gpm.round()
    gpm.round()
    for times in range(3):
        received = gpm.values(0)[RECEIVED]
        gpm.give_up(0, SAMPLE)
        gpm.worker.watch()
        gpm.nvml.release(SAMPLE, 0)
        assert not gpm.worker.in_flight
        gpm.worker.watch()
        gpm.nvml.advance(10 * 2**times - 0.01)
        gpm.worker.watch()
        assert gpm.worker.given_up == {uuid(0)}
        gpm.round(0.02)
        assert gpm.worker.given_up == frozenset()
        gpm.round()
        # Its counters continue, without the time in which it was not read.
        assert gpm.values(0)[RECEIVED] == received + 4_000_000_000
    gpm.give_up(0, SAMPLE)
    gpm.nvml.release(SAMPLE, 0)
    for _ in range(3):
        gpm.nvml.advance(1000.0)
        gpm.worker.watch()
    assert gpm.worker.given_up == {uuid(0)}
    errors = [record.message for record in caplog.records]
    until = ["until it does"] * 3 + ["until NVML is restarted"]
    assert errors == [f"GPM of device {uuid(0)} does not return: given up {text}" for text in until]
    gpm.worker.close()
    # A GPU that is read again has freed its buffers; the last device was given up for good.
    assert gpm.unfreed == 2


def test_closing_frees_nothing_under_a_call(gpm: Gpm) -> None:
    gpm.begin(1)
    gpm.round()
    gpm.nvml.hang("gpm", SAMPLE, 0)
    gpm.worker.close()
    assert gpm.unfreed == 2 and gpm.worker.in_flight
    gpm.add(0)
    assert gpm.nvml.loops.names == []


def test_devices_that_cannot_tell_are_left(gpm: Gpm, caplog: pytest.LogCaptureFixture) -> None:
    gpm.nvml.driver.set(1, profile="a100")
    gpm.nvml.driver.fail(SAMPLE, 4, gpu=2)
    gpm.nvml.driver.fail(SAMPLE, 4, gpu=3)
    gpm.nvml.driver.set(4, sentinels=1)
    gpm.begin(5)
    for _ in range(5):
        gpm.round()
    assert gpm.reported(5) == [True, False, False, False, False]
    assert gpm.nvml.calls("nvmlGpmQueryDeviceSupport", 1) == 1
    assert [gpm.samples(gpu) for gpu in range(5)] == [5, 0, 1, 1, 5]
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith(f"GPM of device {uuid(2)} may not be read")
    assert "RmProfilingAdminOnly" in warning


def test_a_device_that_is_lost_or_removed_has_no_values_and_is_left_alone(gpm: Gpm) -> None:
    gpm.begin(2)
    gpm.round()
    gpm.nvml.driver.set(1, lost=1)
    before = gpm.samples(1)
    for _ in range(10):
        gpm.round()
    assert gpm.reported(2) == [True, False]
    assert gpm.samples(1) == before + 1
    gpm.nvml.driver.set(1, lost=None)
    for _ in range(2):
        gpm.round()
    assert gpm.reported(2) == [True, True]
    gpm.add(1)
    gpm.worker.remove(uuid(0))
    assert gpm.reported(2) == [False, False]
    assert gpm.unfreed == 4
    gpm.round()
    gpm.round()
    assert gpm.reported(2) == [False, True]
    assert gpm.unfreed == 2


def test_what_a_device_does_not_measure_is_not_asked_again() -> None:
    answers = [(1, 0, 0.0), (20, 3, 0.0), (60, 4, 0.0), (5, 27, 1.0), (2, 999, 0.0)]
    assert refused(answers) == {20: Meaning.UNSUPPORTED, 60: Meaning.NO_PERMISSION}
    request = GpmRequest()
    assert len(request.metrics) == 16
    request.drop(refused(answers))
    assert len(request.metrics) == 14
    assert {20, 60}.isdisjoint(request.metrics)
    assert [metric for metric, _, _ in request.answers()] == list(request.metrics)


def test_only_rounding_is_clamped() -> None:
    answers = [(1, 0, 100.4), (2, 0, -0.2), (3, 0, 101.5), (5, 0, math.nan), (10, 0, math.inf)]
    assert shares_of([*answers, (11, 3, 50.0), (12, 0, 12.5)]) == {
        ("device_graphics_active_ratio", ()): 1.0,
        ("device_sm_active_ratio", ()): 0.0,
        ("device_pipe_active_ratio", ("fp32",)): 0.125,
    }


def test_traffic_is_in_bytes_and_never_negative() -> None:
    assert traffic_of([(20, 0, 1024.0), (21, 0, 2.0), (60, 0, 3.0), (61, 0, 4.0)]) == {
        "device_pcie_transmit": GIB,
        "device_pcie_receive": 2 * 2**20,
        "device_nvlink_receive": 3 * 2**20,
        "device_nvlink_transmit": 4 * 2**20,
    }
    assert traffic_of([(20, 0, 0.0), (21, 0, -1.0), (60, 0, math.nan), (61, 999, 5.0)]) == {
        "device_pcie_transmit": 0.0
    }
