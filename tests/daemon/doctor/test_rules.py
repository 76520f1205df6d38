"""Rules on GPUs, and on the library, the kernel module and what a container was given."""

import os
from typing import Any

import pytest

from tests.daemon.doctor.conftest import reading, surveyed
from warpwatch_daemon.config import Config
from warpwatch_daemon.doctor import driver, gpus, report, topology
from warpwatch_daemon.doctor.check import CAP_SYS_ADMIN, Check, CheckInputs, merged
from warpwatch_daemon.doctor.gpus import RULES, evaluate
from warpwatch_devices.config import NvmlConfig, SourcesConfig
from warpwatch_devices.nvml.survey import Fabric, GpuPair, GpuReading, NvLinkPeer, Survey
from warpwatch_telemetry.label_values import THROTTLE_REASONS

TESLA, GEFORCE = "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090"
DOWN, UP = None, NvLinkPeer(2, None)


def test_equal_findings_become_one_that_names_gpus_in_runs_and_faults_come_first():
    well, bad = Check("x", True, "on"), Check("x", False, "off", "set -i {gpus}")
    findings = [(5, well), (1, bad), (0, well), (2, well), (6, well), (3, bad), (7, well)]
    assert list(merged(findings)) == [
        Check("x", False, "GPU 1,3: off", "set -i 1,3"),
        Check("x", True, "GPU 0,2,5-7: on", ""),
    ]


def test_a_gpu_without_answers_has_no_findings():
    silent = GpuReading(index=0)
    assert [evaluate(rule, silent) for rule in RULES] == [None] * len(RULES)


def ecc(name: str, now: int, next_start: int) -> dict[str, Any]:
    return {"name": name, "values": {"ecc_mode": now}, "pending": {"ECC": next_start}}


def pcie(generation: int, width: int, busy_ratio: float) -> dict[str, Any]:
    values = {
        "pcie_link_generation": generation,
        "pcie_link_width_lanes": width,
        "pcie_link_generation_max": 4,
        "pcie_link_width_max_lanes": 16,
        "utilization_ratio": busy_ratio,
    }
    return {"values": values}


def rows(correctable: int, uncorrectable: int, pending: int, failed: int) -> dict[str, Any]:
    values = {
        "remapped_rows correctable": correctable,
        "remapped_rows uncorrectable": uncorrectable,
        "row_remap_pending": pending,
        "row_remap_failure": failed,
    }
    return {"values": values}


def throttled(*reasons: str) -> dict[str, Any]:
    values = dict.fromkeys((f"throttle_active {reason}" for reason in THROTTLE_REASONS), 0)
    return {"values": values | {f"throttle_active {reason}": 1 for reason in reasons}}


def errors(volatile: int, ever: int) -> dict[str, Any]:
    names = ("ecc_errors_total uncorrected", "ecc_aggregate_errors_total uncorrected")
    return {"values": dict(zip(names, (volatile, ever), strict=True))}


@pytest.mark.parametrize(
    ("rule", "facts", "ok", "detail"),
    [
        # Desktop GPUs are delivered without it.
        ("ECC", ecc(TESLA, 1, 1), True, "on"),
        ("ECC", ecc(TESLA, 0, 0), False, "off: memory errors corrupt results unseen"),
        ("ECC", ecc(TESLA, 0, 1), None, "off, will be on after a reset"),
        ("ECC", ecc(GEFORCE, 0, 0), True, "off, as desktop GPUs are delivered"),
        # The width counts always, the generation under load.
        ("PCIe", pcie(1, 16, 0), True, "generation 1 x16 of 4 x16 (idle links slow down)"),
        ("PCIe", pcie(1, 16, 0.9), False,
         "generation 1 x16 of 4 x16 under load: the link is slow"),
        ("PCIe", pcie(4, 8, 0), False, "generation 4 x8 of 4 x16: lanes are missing"),
        ("PCIe", pcie(4, 16, 0.9), True, "generation 4 x16 of 4 x16"),
        ("throttling", throttled(), True, "none now"),
        ("throttling", throttled("idle"), True, "none now"),
        ("throttling", throttled("sw_power_cap"), True,
         "at the power limit, which is usual under full load"),
        ("throttling", throttled("sw_power_cap", "hw_power_brake"), False,
         "slowed down now: power brake from outside"),
        ("throttling", throttled("application_clocks"), None, "clocks are held down by a setting"),
        ("row remapping", rows(0, 0, 0, 0), True, "no rows remapped"),
        ("row remapping", rows(1, 2, 0, 0), True,
         "1 rows after correctable errors, 2 after others; spares are left"),
        ("row remapping", rows(0, 1, 1, 0), False,
         "waits for a reset; remapped so far: 0 rows after correctable errors, 1 after others"),
        ("uncorrected ECC", errors(0, 4), None,
         "none since the driver was loaded, 4 ever"),
    ],
)  # fmt: skip
def test_a_gpu_is_judged_by_its_facts(rule, facts, ok, detail):
    check = evaluate(rule, reading(**facts))
    assert (check.ok, check.detail) == (ok, detail)
    assert bool(check.advice) == (ok is not True)


@pytest.mark.parametrize("action", range(1, 9))
def test_every_recovery_action_has_advice(action):
    check = evaluate("recovery", reading(values={"recovery_action": action}))
    assert check.ok is False
    assert check.advice


def linked(index: int, *links: NvLinkPeer | None) -> GpuReading:
    return reading(
        index,
        TESLA,
        f"00000000:{index + 16:02X}:00.0",
        values={f"nvlink_link_up {number}": peer is not None for number, peer in enumerate(links)},
        nvlinks={number: peer for number, peer in enumerate(links) if peer},
    )


def found(given: CheckInputs, name: str) -> list[tuple[bool | None, str]]:
    return [(c.ok, c.detail) for c in topology.checks(given) if c.name == name]


def test_inactive_links_count_where_peers_have_them(inputs):
    survey = surveyed(linked(0, UP, UP), linked(1, UP, UP), linked(2, UP, DOWN))
    assert found(inputs(survey), "NVLink") == [
        (False, "GPU 2: 1 of 2 links active, peers have 2; inactive: 1"),
        (True, "GPU 0-1: 2 of 2 links active"),
    ]
    unused = surveyed(linked(0, DOWN, DOWN), linked(1, DOWN, DOWN))
    assert found(inputs(unused), "NVLink") == [(None, "GPU 0-1: none of 2 links is active")]


@pytest.mark.parametrize(
    ("fabric", "expected"),
    [
        (Fabric(0, 0), []),
        (Fabric(3, 0), [(True, "GPU 0: registered")]),
        (Fabric(3, 0, 0b10), [(True, "GPU 0: registered")]),
        (Fabric(3, 0, 0b01), [(False, "GPU 0: registered, but bandwidth is degraded")]),
        (
            Fabric(1, 0),
            [(False, "GPU 0: registration not started: CUDA programs fail (error 802)")],
        ),
    ],
)
def test_the_fabric_is_judged_by_registration_and_health(inputs, fabric, expected):
    assert found(inputs(surveyed(reading(fabric=fabric))), "NVLink fabric") == expected


def test_pairs_are_grouped_by_their_path(inputs):
    there, back = NvLinkPeer(0, "00000000:11:00.0"), NvLinkPeer(0, "00000000:10:00.0")
    pairs_read = (GpuPair((0, 1), 50, 0), GpuPair((0, 2), 30, 1), GpuPair((1, 2), 50, 1))
    survey = surveyed(linked(0, there), linked(1, back), linked(2), pairs=pairs_read)
    ((_, pairs),) = found(inputs(survey), "GPU pairs")
    assert pairs == (
        "NVLink: 0-1; the PCIe host bridge (PHB): 0-2; the link between NUMA nodes (SYS): 1-2"
    )
    ((_, access),) = found(inputs(survey), "peer access")
    assert access == ("2 of 3 pairs copy through host memory (the chipset does not support it)")


def test_gpus_of_several_numa_nodes_say_how_to_bind(inputs):
    files = {
        "/sys/bus/pci/devices/0000:10:00.0/numa_node": "0\n",
        "/sys/bus/pci/devices/0000:11:00.0/numa_node": "1\n",
        "/sys/devices/system/node/node0/cpulist": "0-47\n",
        "/sys/devices/system/node/node1/cpulist": "48-95\n",
        "/sys/bus/pci/devices/0000:10:00.0/iommu_group/type": "DMA-FQ\n",
        "/sys/bus/pci/devices/0000:11:00.0/iommu_group/type": "identity\n",
    }
    checks = {c.name: c for c in topology.checks(inputs(surveyed(linked(0), linked(1)), files))}
    assert checks["NUMA"].detail == "GPU 0 on node 0 (CPUs 0-47); GPU 1 on node 1 (CPUs 48-95)"
    assert "numactl" in checks["NUMA"].advice
    assert checks["IOMMU"].detail.startswith("GPU 0 behind a translating IOMMU")


VERSION, DOCKER = "/proc/driver/nvidia/version", {"/.dockerenv": ""}
OPEN_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    "GCC version:  gcc version 11.4.0\n"
)
MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Fri Jul  4 00:22:12 UTC 2025\n"
NO_LIBRARY = Survey(code=12, error="libnvidia-ml.so.1 not found")


def pci(address: str, module: str | None = "nvidia", gpu_class: str = "0x030200") -> dict[str, str]:
    folder = f"/sys/bus/pci/devices/{address}"
    files = {f"{folder}/vendor": "0x10de\n", f"{folder}/class": f"{gpu_class}\n"}
    if module:
        files[f"{folder}/driver"] = f"-> ../../drivers/{module}"
    return files


def named(given: CheckInputs, name: str) -> Check:
    found = [*driver.checks(given), *gpus.checks(given)]
    return next(check for check in found if check.name == name)


ONE = surveyed(reading(bus_id="00000000:1B:00.0"))
LOST = surveyed(reading(bus_id="00000000:1B:00.0"), GpuReading(index=1, code=15))
TWO = {**pci("0000:1b:00.0"), **pci("0000:3b:00.0"), **pci("0000:00:02.0", gpu_class="0x06")}
CONTROL = {"/dev/nvidiactl": ""}
DEVICE_FILES = ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia-uvm")


NODES = {
    "the module is the library's": (ONE, {VERSION: MODULE}),
    "the module is another one": (ONE, {VERSION: OPEN_MODULE}),
    "no module is known": (ONE, {}),
    "no GPU": (NO_LIBRARY, {}),
    "no module": (NO_LIBRARY, pci("0000:1b:00.0", None)),
    "no library": (NO_LIBRARY, {VERSION: MODULE}),
    "no library in a container": (NO_LIBRARY, pci("0000:1b:00.0") | DOCKER),
    "no control device": (ONE, {"/dev/nvidia0": ""}),
    "all device files": (ONE, CONTROL | dict.fromkeys(DEVICE_FILES, "")),
    # Without the device of unified memory CUDA will fail.
    "no unified memory": (ONE, CONTROL),
    "one GPU of two": (ONE, TWO),
    "one GPU of two in a container": (ONE, TWO | DOCKER),
    # A GPU that says nothing is placed by what the others reported.
    "a lost GPU": (LOST, TWO),
    "another driver": (NO_LIBRARY, pci("0000:1b:00.0", "nouveau")),
    "a virtual machine's": (ONE, pci("0000:1b:00.0", "vfio-pci")),
}


@pytest.mark.parametrize(("survey", "files"), NODES.values(), ids=NODES)
def test_what_is_found_and_what_to_do_is_said(inputs, survey, files, golden_case):
    given = inputs(survey, files)
    golden_case("\n".join(report.lines([*driver.checks(given), *gpus.checks(given)])))


@pytest.mark.parametrize(
    ("environ", "ok", "advice"),
    [
        (("void",), False, "NVIDIA_VISIBLE_DEVICES=all"),
        (("all", "compute"), False, "add `utility`"),
        (("all", "compute,utility"), True, ""),
    ],
)
def test_what_the_container_was_given_is_judged(inputs, environ, ok, advice):
    names = ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")
    given = inputs(NO_LIBRARY, DOCKER, environ=dict(zip(names, environ, strict=False)))
    check = named(given, "container")
    assert check.ok is ok
    assert advice in check.advice


def test_nvml_that_is_switched_off_is_a_note(inputs):
    checks = list(driver.checks(inputs()))
    assert checks == [Check("NVML", None, "switched off (sources.nvml.enabled)")]
    off = Config(sources=SourcesConfig(nvml=NvmlConfig(enabled=False)))
    assert list(gpus.checks(inputs(config=off))) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_device_files_that_are_closed_are_named(inputs):
    given = inputs(surveyed(), CONTROL | {"/dev/nvidia3": ""})
    given.machine.path("/dev/nvidia3").chmod(0)
    check = named(given, "device files")
    assert (check.ok, check.detail) == (False, "uid 1000 may not open /dev/nvidia3")


def test_a_gpu_that_reads_all_ones_has_fallen_off_the_bus(inputs):
    given = inputs(NO_LIBRARY, pci("0000:1b:00.0"))
    given.machine.path("/sys/bus/pci/devices/0000:1b:00.0/config").write_bytes(b"\xff" * 64)
    assert named(given, "PCI 0000:1b:00.0").detail == "fallen off the bus (reads all ones)"


def test_capabilities_are_read_from_the_status_of_the_process(inputs):
    status = "Name:\tpython\nCapEff:\t0000000000200000\n"
    machine = inputs(files={"/proc/self/status": status}).machine
    assert machine.has_capability(CAP_SYS_ADMIN)
    assert not machine.has_capability(CAP_SYS_ADMIN + 1)
