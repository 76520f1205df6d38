"""Rules on GPUs, and on the library, the kernel module and what a container was given."""

from typing import Any

import pytest

from tests.cases import cases
from tests.daemon.doctor.conftest import reading, surveyed
from warpwatch_daemon.cli import doctor
from warpwatch_daemon.doctor import driver, gpus, interconnect
from warpwatch_daemon.doctor.check import Check, CheckInputs
from warpwatch_daemon.doctor.gpus import RULES, evaluate
from warpwatch_devices.nvml.survey import Fabric, GpuPair, GpuReading, Survey
from warpwatch_telemetry.catalogue import THROTTLE_REASONS

CASES = cases(__file__)
FACTS = CASES["facts"]
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


def surveyed_as(case: dict[str, Any]) -> Survey:
    if "survey" in case:
        return Survey(**case["survey"])
    gpus_read = []
    for number, gpu in enumerate(case["gpus"]):
        if "fabric" in gpu:
            gpu = {**gpu, "fabric": Fabric(*gpu["fabric"])}
        # One that cannot be read has no values at all.
        gpus_read.append((GpuReading if "code" in gpu else reading)(index=number, **gpu))
    pairs = tuple(GpuPair(tuple(gpus), access) for gpus, access in case.get("pairs", []))
    return surveyed(*gpus_read, pairs=pairs)


@pytest.mark.parametrize("case", CASES["nodes"].values(), ids=CASES["nodes"])
def test_what_is_found_and_what_to_do_is_said(inputs, case, golden_case):
    files = case.get("files", {})
    for device in case.get("pci", []):
        files = files | pci(*device)
    names = ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")
    given = dict(zip(names, case.get("given", []), strict=False))
    node = inputs(surveyed_as(case), files, environ=given)
    found = [*driver.checks(node), *gpus.checks(node), *interconnect.topology_checks(node)]
    golden_case("\n".join(doctor.lines(found)))


def test_a_gpu_that_reads_all_ones_has_fallen_off_the_bus(inputs):
    given = inputs(NO_LIBRARY, pci("0000:1b:00.0"))
    given.machine.path("/sys/bus/pci/devices/0000:1b:00.0/config").write_bytes(b"\xff" * 64)
    assert named(given, "PCI 0000:1b:00.0").detail == "fallen off the bus (reads all ones)"
