"""Faults of the driver's GPUs through the whole daemon: each its kind, its GPU and its rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.devices.fakenvml.driver import FakeDriver
from tests.loop.devices.node import device_node, devices, wait_all_up
from tests.loop.node import LoopNode, poll
from tests.loop.programs import STEPPING
from warpwatch_detection.config import DetectionConfig
from warpwatch_telemetry.anomalies import DEVICE_KINDS

# The defaults want minutes of evidence; here a second is long.
QUICK: dict[str, dict[str, Any]] = {
    "device_lost": {"hold_s": 0.5, "clear_s": 0.5},
    "device_stuck": {"clear_s": 0.5},
    "thermal_throttle": {"window_s": 4, "clear_s": 0.5},
    "power_brake": {"window_s": 4, "clear_s": 0.5},
    "overheating": {"hold_s": 1, "clear_s": 0.5},
    "clock_drop": {"block_s": 1, "ready_blocks": 3, "hold_s": 1, "clear_s": 0.5},
    "pcie_degraded": {"hold_s": 1.5, "clear_s": 0.5},
    "nvlink_error": {"down_s": 0.5, "quiet_s": 2, "clear_s": 0.5},
    "device_idle": {"after_s": 2, "clear_s": 0.5},
}
JOB_KINDS_OFF = {
    kind: {"enabled": False} for kind in DetectionConfig.model_fields if kind not in DEVICE_KINDS
}
# The kinds in the order of the GPUs that suffer from them.
SUFFERS = (
    *("device_lost", "device_stuck", "xid", "ecc_uncorrectable", "row_remap", "thermal_throttle"),
    *("power_brake", "clock_drop", "pcie_degraded", "nvlink_error", "device_idle", "overheating"),
)
HW_SLOWDOWN, HW_THERMAL, POWER_BRAKE = 0x8, 0x40, 0x80
CONTAINED_MEMORY_ERROR = 94


def break_all(driver: FakeDriver) -> None:
    at = {kind: gpu for gpu, kind in enumerate(SUFFERS)}
    # Without the XID that comes with it, which is another GPU's part here.
    driver.set(at["device_lost"], lost=True, lost_xid=0)
    driver.hang(gpu=at["device_stuck"])
    driver.xid(at["xid"], CONTAINED_MEMORY_ERROR)
    driver.set(at["ecc_uncorrectable"], ecc_uncorrected=2)
    driver.set(at["row_remap"], remap_pending=True)
    driver.set(at["thermal_throttle"], throttle_reasons=HW_SLOWDOWN | HW_THERMAL)
    driver.set(at["power_brake"], throttle_reasons=HW_SLOWDOWN | POWER_BRAKE)
    driver.set(at["clock_drop"], clock_mhz=900)
    driver.set(at["pcie_degraded"], pcie_width=4)
    driver.set(at["nvlink_error"], nvlinks_down=0b100)
    driver.set(at["device_idle"], load=0)
    driver.set(at["overheating"], temperature_c=88)


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
    poll(lambda: len(node.get("ranks")) == len(uuids), 60, "all ranks are there")


def wait_until_learned(node: LoopNode, uuids: list[str]) -> None:
    """Events are watched, and clocks under load have been seen for some blocks."""

    def watched() -> bool:
        name = "warpwatch_device_xid_errors_total"
        return all(node.metric(name, uuid=uuid, xid="79") == 0 for uuid in uuids)

    poll(watched, 60, "XIDs are watched")
    first = {d["uuid"]: d["values"]["busy_seconds_total"] for d in node.get("devices")}

    def has_run() -> bool:
        now = {d["uuid"]: d["values"]["busy_seconds_total"] for d in node.get("devices")}
        return all(now[uuid] - first[uuid] > 5 for uuid in uuids)

    poll(has_run, 60, "every GPU has been busy for 5 s")


def test_each_fault_of_a_gpu_is_found_with_its_rank_and_ends_with_it(
    fake_nvml: Path, tmp_path: Path
) -> None:
    driver = FakeDriver(fake_nvml, tmp_path, gpus=len(SUFFERS), load=80)
    config = {"detection": JOB_KINDS_OFF | QUICK, "anomalies": {"hold_s": 4, "reopen_s": 0}}
    with device_node(tmp_path, driver, **config) as node:
        wait_all_up(node, len(SUFFERS))
        uuids = [device["uuid"] for _, device in sorted(devices(node).items())]
        start_ranks(node, uuids)
        wait_until_learned(node, uuids)
        assert active(node) == {}
        break_all(driver)
        wanted = {(kind, uuids[gpu]): gpu for gpu, kind in enumerate(SUFFERS)}
        seen: dict[tuple[str, str], dict[str, Any]] = {}

        def all_found() -> bool:
            # Events are over again before the last state is found.
            seen.update(active(node))
            return seen.keys() >= wanted.keys()

        poll(all_found, 60, "every fault is found")
        assert {key: anomaly["rank"] for key, anomaly in seen.items()} == wanted
        assert {anomaly["job"] for anomaly in seen.values()} == {"stepping"}
        driver.clear()
        poll(lambda: active(node) == {}, 60, "all of them are over")
        again = [a for a in node.get("anomalies") if (a["kind"], a["device"]) not in wanted]
        assert again == []
