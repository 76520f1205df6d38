"""Rules on GPUs, and on the library, the kernel module and what a container was given."""

import os

import pytest

from tests.cases import cases
from tests.daemon.doctor.conftest import reading, surveyed
from warpwatch_daemon.cli import doctor
from warpwatch_daemon.doctor import driver, gpus, interconnect
from warpwatch_daemon.doctor.check import Check, CheckInputs, merged
from warpwatch_daemon.doctor.gpus import RULES, evaluate
from warpwatch_devices.nvml.survey import Fabric, GpuPair, GpuReading, Survey
from warpwatch_telemetry.catalogue import THROTTLE_REASONS

TESLA = "NVIDIA A100-SXM4-80GB"
DOWN, UP = False, True


def test_equal_findings_become_one_that_names_gpus_in_runs_and_faults_come_first():
    well, bad = Check("x", True, "on"), Check("x", False, "off", "set -i {gpus}")
    findings = [(5, well), (1, bad), (0, well), (2, well), (6, well), (3, bad), (7, well)]
    assert list(merged(findings)) == [
        Check("x", False, "GPU 1,3: off", "set -i 1,3"),
        Check("x", True, "GPU 0,2,5-7: on", ""),
    ]


FACTS = cases(__file__)["facts"]
FACTS["throttling"] = [
    ", ".join(f"throttle_active {reason} {reason in active:d}" for reason in THROTTLE_REASONS)
    for active in (
        (), ("idle",), ("sw_power_cap",), ("sync_boost",), ("application_clocks",),
        *((reason, "sw_power_cap") for reason in THROTTLE_REASONS),
        ("hw_thermal", "hw_power_brake"),
    )
]  # fmt: skip


def gpu_of(facts: str) -> GpuReading:
    """Return the reading; values may lack a name of the GPU before them."""
    now, _, later = facts.partition("; ")
    name, _, values = now.rpartition(": ")
    numbers = [one.rpartition(" ") for one in values.split(", ")]
    pending = dict([later.split()]) if later else {}
    return reading(
        name=name,
        values={key: float(number) for key, _, number in numbers},
        pending={setting: int(mode) for setting, mode in pending.items()},
    )


def test_what_is_said_of_a_gpu_is_golden(golden_case):
    """Also just below and above what is a fault."""
    silent = GpuReading(index=0)
    assert [evaluate(rule, silent) for rule in RULES] == [None] * len(RULES)
    assert FACTS.keys() == RULES.keys()
    lines = []
    for rule, gpus_of_rule in FACTS.items():
        for facts in gpus_of_rule:
            check = evaluate(rule, gpu_of(facts))
            found = f"{check.ok} {check.detail} → {check.advice}" if check else "nothing"
            lines.append(f"{rule}: {facts}\n    {found}\n")
    golden_case("".join(lines))


def linked(index: int, *links: bool) -> GpuReading:
    values = {f"nvlink_link_up {number}": float(is_up) for number, is_up in enumerate(links)}
    return reading(index, TESLA, f"00000000:{index + 16:02X}:00.0", values=values)


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
PAIRS = (GpuPair((0, 1), 0), GpuPair((0, 2), 1), GpuPair((1, 2), 1))
IOMMU = "/sys/bus/pci/devices/0000:{}:00.0/iommu_group/type"

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
    **{
        f"a container for {' '.join(given)}": (NO_LIBRARY, DOCKER, *given)
        for given in (("void",), ("all", "compute"), ("all", "compute,utility"))
    },
    **{
        f"MIG {name}": (surveyed(reading(values={"mig_mode": 1})), CONTROL | files)
        for name, files in (
            ("with its monitor", {"/dev/nvidia-caps/nvidia-cap2": ""}), ("without its monitor", {}),
            ("without its monitor in a container", DOCKER),
        )
    },
    **{
        f"NVML fails by {code}{where}": (Survey(code=code, error=f"error {code}"), files)
        for code in (4, 9, 18, 999)
        for where, files in (("", {VERSION: MODULE}), (" in a container", DOCKER))
    },
    "NVML that is switched off": (Survey(asked=False), {}),
    "links of which one is down":
        (surveyed(linked(0, UP, UP), linked(1, UP, UP), linked(2, UP, DOWN)), {}),
    "links that are all down": (surveyed(linked(0, DOWN, DOWN), linked(1, DOWN, DOWN)), {}),
    "pairs that copy through host memory": (surveyed(linked(0), linked(1), pairs=PAIRS), {}),
    "one GPU of two behind a translating IOMMU": (
        surveyed(linked(0), linked(1)),
        {IOMMU.format(10): "DMA-FQ\n", IOMMU.format(11): "identity\n"},
    ),
    # State, status and health of the registration.
    **{
        f"a fabric {state} {health:02b}": (surveyed(reading(fabric=Fabric(state, 0, health))), {})
        for state, health in ((0, 0), (3, 0), (3, 0b10), (3, 0b01), (1, 0))
    },
}  # fmt: skip


@pytest.mark.parametrize("case", NODES.values(), ids=NODES)
def test_what_is_found_and_what_to_do_is_said(inputs, case, golden_case):
    survey, files, *given = case
    names = ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")
    node = inputs(survey, files, environ=dict(zip(names, given, strict=False)))
    found = [*driver.checks(node), *gpus.checks(node), *interconnect.topology_checks(node)]
    golden_case("\n".join(doctor.lines(found)))


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
    assert machine.has_capability(21)
    assert not machine.has_capability(22)
