"""The fake driver for the doctor's child, and nodes made of files."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.devices.fakenvml.driver import FakeDriver
from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.doctor.check import CheckInputs
from warpwatch_daemon.doctor.facts import DeviceFacts, Survey
from warpwatch_daemon.doctor.machine import Machine


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
    """What a group of checks gets: by default of a node without anything.

    files: those of the node; ``-> name`` makes a link.
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
        return CheckInputs(config or Config(), api, machine, survey or Survey(1.0, asked=False))

    return make


def surveyed(*devices: DeviceFacts) -> Survey:
    """A driver that works and has answered this."""
    return Survey(
        1.0,
        code=0,
        library="/lib/libnvidia-ml.so.580.65.06",
        driver_version="580.65.06",
        nvml_version="13.580.65.06",
        cuda_version=13000,
        count=len(devices),
        devices=devices,
    )
