"""Rules on one GPU at a time, and how findings of several become one."""

from __future__ import annotations

import pytest

from tests.daemon.doctor.conftest import MakeInputs, surveyed
from warpwatch_daemon.doctor import topology
from warpwatch_daemon.doctor.check import Check, gpu_set, merged
from warpwatch_daemon.doctor.device_rules import RULES
from warpwatch_daemon.doctor.facts import (
    DeviceFacts,
    Fabric,
    MemoryUse,
    Modes,
    NvLink,
    Pcie,
    RemappedRows,
    Survey,
)

TESLA, GEFORCE = "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090"
DOWN, UP = NvLink(False, None, None), NvLink(True, 2, None)


def judged(name: str, device: DeviceFacts) -> Check | None:
    return next(rule.check(device) for rule in RULES if rule.name == name)


def verdict(check: Check | None) -> tuple[bool | None, str] | None:
    return (check.ok, check.detail) if check else None


def test_gpus_are_named_in_runs() -> None:
    assert gpu_set([5, 0, 1, 2]) == "GPU 0-2,5"
    assert gpu_set([3]) == "GPU 3"


def test_equal_findings_become_one_and_faults_come_first() -> None:
    well, bad = Check("x", True, "on"), Check("x", False, "off", "set -i {gpus}")
    assert list(merged([(0, well), (1, bad), (2, well), (3, bad)])) == [
        Check("x", False, "GPU 1,3: off", "set -i 1,3"),
        Check("x", True, "GPU 0,2: on", ""),
    ]


@pytest.mark.parametrize(
    ("name", "mode", "expected"),
    [
        (TESLA, Modes(1, 1), (True, "on")),
        (TESLA, Modes(0, 0), (False, "off: memory errors corrupt results unseen")),
        (TESLA, Modes(0, 1), (None, "off, will be on after a reset")),
        (GEFORCE, Modes(0, 0), (True, "off, as desktop GPUs are delivered")),
    ],
)
def test_ecc_off_is_a_fault_on_data_centre_gpus_only(
    name: str, mode: Modes, expected: tuple[bool | None, str]
) -> None:
    assert verdict(judged("ECC", DeviceFacts(index=0, name=name, ecc_mode=mode))) == expected


def test_what_a_gpu_did_not_tell_is_not_judged() -> None:
    silent = DeviceFacts(index=0)
    assert [rule.check(silent) for rule in RULES] == [None] * len(RULES)


@pytest.mark.parametrize(
    ("now", "busy_percent", "expected"),
    [
        (Pcie(1, 16), 0, (True, "generation 1 x16 of 4 x16 (idle links slow down)")),
        (Pcie(1, 16), 90, (False, "generation 1 x16 of 4 x16 under load: the link is slow")),
        (Pcie(4, 8), 0, (False, "generation 4 x8 of 4 x16: lanes are missing")),
        (Pcie(4, 16), 90, (True, "generation 4 x16 of 4 x16")),
    ],
)
def test_pcie_width_counts_always_and_generation_under_load(
    now: Pcie, busy_percent: int, expected: tuple[bool, str]
) -> None:
    device = DeviceFacts(index=0, pcie=now, max_pcie=Pcie(4, 16), busy_percent=busy_percent)
    assert verdict(judged("PCIe", device)) == expected


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (0, (True, "none now")),
        (0x1, (True, "none now")),
        (0x4, (True, "at the power limit, which is usual under full load")),
        (0x84, (False, "slowed down now: power brake from outside")),
        (0x2, (None, "clocks are held down by a setting")),
    ],
)
def test_clock_event_reasons_are_put_in_words(
    reasons: int, expected: tuple[bool | None, str]
) -> None:
    device = DeviceFacts(index=0, clock_event_reasons=reasons)
    assert verdict(judged("throttling", device)) == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (RemappedRows(0, 0, 0, 0), (True, "no rows remapped")),
        (
            RemappedRows(1, 2, 0, 0),
            (True, "1 rows after correctable errors, 2 after others; spares are left"),
        ),
        (
            RemappedRows(0, 1, 1, 0),
            (
                False,
                "waits for a reset; remapped so far: 0 rows after correctable errors, 1 after "
                "others",
            ),
        ),
    ],
)
def test_row_remapping_that_waits_is_a_fault(
    rows: RemappedRows, expected: tuple[bool, str]
) -> None:
    device = DeviceFacts(index=0, remapped_rows=rows)
    assert verdict(judged("row remapping", device)) == expected


@pytest.mark.parametrize("action", range(1, 9))
def test_every_recovery_action_has_advice(action: int) -> None:
    check = judged("recovery", DeviceFacts(index=0, recovery_action=action))
    assert check is not None
    assert check.ok is False
    assert check.advice


def test_errors_before_the_last_driver_load_are_a_note() -> None:
    device = DeviceFacts(index=0, uncorrected_volatile=0, uncorrected_aggregate=4)
    check = judged("uncorrected ECC", device)
    assert verdict(check) == (None, "none since the driver was loaded, 4 ever")


def test_inactive_links_count_where_peers_have_them(inputs: MakeInputs) -> None:
    healthy = [linked(index, UP, UP) for index in (0, 1)]
    survey = surveyed(*healthy, linked(2, UP, DOWN))
    found = [c for c in topology.checks(inputs(survey)) if c.name == "NVLink"]
    assert [(c.ok, c.detail) for c in found] == [
        (False, "GPU 2: 1 of 2 links active, peers have 2; inactive: 1"),
        (True, "GPU 0-1: 2 of 2 links active"),
    ]


def test_links_that_no_gpu_uses_are_a_note(inputs: MakeInputs) -> None:
    survey = surveyed(linked(0, DOWN, DOWN), linked(1, DOWN, DOWN))
    (check,) = (c for c in topology.checks(inputs(survey)) if c.name == "NVLink")
    assert (check.ok, check.detail) == (None, "GPU 0-1: none of 2 links is active")


def linked(index: int, *links: NvLink) -> DeviceFacts:
    bus_id = f"00000000:{index + 16:02X}:00.0"
    memory = MemoryUse(0, 1)
    return DeviceFacts(index=index, name=TESLA, bus_id=bus_id, memory=memory, nvlinks=links)


@pytest.mark.parametrize(
    ("fabric", "expected"),
    [
        (Fabric(0, 0), None),
        (Fabric(3, 0), (True, "GPU 0: registered")),
        (Fabric(3, 0, 0b10), (True, "GPU 0: registered")),
        (Fabric(3, 0, 0b01), (False, "GPU 0: registered, but bandwidth is degraded")),
        (Fabric(1, 0), (False, "GPU 0: registration not started: CUDA programs fail (error 802)")),
    ],
)
def test_the_fabric_is_judged_by_registration_and_health(
    inputs: MakeInputs, fabric: Fabric, expected: tuple[bool, str] | None
) -> None:
    device = DeviceFacts(index=0, memory=MemoryUse(0, 1), fabric=fabric)
    found = [c for c in topology.checks(inputs(surveyed(device))) if c.name == "NVLink fabric"]
    assert [verdict(check) for check in found] == ([expected] if expected else [])


def test_pairs_are_grouped_by_their_path(inputs: MakeInputs) -> None:
    direct = NvLink(True, 0, "00000000:11:00.0")
    gpus = (linked(0, direct), linked(1, NvLink(True, 0, "00000000:10:00.0")), linked(2))
    survey = Survey(
        1.0, code=0, count=3, devices=gpus,
        ancestors={(0, 1): 50, (0, 2): 30, (1, 2): 50},
        peer_access={(0, 1): 0, (0, 2): 1, (1, 2): 1},
    )  # fmt: skip
    found = {check.name: check for check in topology.checks(inputs(survey))}
    assert found["GPU pairs"].detail == (
        "NVLink: 0-1; the PCIe host bridge (PHB): 0-2; the link between NUMA nodes (SYS): 1-2"
    )
    assert found["peer access"].detail == (
        "2 of 3 pairs copy through host memory (the chipset does not support it)"
    )


def test_gpus_of_several_numa_nodes_say_how_to_bind(inputs: MakeInputs) -> None:
    files = {
        "/sys/bus/pci/devices/0000:10:00.0/numa_node": "0\n",
        "/sys/bus/pci/devices/0000:11:00.0/numa_node": "1\n",
        "/sys/devices/system/node/node0/cpulist": "0-47\n",
        "/sys/devices/system/node/node1/cpulist": "48-95\n",
        "/sys/bus/pci/devices/0000:10:00.0/iommu_group/type": "DMA-FQ\n",
        "/sys/bus/pci/devices/0000:11:00.0/iommu_group/type": "identity\n",
    }
    found = {c.name: c for c in topology.checks(inputs(surveyed(linked(0), linked(1)), files))}
    assert found["NUMA"].detail == "GPU 0 on node 0 (CPUs 0-47); GPU 1 on node 1 (CPUs 48-95)"
    assert "numactl" in found["NUMA"].advice
    assert found["IOMMU"].detail.startswith("GPU 0 behind a translating IOMMU")
