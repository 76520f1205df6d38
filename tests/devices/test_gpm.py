"""GPM on a fake driver: right numbers, few calls, and devices that have none are left alone."""

import pynvml
import pytest

from tests.devices.conftest import Golden
from tests.devices.nvml_by_hand import HandNvml, texts, uuid
from warpwatch_devices.nvml.gpm import Gpm, GpmTurns
from warpwatch_devices.nvml.library import CallCosts, DeviceGone, initialise
from warpwatch_telemetry.catalogue import CATALOGUE

GIB = 2**30
SAMPLE, METRICS = "nvmlGpmSampleGet", "nvmlGpmMetricsGet"
RECEIVED = "pcie_receive_bytes_total"


class Counters:
    """The counters of some GPUs, and what they gave in the last round."""

    def __init__(self, nvml: HandNvml) -> None:
        self.nvml = nvml
        self.turns = GpmTurns()
        self.all: list[Gpm] = []
        self.values: list[dict[str, float]] = []

    def begin(self, gpus: int) -> None:
        self.nvml.driver.set(gpus=gpus)
        initialise()
        for gpu in range(gpus):
            self.add(uuid(gpu), pynvml.nvmlDeviceGetHandleByUUID(uuid(gpu)))

    def add(self, name: str, handle: object, instance: int | None = None) -> None:
        clock = self.nvml.clock.monotonic
        self.all.append(Gpm(self.turns, CallCosts(), 1.0, clock, name, handle, instance))
        self.nvml.closing.append(self.all[-1].close)

    def round(self, after_s: float = 1.0) -> None:
        self.nvml.advance(after_s)
        self.values = [texts(one.read()) for one in self.all]

    def samples(self, gpu: int) -> int:
        return self.nvml.calls(SAMPLE, gpu)

    @property
    def unfreed(self) -> int:
        return self.nvml.calls("nvmlGpmSampleAlloc") - self.nvml.calls("nvmlGpmSampleFree")


@pytest.fixture
def gpm(nvml: HandNvml) -> Counters:
    return Counters(nvml)


def test_shares_are_a_devices_and_its_instances(gpm: Counters, golden: Golden) -> None:
    gpm.begin(1)
    gpm.round()
    assert gpm.values == [{}]
    gpm.round()
    of_gpu = gpm.values[0]
    assert {name for name, _ in gpm.all[0].read()} <= set(CATALOGUE)
    gpm.nvml.driver.set(load=80)
    gpm.round()
    assert gpm.values[0]["sm_active_ratio"] == 0.72
    assert gpm.values[0][RECEIVED] == 4_000_000_000 + 6_400_000_000
    gpm.nvml.driver.set(load=50)
    gpm.nvml.driver.mig(0, "0=3g.40gb/1/0", "2=1g.10gb/0/0")
    parent = pynvml.nvmlDeviceGetHandleByIndex(0)
    for instance in (1, 0):
        gpm.add(uuid(0), parent, instance)
    gpm.round()
    gpm.round()
    assert gpm.nvml.calls("nvmlGpmMigSampleGet", 0) == 4
    lines = [f"{name} {of[name]}" for of in (of_gpu, *gpm.values[1:]) for name in sorted(of)]
    golden("nvml_gpm.txt", "".join(f"{line}\n" for line in lines).encode())


def test_traffic_is_integrated_over_the_real_time_with_two_calls_a_round(gpm: Counters) -> None:
    gpm.begin(1)
    for after_s in (1.0, 0.5, 2.5, 0.09):
        gpm.round(after_s)
    # The last window would be too short.
    assert gpm.values[0][RECEIVED] == 12_000_000_000
    assert gpm.samples(0) == 3
    gpm.round(0.1)
    assert gpm.values[0][RECEIVED] == pytest.approx(12_760_000_000)
    # Over a long window counters may wrap.
    gpm.round(601)
    assert gpm.values == [{}]
    gpm.round(600)
    assert gpm.values[0][RECEIVED] == pytest.approx(12_760_000_000 + 600 * 4e9)
    gpm.all[0].close()
    assert (gpm.samples(0), gpm.nvml.calls(METRICS, 0)) == (6, 4)
    assert gpm.nvml.calls("nvmlGpmQueryDeviceSupport", 0) == 1
    assert gpm.nvml.calls("nvmlGpmSampleAlloc") == 2
    assert gpm.unfreed == 0


def test_values_stand_for_three_rounds_without_an_answer(gpm: Counters) -> None:
    gpm.begin(1)
    for _ in range(2):
        gpm.round()
    gpm.nvml.driver.fail(SAMPLE, 999)
    seen = []
    for _ in range(4):
        gpm.round()
        seen.append(bool(gpm.values[0]))
    assert seen == [True, True, True, False]
    gpm.nvml.driver.fail(SAMPLE, 0)
    gpm.round()
    assert gpm.values[0]
    # Totals stand while a rate is unknown.
    gpm.nvml.driver.set(sentinels=1)
    gpm.round()
    assert gpm.values[0].keys() & {RECEIVED, "pcie_receive_bytes_per_second"} == {RECEIVED}


def test_devices_that_cannot_tell_are_left(gpm: Counters, caplog: pytest.LogCaptureFixture) -> None:
    gpm.nvml.driver.set(1, profile="a100")
    gpm.nvml.driver.fail(SAMPLE, 4, gpu=2)
    gpm.nvml.driver.fail(SAMPLE, 4, gpu=3)
    gpm.nvml.driver.set(4, sentinels=1)
    gpm.begin(5)
    for _ in range(5):
        gpm.round()
    assert [bool(values) for values in gpm.values] == [True, False, False, False, False]
    assert [one.supported for one in gpm.all] == [True, False, False, False, True]
    assert gpm.nvml.calls("nvmlGpmQueryDeviceSupport", 1) == 1
    assert [gpm.samples(gpu) for gpu in range(5)] == [5, 0, 1, 1, 5]
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith(f"GPM of device {uuid(2)} may not be read")
    assert "RmProfilingAdminOnly" in warning
    gpm.nvml.driver.set(0, lost=1)
    with pytest.raises(DeviceGone, match="lost"):
        gpm.round()
