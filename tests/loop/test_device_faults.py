"""Faults of the driver's GPUs through the whole daemon: each its kind, its GPU and its rank."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.devices.fakenvml.driver import FakeDriver
from tests.loop.devices.node import device_node, devices, wait_all_up
from tests.loop.node import LoopNode, poll
from tests.loop.programs import STEPPING
from warpwatch_telemetry.anomalies import JOB_KINDS

pytestmark = pytest.mark.loops

# After so long it is known how fast clocks are under load.
LEARNED_S = 100.0
CONFIG = {
    "detection": {"disabled": list(JOB_KINDS), "device_idle": {"after_s": 2}},
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


# By kind, in the order of the GPUs that suffer from them.
FAULTS: dict[str, Callable[[FakeDriver, int], object]] = {
    # Without the XID that comes with it, which is another GPU's part here.
    "device_lost": lambda driver, gpu: driver.set(gpu, lost=True, lost_xid=0),
    "device_stuck": lambda driver, gpu: driver.hang(gpu=gpu),
    "xid": lambda driver, gpu: driver.xid(gpu, CONTAINED_MEMORY_ERROR),
    "ecc_uncorrectable": lambda driver, gpu: driver.set(gpu, ecc_uncorrected=2),
    "row_remap": lambda driver, gpu: driver.set(gpu, remap_pending=True),
    "thermal_throttle": throttle_uncounted,
    "power_brake": lambda driver, gpu: driver.set(gpu, throttle_reasons=HW_SLOWDOWN | POWER_BRAKE),
    "clock_drop": lambda driver, gpu: driver.set(gpu, clock_mhz=900),
    "pcie_degraded": lambda driver, gpu: driver.set(gpu, pcie_width=4),
    "nvlink_error": lambda driver, gpu: driver.set(gpu, nvlinks_down=0b100),
    "device_idle": lambda driver, gpu: driver.set(gpu, load=0),
    "device_needs_service": lambda driver, gpu: driver.set(gpu, recovery_action=1),
    "overheating": lambda driver, gpu: driver.set(gpu, temperature_c=88),
}


def active(node: LoopNode) -> dict[tuple[str, str], dict[str, Any]]:
    found = [a for a in node.get("anomalies") if a["end_time"] is None]
    by_key = {(a["kind"], a["device"]): a for a in found}
    assert len(by_key) == len(found)
    return by_key


def start_ranks(node: LoopNode, uuids: list[str]) -> None:
    for rank, uuid in enumerate(uuids):
        size = len(uuids)
        node.start_rank(rank, STEPPING, "0.5", world_size=size, WARPWATCH_GPU_UUID=uuid)
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


def test_each_fault_of_a_gpu_is_found_with_its_rank_and_ends_with_it(fake_nvml, tmp_path):
    driver = FakeDriver(fake_nvml, tmp_path, gpus=len(FAULTS), load=80)
    with device_node(tmp_path, driver, **CONFIG) as node:
        wait_all_up(node, len(FAULTS))
        uuids = [device["uuid"] for _, device in sorted(devices(node).items())]
        start_ranks(node, uuids)
        wait_until_learned(node, uuids, LEARNED_S)
        assert active(node) == {}
        for gpu, fault in enumerate(FAULTS.values()):
            fault(driver, gpu)
        wanted = {(kind, uuids[gpu]): gpu for gpu, kind in enumerate(FAULTS)}
        seen: dict[tuple[str, str], dict[str, Any]] = {}

        def all_found() -> bool:
            # Events are over again before the last state is found.
            seen.update(active(node))
            return seen.keys() >= wanted.keys()

        poll(all_found, "every fault is found")
        assert {key: anomaly["rank"] for key, anomaly in seen.items()} == wanted
        assert {anomaly["job"] for anomaly in seen.values()} == {"stepping"}
        driver.clear()
        poll(lambda: not active(node), "they are over")
        again = [a for a in node.get("anomalies") if (a["kind"], a["device"]) not in wanted]
        assert again == []


def test_what_needs_service_outlives_the_daemon_until_it_is_served_or_root_resolves_it(
    fake_nvml, tmp_path
):
    driver = FakeDriver(fake_nvml, tmp_path, gpus=2)
    kind = "device_needs_service"

    def ids(*gpus: int) -> dict[int, str]:
        found = {device: a["id"] for (name, device), a in active(node).items() if name == kind}
        known = {gpu: found[uuids[gpu]] for gpu in range(2) if uuids[gpu] in found}
        return known if known.keys() == set(gpus) else {}

    with device_node(tmp_path, driver, **CONFIG) as node:
        wait_all_up(node, 2)
        uuids = [device["uuid"] for _, device in sorted(devices(node).items())]
        poll(
            lambda: node.metric("warpwatch_device_xid_errors_total", xid="79", gpu="0") == 0,
            "watched",
        )
        driver.xid(0, 79)
        driver.set(1, recovery_action=2)
        found = poll(lambda: ids(0, 1), "both need service")
        # The XID itself is over by now.
        poll(lambda: not any(name == "xid" for name, _ in active(node)), "the XID is over")
        node.kill_daemon()
        node.start_daemon(wait=True, **driver.environment)
        wait_all_up(node, 2)
        assert ids(0, 1) == found
        driver.set(1, recovery_action=0)
        poll(lambda: ids(0) == {0: found[0]}, "the driver asks no more")
        latched = f"{found[0]}  critical  XID 79 (GPU has fallen off the bus)"
        assert node.command("anomalies").startswith(latched)
        node.command("anomalies", "resolve", found[0])
        poll(lambda: not active(node), "it is resolved")
        assert f"({found[0]}) was resolved by uid {os.getuid()}" in node.log("daemon")
