"""What the survey's child reads of a driver in each state, and the GPUs on the PCI bus."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cases import cases
from tests.devices.fakenvml.driver import FakeDriver
from tests.waiting import DEADLINE_S
from warpwatch_devices.nvml.survey import pci_gpus, survey


@pytest.mark.parametrize(("name", "state"), cases(__file__).items())
def test_all_that_a_driver_says_is_in_the_survey(
    fake_driver: FakeDriver, monkeypatch: Any, golden_case: Any, name: str, state: dict[str, Any]
) -> None:
    wide = {"profile": state.get("profile", "h100"), "gpus": state.get("gpus", 1)}
    fake_driver.set(None, **wide, **state.get("set", {}), monotonic_s=100.0, wall_s=1e9)
    for gpu, settings in state.get("at", {}).items():
        fake_driver.set(gpu, **settings)
    for failing in state.get("fail", ()):
        fake_driver.fail(*failing)
    if "hang" in state:
        fake_driver.hang(state["hang"])
    for gpu, instances in state.get("mig", {}).items():
        fake_driver.mig(gpu, *instances)
    for gpu, running in state.get("processes", {}).items():
        fake_driver.processes(gpu, *running)
    for variable, value in fake_driver.environment.items():
        monkeypatch.setenv(variable, value)
    found = survey(state.get("patience", DEADLINE_S))
    whole = replace(found, gpus=(), pairs=(), library=Path(found.library or "").name)
    lines = [str(whole), *sorted(map(str, found.pairs))]
    for gpu in found.gpus:
        info = {k: text for k, text in gpu.info.items() if k != "driver_load"}
        lines.append(f"{'up' if gpu.up else 'down'} {gpu.address} {gpu.links}")
        lines.append(str(replace(gpu, values={}, info=info)))
        lines += [f"{key} {value:.6g}" for key, value in sorted(gpu.values.items()) if value]
    golden_case("".join(f"{line}\n" for line in lines), name)


def test_gpus_on_the_bus_are_nvidias_of_two_classes_with_their_driver(tmp_path: Path) -> None:
    for address, vendor, kind, module in (
        ("0000:3b:00.0", "0x10de", "0x030200", "vfio-pci"),
        ("0000:1b:00.0", "0x10de", "0x030000", ""),
        ("0000:04:00.0", "0x10de", "0x068000", "nvidia-nvswitch"),
        ("0000:03:00.0", "0x1a03", "0x030000", "ast"),
    ):
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind)):
            (folder / name).write_text(f"{text}\n")
        if module:
            (folder / "driver").symlink_to(f"../../drivers/{module}")
        (folder / "config").write_bytes(b"\xff" * 64 if module else b"\xff\xff\xff\x00")
    assert pci_gpus(tmp_path) == (
        ("0000:1b:00.0", None, False), ("0000:3b:00.0", "vfio-pci", True),
    )  # fmt: skip
