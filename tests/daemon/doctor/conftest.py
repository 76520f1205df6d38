"""The fake driver for the doctor's child, and nodes made of files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.devices.fakenvml.driver import CannotBuild, FakeDriver, build
from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.doctor.check import CheckInputs
from warpwatch_daemon.doctor.facts import DeviceFacts, Survey
from warpwatch_daemon.doctor.machine import Machine

MakeDriver = Callable[..., FakeDriver]
MakeInputs = Callable[..., CheckInputs]
WriteFiles = Callable[[Mapping[str, str]], Machine]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build(tmp_path_factory.mktemp("fakenvml"))
    except CannotBuild as error:
        pytest.skip(str(error))


@pytest.fixture
def driver(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeDriver:
    """Makes the fake driver that children of this process load."""

    def make(profile: str = "h100", gpus: int = 8) -> FakeDriver:
        fake = FakeDriver(library, tmp_path / "driver", profile, gpus)
        for name, value in fake.environment.items():
            monkeypatch.setenv(name, value)
        return fake

    return make


@pytest.fixture
def node(tmp_path: Path) -> WriteFiles:
    """A machine that has these files; ``-> name`` makes a link."""

    def write(files: Mapping[str, str]) -> Machine:
        for name, text in files.items():
            path = tmp_path / "node" / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("-> "):
                path.symlink_to(text[3:])
            else:
                path.write_text(text)
        (tmp_path / "node").mkdir(exist_ok=True)
        return Machine(tmp_path / "node", {}, uid=1000)

    return write


@pytest.fixture
def inputs(node: WriteFiles) -> MakeInputs:
    """What a group of checks gets: by default of a node without anything."""

    def make(
        survey: Survey | None = None,
        files: Mapping[str, str] | None = None,
        config: Config | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> CheckInputs:
        machine = Machine(node(files or {}).root, environ or {}, uid=1000)
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
