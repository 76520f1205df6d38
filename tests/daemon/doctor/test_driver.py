"""Library against kernel module, device files, and what a container was given."""

from __future__ import annotations

import os

import pytest

from tests.daemon.doctor.conftest import surveyed
from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.doctor import devices, driver
from warpwatch_daemon.doctor.check import Check, CheckInputs
from warpwatch_daemon.doctor.facts import DeviceFacts, MemoryUse, Survey
from warpwatch_daemon.doctor.machine import CAP_SYS_ADMIN
from warpwatch_devices.config import NvmlConfig, SourcesConfig

VERSION, DOCKER = "/proc/driver/nvidia/version", {"/.dockerenv": ""}
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


ONE = surveyed(gpu(0, "00000000:1B:00.0"))
LOST = surveyed(gpu(0, "00000000:1B:00.0"), DeviceFacts(index=1, codes={"handle": 15}))
TWO = {**pci("0000:1b:00.0"), **pci("0000:3b:00.0"), **pci("0000:00:02.0", gpu_class="0x06")}
CONTROL = {"/dev/nvidiactl": ""}


@pytest.mark.parametrize(
    ("survey", "files", "name", "ok", "detail", "advice"),
    [
        (ONE, {VERSION: MODULE}, "kernel module", True, "580.65.06, as the library", ""),
        (ONE, {VERSION: OPEN_MODULE}, "kernel module", False,
         "570.86.15, but the library is 580.65.06", "reboot"),
        (ONE, {}, "NVML", True, "1 GPU, driver 580.65.06, NVML 13.580.65.06, CUDA up to 13.0; "
         "/lib/libnvidia-ml.so.580.65.06", ""),
        (NO_LIBRARY, {}, "NVML", False, "no NVIDIA GPU on the PCI bus",
         "sources.nvml.enabled: false"),
        (NO_LIBRARY, pci("0000:1b:00.0", None), "NVML", False,
         "1 GPU on the PCI bus, no kernel module", "install the NVIDIA"),
        (NO_LIBRARY, {VERSION: MODULE}, "NVML", False, "kernel module 580.65.06",
         "libnvidia-compute"),
        (NO_LIBRARY, pci("0000:1b:00.0") | DOCKER, "NVML", False, "in this container",
         "docker run --gpus all"),
        (ONE, {"/dev/nvidia0": ""}, "device files", False, "/dev/nvidiactl is missing", ""),
        (ONE, CONTROL | {"/dev/nvidia0": "", "/dev/nvidia1": "", "/dev/nvidia-uvm": ""},
         "device files", True, "/dev/nvidiactl and 2 GPUs can be opened", ""),
        # Without the device of unified memory CUDA will fail.
        (ONE, CONTROL, "CUDA", None, "/dev/nvidia-uvm is missing", ""),
        (ONE, TWO, "GPU count", False,
         "1 of 2 GPUs with the nvidia driver; missing 0000:3b:00.0", ""),
        (ONE, TWO | DOCKER, "GPU count", True,
         "1 of 2 GPUs with the nvidia driver are in this container", ""),
        # A GPU that says nothing is placed by what the others reported.
        (LOST, TWO, "GPU 1", False, "; 0000:3b:00.0", ""),
        (LOST, TWO, "GPU count", True, "", ""),
        (NO_LIBRARY, pci("0000:1b:00.0", "nouveau"), "PCI 0000:1b:00.0", None,
         "a GPU with the kernel driver nouveau, hidden from NVML", "blacklist nouveau"),
        (ONE, pci("0000:1b:00.0", "vfio-pci"), "PCI 0000:1b:00.0", None, "",
         "nothing, if a virtual machine has it"),
    ],
)  # fmt: skip
def test_what_is_found_and_what_to_do_is_said(inputs, survey, files, name, ok, detail, advice):
    check = named(inputs(survey, files), name)
    assert check.ok is ok
    assert detail in check.detail
    assert advice in check.advice


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
    assert list(devices.checks(inputs(config=off))) == []


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
