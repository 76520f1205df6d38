"""The fake driver for the doctor's child, and nodes made of files."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.devices.fakenvml.driver import FakeDriver
from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.config import Config
from warpwatch_daemon.doctor.check import CheckInputs, Machine
from warpwatch_devices.nvml.survey import GpuReading, Survey


@pytest.fixture
def driver(fake_nvml, tmp_path, monkeypatch):
    """Makes the fake driver that children of this process load."""

    def make(profile: str = "h100", gpus: int = 8) -> FakeDriver:
        fake = FakeDriver(fake_nvml, tmp_path / "driver", profile, gpus)
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        return fake

    return make


@pytest.fixture
def inputs(tmp_path):
    """Make the inputs of a group of checks, by default those of an empty node.

    files: the node's files; ``-> name`` makes a link.
    """

    def make(
        survey: Survey | None = None,
        files: Mapping[str, str] | None = None,
        config: Config | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> CheckInputs:
        root = tmp_path / "node"
        root.mkdir(exist_ok=True)
        for name, text in (files or {}).items():
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("-> "):
                path.symlink_to(text[3:])
            else:
                path.write_text(text)
        machine = Machine(root, environ or {}, uid=1000)
        api = ApiClient("http://127.0.0.1:9")
        return CheckInputs(config or Config(), api, machine, survey or Survey(asked=False))

    return make


def reading(index: int = 0, name: str = "", bus_id: str = "", **more: Any) -> GpuReading:
    labels = {"name": name, "pci_bus_id": bus_id}
    values = {"memory_used_bytes": 0, "memory_total_bytes": 80 << 30, **more.pop("values", {})}
    info = {label: text for label, text in labels.items() if text}
    return GpuReading(index=index, info=info, values=values, **more)


def surveyed(*gpus: GpuReading, **more: Any) -> Survey:
    return Survey(
        patience_s=1.0, code=0, library="/lib/libnvidia-ml.so.580.65.06",
        driver_version="580.65.06", nvml_version="13.580.65.06", cuda_version=13000,
        count=len(gpus), gpus=gpus, **more,
    )  # fmt: skip
