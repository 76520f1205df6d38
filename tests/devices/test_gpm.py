"""GPM on a fake driver: right numbers, few calls, and no device that costs the others theirs."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.devices.fakenvml.driver import FakeDriver
from tests.devices.nvml_parts import running
from warpwatch_devices.nvml.gpm_metrics import GpmRequest, refused, shares_of, traffic_of
from warpwatch_devices.nvml.library import Meaning
from warpwatch_telemetry.catalogue import CATALOGUE

INTERVAL_S = 0.15
GIB = 2**30
# What the fake driver makes of a load of 50 %.
SHARES_AT_HALF_LOAD = {
    "graphics_active_ratio": 0.5,
    "sm_active_ratio": 0.45,
    "sm_occupancy_ratio": 0.2,
    "tensor_active_ratio": 0.25,
    "tensor_type_active_ratio{type=dfma}": 0.005,
    "tensor_type_active_ratio{type=hmma}": 0.22,
    "tensor_type_active_ratio{type=imma}": 0.025,
    "pipe_active_ratio{pipe=integer}": 0.05,
    "pipe_active_ratio{pipe=fp64}": 0.01,
    "pipe_active_ratio{pipe=fp32}": 0.1,
    "pipe_active_ratio{pipe=fp16}": 0.03,
    "dram_active_ratio": 0.15,
}
LINKS = ("pcie_receive", "pcie_transmit", "nvlink_receive", "nvlink_transmit")


def uuid(gpu: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{gpu:012d}"


def gpm(state: dict[str, Any], gpu: int) -> dict[str, float]:
    values: dict[str, float] = state["gpm"].get(uuid(gpu), {})
    return values


def samples(driver: FakeDriver, gpu: int) -> int:
    return driver.calls().get(gpu, {}).get("nvmlGpmSampleGet", 0)


def calls(driver: FakeDriver, function: str) -> int:
    """Of all devices, and of none."""
    return sum(row.get(function, 0) for row in driver.calls().values())


def test_shares_and_traffic_are_those_of_the_device(fake_driver):
    fake_driver.set(gpus=1, load=50)
    with running(fake_driver, gpm_interval_s=INTERVAL_S) as process:
        values = gpm(process.until(lambda state: gpm(state, 0)), 0)
        assert {name: values[name] for name in SHARES_AT_HALF_LOAD} == SHARES_AT_HALF_LOAD
        expected = {f"{link}_bytes_{kind}" for link in LINKS for kind in ("per_second", "total")}
        assert set(values) == set(SHARES_AT_HALF_LOAD) | expected
        names = {f"device_{name.partition('{')[0]}" for name in values}
        assert names - set(CATALOGUE) == set()
        assert values["pcie_receive_bytes_per_second"] == pytest.approx(4.0e9, rel=1e-3)
        fake_driver.set(load=80)
        process.until(lambda state: gpm(state, 0).get("sm_active_ratio") == 0.72)


def test_traffic_is_integrated_over_the_real_time_with_two_calls_a_round(fake_driver):
    fake_driver.set(gpus=1, load=50)
    with running(fake_driver, gpm_interval_s=INTERVAL_S) as process:
        first = process.until(lambda state: gpm(state, 0))
        before = gpm(first, 0)["pcie_transmit_bytes_total"]
        later = process.until(
            lambda state: gpm(state, 0).get("pcie_transmit_bytes_total", 0) >= before + 4.0e9
        )
        # 4 GB at 4 GB/s: a second, give or take the rounds that the two reports fell between.
        sent_s = (gpm(later, 0)["pcie_transmit_bytes_total"] - before) / 4.0e9
        assert later["time"] - first["time"] == pytest.approx(sent_s, abs=0.5)
        process.close()
    assert samples(fake_driver, 0) - calls(fake_driver, "nvmlGpmMetricsGet") == 1
    assert fake_driver.calls()[0]["nvmlGpmQueryDeviceSupport"] == 1
    assert calls(fake_driver, "nvmlGpmSampleAlloc") == 2
    assert calls(fake_driver, "nvmlGpmSampleFree") == 2


def test_a_call_that_never_returns_costs_that_device_only(fake_driver):
    fake_driver.set(gpus=4)
    fake_driver.hang("nvmlGpmMetricsGet", gpu=2)
    with running(fake_driver, gpm_interval_s=INTERVAL_S) as process:
        # One that is removed while it is stuck.
        process.until(lambda _: fake_driver.calls().get(2, {}).get("nvmlGpmMetricsGet"))
        process.tell("remove", uuid(2))
        process.until(lambda state: state["given_up"] == [uuid(2)])
        process.until(lambda state: all(gpm(state, gpu) for gpu in (0, 1, 3)))
        fake_driver.hang("nvmlGpmSampleGet", gpu=1)
        process.until(lambda state: state["given_up"] == [uuid(1), uuid(2)])
        begun = [samples(fake_driver, gpu) for gpu in range(4)]
        process.until(
            lambda state: (
                [gpm(state, gpu) != {} for gpu in range(4)] == [True, False, False, True]
                and all(samples(fake_driver, gpu) > begun[gpu] + 2 for gpu in (0, 3))
            )
        )
        fake_driver.hang("nvmlGpmSampleGet", gpu=1, on=False)
        process.tell("again")
        process.until(lambda _: samples(fake_driver, 0) > begun[0] + 7)
        assert [samples(fake_driver, gpu) for gpu in (1, 2)] == begun[1:3]
        fake_driver.hang("nvmlGpmMetricsGet", gpu=2, on=False)
        process.close()
    assert process.state == {"closed": True}
    assert process.log.count("does not return") == 2
    # The buffers of devices that were given up are no one's to free.
    unfreed = calls(fake_driver, "nvmlGpmSampleAlloc") - calls(fake_driver, "nvmlGpmSampleFree")
    assert unfreed == 4


def test_a_gpu_whose_call_returns_is_taken_back_three_times(fake_driver):
    fake_driver.set(gpus=1)
    options = {"gpm_interval_s": INTERVAL_S, "take_back_after_s": 0.1}
    with running(fake_driver, **options) as process:
        sent = process.until(lambda state: gpm(state, 0))
        for _ in range(3):
            fake_driver.hang("nvmlGpmSampleGet", gpu=0)
            process.until(lambda state: state["given_up"] and state["in_flight"])
            fake_driver.hang("nvmlGpmSampleGet", gpu=0, on=False)
            back = process.until(lambda state: not state["given_up"] and gpm(state, 0))
            total = "pcie_receive_bytes_total"
            assert gpm(back, 0)[total] >= gpm(sent, 0)[total]
            sent = back
        fake_driver.hang("nvmlGpmSampleGet", gpu=0)
        process.until(lambda state: state["given_up"])
        fake_driver.hang("nvmlGpmSampleGet", gpu=0, on=False)
        state = process.until(lambda state: not state["in_flight"])
        before, begun = samples(fake_driver, 0), state["time"]
        process.until(lambda state: state["time"] > begun + 0.7)
        assert samples(fake_driver, 0) == before
        assert process.state["given_up"] == [uuid(0)]
        process.close()
    assert process.log.count("given up until it does") == 3
    assert process.log.count("given up until NVML is restarted") == 1
    # What was taken back has freed its buffers; the last device was given up for good.
    unfreed = calls(fake_driver, "nvmlGpmSampleAlloc") - calls(fake_driver, "nvmlGpmSampleFree")
    assert unfreed == 2


def test_closing_frees_nothing_under_a_call(fake_driver):
    fake_driver.set(gpus=1)
    with running(fake_driver, gpm_interval_s=INTERVAL_S) as process:
        process.until(lambda state: gpm(state, 0))
        before = samples(fake_driver, 0)
        fake_driver.slow("nvmlGpmSampleGet", 30e6, gpu=0)
        process.until(lambda state: not state["given_up"] and samples(fake_driver, 0) > before)
        process.close()
    assert process.state == {"closed": True}
    assert calls(fake_driver, "nvmlGpmSampleFree") == 0


def test_instances_are_read_through_their_gpu(fake_driver):
    fake_driver.set(gpus=1, load=50)
    fake_driver.mig(0, "0=3g.40gb/1/0", "2=1g.10gb/9/0")
    with running(fake_driver, gpm_interval_s=INTERVAL_S) as process:
        state = process.until(lambda state: len([v for v in state["gpm"].values() if v]) == 2)
        instances = {name: values for name, values in state["gpm"].items() if "MIG" in name}
        assert len(instances) == 2
        for values in instances.values():
            assert values == SHARES_AT_HALF_LOAD
        assert fake_driver.calls()[0]["nvmlGpmMigSampleGet"] >= 4


def test_what_a_device_does_not_measure_is_not_asked_again():
    request = GpmRequest()
    assert len(request.metrics) == 16
    request.drop(refused([(20, 3, 0.0), (60, 3, 0.0), (5, 0, 1.0), (2, 999, 0.0)]))
    assert len(request.metrics) == 14
    assert {20, 60}.isdisjoint(request.metrics)
    assert [metric for metric, _, _ in request.answers()] == list(request.metrics)


def test_devices_that_cannot_tell_are_asked_once_and_have_no_values(fake_driver):
    fake_driver.set(gpus=5)
    fake_driver.set(1, profile="a100")
    fake_driver.fail("nvmlGpmSampleGet", 4, gpu=2)
    fake_driver.fail("nvmlGpmSampleGet", 4, gpu=3)
    fake_driver.set(4, sentinels=1)
    with running(fake_driver, gpm_interval_s=INTERVAL_S) as process:
        state = process.until(lambda state: samples(fake_driver, 0) >= 5 and gpm(state, 0))
        assert [gpm(state, gpu) for gpu in range(1, 5)] == [{}, {}, {}, {}]
        process.close()
    assert fake_driver.calls()[1]["nvmlGpmQueryDeviceSupport"] == 1
    assert [samples(fake_driver, gpu) for gpu in range(1, 4)] == [0, 1, 1]
    assert samples(fake_driver, 4) >= 4
    assert process.log.count("RmProfilingAdminOnly") == 1


def test_a_device_that_is_lost_or_removed_has_no_values_and_is_left_alone(fake_driver):
    fake_driver.set(gpus=2)
    with running(fake_driver, gpm_interval_s=INTERVAL_S) as process:
        process.until(lambda state: gpm(state, 0) and gpm(state, 1))
        fake_driver.set(1, lost=1)
        process.until(lambda state: gpm(state, 0) and not gpm(state, 1))
        before = samples(fake_driver, 0), samples(fake_driver, 1)
        process.until(lambda _: samples(fake_driver, 0) > before[0] + 4)
        assert samples(fake_driver, 1) == before[1]
        fake_driver.set(1, lost=None)
        process.tell("again")
        process.until(lambda state: gpm(state, 0) and gpm(state, 1))
        freed = calls(fake_driver, "nvmlGpmSampleFree")
        process.tell("remove", uuid(0))
        process.until(lambda state: not gpm(state, 0) and gpm(state, 1))
        process.until(lambda _: calls(fake_driver, "nvmlGpmSampleFree") == freed + 2)


def test_only_rounding_is_clamped():
    answers = [(1, 0, 100.4), (2, 0, -0.2), (3, 0, 101.5), (5, 0, math.nan), (10, 0, math.inf)]
    assert shares_of([*answers, (11, 3, 50.0), (12, 0, 12.5)]) == {
        ("device_graphics_active_ratio", ()): 1.0,
        ("device_sm_active_ratio", ()): 0.0,
        ("device_pipe_active_ratio", ("fp32",)): 0.125,
    }


def test_traffic_is_in_bytes_and_never_negative():
    answers = [(20, 0, 1024.0), (21, 0, -1.0), (60, 0, math.nan), (61, 999, 5.0)]
    assert traffic_of(answers) == {"device_pcie_transmit": GIB}


def test_refusals_are_no_faults():
    assert refused([(1, 0, 0.0), (2, 3, 0.0), (3, 4, 0.0), (5, 27, 0.0), (6, 999, 0.0)]) == {
        2: Meaning.UNSUPPORTED,
        3: Meaning.NO_PERMISSION,
    }
