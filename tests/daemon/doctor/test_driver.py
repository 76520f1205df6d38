"""Library against kernel module, device files, and what a container was given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.daemon.doctor.conftest import MakeInputs, surveyed
from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.doctor import devices, driver
from warpwatch_daemon.doctor.check import Check, CheckInputs
from warpwatch_daemon.doctor.facts import DeviceFacts, MemoryUse, Survey
from warpwatch_daemon.doctor.machine import CAP_SYS_ADMIN
from warpwatch_devices.config import NvmlConfig, SourcesConfig

OPEN_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    "GCC version:  gcc version 11.4.0\n"
)
MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Fri Jul  4 00:22:12 UTC 2025\n"
NO_LIBRARY = Survey(1.0, code=12, error="libnvidia-ml.so.1 not found")


def gpu(index: int, bus_id: str) -> DeviceFacts:
    return DeviceFacts(index=index, bus_id=bus_id, memory=MemoryUse(0, 80 << 30))


def pci(address: str, module: str | None = "nvidia", gpu_class: str = "0x030200") -> dict[str, str]:
    folder = f"/sys/bus/pci/devices/{address}"
    files = {f"{folder}/vendor": "0x10de\n", f"{folder}/class": f"{gpu_class}\n"}
    if module:
        files[f"{folder}/driver"] = f"-> ../../drivers/{module}"
    return files


def named(given: CheckInputs, name: str) -> Check:
    found = [*driver.checks(given), *devices.checks(given)]
    return next(check for check in found if check.name == name)


def test_module_and_library_of_one_version_are_well(inputs: MakeInputs) -> None:
    given = inputs(surveyed(), {"/proc/driver/nvidia/version": MODULE})
    check = named(given, "kernel module")
    assert (check.ok, check.detail) == (True, "580.65.06, as the library")


def test_another_version_of_the_module_says_reboot(inputs: MakeInputs) -> None:
    given = inputs(surveyed(), {"/proc/driver/nvidia/version": OPEN_MODULE})
    check = named(given, "kernel module")
    assert (check.ok, check.detail) == (False, "570.86.15, but the library is 580.65.06")
    assert "reboot" in check.advice


def test_versions_of_a_working_driver_are_shown(inputs: MakeInputs) -> None:
    given = inputs(surveyed(gpu(0, "00000000:1B:00.0")))
    assert named(given, "NVML").detail == (
        "1 GPU, driver 580.65.06, NVML 13.580.65.06, CUDA up to 13.0; "
        "/lib/libnvidia-ml.so.580.65.06"
    )


@pytest.mark.parametrize(
    ("files", "detail", "advice"),
    [
        ({}, "no NVIDIA GPU on the PCI bus", "sources.nvml.enabled: false"),
        (pci("0000:1b:00.0", None), "1 GPU on the PCI bus, no kernel module", "install the NVIDIA"),
        ({"/proc/driver/nvidia/version": MODULE}, "kernel module 580.65.06", "libnvidia-compute"),
        ({**pci("0000:1b:00.0"), "/.dockerenv": ""}, "in this container", "docker run --gpus all"),
    ],
)
def test_a_missing_library_is_explained_by_what_else_is_missing(
    inputs: MakeInputs, files: dict[str, str], detail: str, advice: str
) -> None:
    check = named(inputs(NO_LIBRARY, files), "NVML")
    assert check.ok is False
    assert detail in check.detail
    assert advice in check.advice


@pytest.mark.parametrize(
    ("environ", "ok", "advice"),
    [
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, False, "NVIDIA_VISIBLE_DEVICES=all"),
        (
            {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute"},
            False,
            "add `utility`",
        ),
        (
            {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"},
            True,
            "",
        ),
    ],
)
def test_what_the_container_was_given_is_judged(
    inputs: MakeInputs, environ: dict[str, str], ok: bool, advice: str
) -> None:
    check = named(inputs(NO_LIBRARY, {"/.dockerenv": ""}, environ=environ), "container")
    assert check.ok is ok
    assert advice in check.advice


def test_nvml_that_is_switched_off_is_a_note(inputs: MakeInputs) -> None:
    checks = list(driver.checks(inputs()))
    assert checks == [Check("NVML", None, "switched off (sources.nvml.enabled)")]
    off = Config(sources=SourcesConfig(nvml=NvmlConfig(enabled=False)))
    assert list(devices.checks(inputs(config=off))) == []


def test_a_missing_control_device_is_a_problem(inputs: MakeInputs) -> None:
    given = inputs(surveyed(), {"/dev/nvidia0": ""})
    check = named(given, "device files")
    assert (check.ok, check.detail) == (False, "/dev/nvidiactl is missing")


def test_device_files_that_can_be_opened_are_counted(inputs: MakeInputs) -> None:
    files = {"/dev/nvidiactl": "", "/dev/nvidia0": "", "/dev/nvidia1": "", "/dev/nvidia-uvm": ""}
    check = named(inputs(surveyed(), files), "device files")
    assert (check.ok, check.detail) == (True, "/dev/nvidiactl and 2 GPUs can be opened")


def test_without_the_device_of_unified_memory_cuda_will_fail(inputs: MakeInputs) -> None:
    check = named(inputs(surveyed(), {"/dev/nvidiactl": ""}), "CUDA")
    assert check.ok is None
    assert check.detail.startswith("/dev/nvidia-uvm is missing")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_device_files_that_are_closed_are_named(inputs: MakeInputs) -> None:
    given = inputs(surveyed(), {"/dev/nvidiactl": "", "/dev/nvidia3": ""})
    given.machine.path("/dev/nvidia3").chmod(0)
    check = named(given, "device files")
    assert (check.ok, check.detail) == (False, "uid 1000 may not open /dev/nvidia3")


def test_a_gpu_of_the_bus_that_nvml_does_not_show_is_missing(inputs: MakeInputs) -> None:
    files = {**pci("0000:1b:00.0"), **pci("0000:3b:00.0"), **pci("0000:00:02.0", gpu_class="0x06")}
    check = named(inputs(surveyed(gpu(0, "00000000:1B:00.0")), files), "GPU count")
    assert check.ok is False
    assert check.detail == "1 of 2 GPUs with the nvidia driver; missing 0000:3b:00.0"


def test_a_gpu_that_says_nothing_is_placed_by_what_the_others_reported(inputs: MakeInputs) -> None:
    files = {**pci("0000:1b:00.0"), **pci("0000:3b:00.0")}
    lost = DeviceFacts(index=1, codes={"handle": 15})
    given = inputs(surveyed(gpu(0, "00000000:1B:00.0"), lost), files)
    assert named(given, "GPU 1").detail.endswith("; 0000:3b:00.0")
    assert named(given, "GPU count").ok is True


def test_a_container_may_have_fewer_gpus_than_the_bus(inputs: MakeInputs) -> None:
    files = {**pci("0000:1b:00.0"), **pci("0000:3b:00.0"), "/.dockerenv": ""}
    check = named(inputs(surveyed(gpu(0, "00000000:1B:00.0")), files), "GPU count")
    assert check.ok is True
    assert check.detail == "1 of 2 GPUs with the nvidia driver are in this container"


def test_a_gpu_that_reads_all_ones_has_fallen_off_the_bus(inputs: MakeInputs) -> None:
    given = inputs(NO_LIBRARY, pci("0000:1b:00.0"))
    config: Path = given.machine.path("/sys/bus/pci/devices/0000:1b:00.0/config")
    config.write_bytes(b"\xff" * 64)
    assert named(given, "PCI 0000:1b:00.0").detail == "fallen off the bus (reads all ones)"


def test_a_gpu_of_the_free_driver_says_how_to_be_rid_of_it(inputs: MakeInputs) -> None:
    check = named(inputs(NO_LIBRARY, pci("0000:1b:00.0", "nouveau")), "PCI 0000:1b:00.0")
    assert check.detail == "a GPU with the kernel driver nouveau, hidden from NVML"
    assert "blacklist nouveau" in check.advice


def test_capabilities_are_read_from_the_status_of_the_process(inputs: MakeInputs) -> None:
    status = "Name:\tpython\nCapEff:\t0000000000200000\n"
    machine = inputs(files={"/proc/self/status": status}).machine
    assert machine.has_capability(CAP_SYS_ADMIN)
    assert not machine.has_capability(CAP_SYS_ADMIN + 1)


def test_a_gpu_given_to_a_virtual_machine_is_a_note(inputs: MakeInputs) -> None:
    given = inputs(surveyed(), pci("0000:1b:00.0", "vfio-pci"))
    check = named(given, "PCI 0000:1b:00.0")
    assert check.ok is None
    assert check.advice == "nothing, if a virtual machine has it"
