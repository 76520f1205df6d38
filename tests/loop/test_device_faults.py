"""Faults of the driver's GPUs through the whole daemon: each its kind, its GPU and its rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.devices.fakenvml.driver import FakeDriver
from tests.loop.devices.node import device_node, devices, wait_all_up
from tests.loop.node import LoopNode, poll
from tests.loop.programs import STEPPING
from warpwatch_telemetry.anomalies import JOB_KINDS

pytestmark = pytest.mark.loops

# The kinds in the order of the GPUs that suffer from them: found in seconds, and in minutes.
QUICK = (
    *("device_lost", "device_stuck", "xid", "ecc_uncorrectable", "row_remap", "thermal_throttle"),
    *("power_brake", "nvlink_error", "device_idle"),
)
ALL = (*QUICK, "clock_drop", "pcie_degraded", "overheating")
# Shares of half a minute, which take as long to fall.
SLOW_TO_END = {"thermal_throttle", "power_brake"}
CONFIG = {
    "detection": {kind: {"enabled": False} for kind in JOB_KINDS} | {"device_idle": {"after_s": 2}},
    "anomalies": {"hold_s": 4, "reopen_s": 0},
}
HW_SLOWDOWN, HW_THERMAL, POWER_BRAKE = 0x8, 0x40, 0x80
# NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN.
HW_THERMAL_NS = 270
CONTAINED_MEMORY_ERROR = 94


def throttle_uncounted(driver: FakeDriver, gpu: int) -> None:
    """Let heat cut clocks while the counter of the time stands still."""
    driver.field(HW_THERMAL_NS, value=0, gpu=gpu)
    driver.set(gpu, throttle_reasons=HW_SLOWDOWN | HW_THERMAL)


def break_all(driver: FakeDriver, kinds: tuple[str, ...]) -> None:
    faults: dict[str, Callable[[int], object]] = {
        # Without the XID that comes with it, which is another GPU's part here.
        "device_lost": lambda gpu: driver.set(gpu, lost=True, lost_xid=0),
        "device_stuck": lambda gpu: driver.hang(gpu=gpu),
        "xid": lambda gpu: driver.xid(gpu, CONTAINED_MEMORY_ERROR),
        "ecc_uncorrectable": lambda gpu: driver.set(gpu, ecc_uncorrected=2),
        "row_remap": lambda gpu: driver.set(gpu, remap_pending=True),
        "thermal_throttle": lambda gpu: throttle_uncounted(driver, gpu),
        "power_brake": lambda gpu: driver.set(gpu, throttle_reasons=HW_SLOWDOWN | POWER_BRAKE),
        "clock_drop": lambda gpu: driver.set(gpu, clock_mhz=900),
        "pcie_degraded": lambda gpu: driver.set(gpu, pcie_width=4),
        "nvlink_error": lambda gpu: driver.set(gpu, nvlinks_down=0b100),
        "device_idle": lambda gpu: driver.set(gpu, load=0),
        "overheating": lambda gpu: driver.set(gpu, temperature_c=88),
    }
    for gpu, kind in enumerate(kinds):
        faults[kind](gpu)


def active(node: LoopNode) -> dict[tuple[str, str], dict[str, Any]]:
    """By kind and device."""
    found = [a for a in node.get("anomalies") if a["end_time"] is None]
    by_key = {(a["kind"], a["device"]): a for a in found}
    assert len(by_key) == len(found)
    return by_key


def start_ranks(node: LoopNode, uuids: list[str]) -> None:
    for rank, uuid in enumerate(uuids):
        size = len(uuids)
        node.start_rank(rank, STEPPING, "-1", "0.5", world_size=size, WARPWATCH_GPU_UUID=uuid)
    poll(lambda: len(node.get("ranks")) == len(uuids), "all ranks are there")


def wait_until_learned(node: LoopNode, uuids: list[str], seconds: float) -> None:
    """Events are watched, and clocks under load have been seen for so long."""

    def watched() -> bool:
        name = "warpwatch_device_xid_errors_total"
        return all(node.metric(name, uuid=uuid, xid="79") == 0 for uuid in uuids)

    poll(watched, "XIDs are watched")

    def busy_seconds() -> list[float]:
        # One look of many may miss a GPU on a machine under load: that GPU has no values then.
        return [d["values"].get("busy_seconds_total", 0.0) for d in node.get("devices")]

    poll(lambda: all(busy_seconds()), "every GPU is busy")
    target = max(busy_seconds()) + seconds
    what = f"every GPU has been busy for {seconds:g} s"
    poll(lambda: min(busy_seconds()) > target, what)


@pytest.mark.parametrize(
    ("kinds", "learned_s", "found_s"),
    [
        pytest.param(QUICK, 5, 60, id="quick"),
        pytest.param(ALL, 100, 240, id="all"),
    ],
)
def test_each_fault_of_a_gpu_is_found_with_its_rank_and_ends_with_it(
    fake_nvml: Path, tmp_path: Path, kinds: tuple[str, ...], learned_s: float, found_s: float
) -> None:
    driver = FakeDriver(fake_nvml, tmp_path, gpus=len(kinds), load=80)
    with device_node(tmp_path, driver, **CONFIG) as node:
        wait_all_up(node, len(kinds))
        uuids = [device["uuid"] for _, device in sorted(devices(node).items())]
        start_ranks(node, uuids)
        wait_until_learned(node, uuids, learned_s)
        assert active(node) == {}
        break_all(driver, kinds)
        wanted = {(kind, uuids[gpu]): gpu for gpu, kind in enumerate(kinds)}
        seen: dict[tuple[str, str], dict[str, Any]] = {}

        def all_found() -> bool:
            # Events are over again before the last state is found.
            seen.update(active(node))
            return seen.keys() >= wanted.keys()

        poll(all_found, "every fault is found")
        assert {key: anomaly["rank"] for key, anomaly in seen.items()} == wanted
        assert {anomaly["job"] for anomaly in seen.values()} == {"stepping"}
        driver.clear()
        left = set() if "clock_drop" in kinds else SLOW_TO_END
        poll(lambda: {kind for kind, _ in active(node)} <= left, "they are over")
        again = [a for a in node.get("anomalies") if (a["kind"], a["device"]) not in wanted]
        assert again == []
