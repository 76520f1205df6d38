"""The daemon's metrics of each kind of GPU: golden scrapes of one node with one GPU of each."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.devices.fakenvml.driver import FakeDriver
from tests.loop.devices.node import device_node, wait_all_up
from tests.loop.node import poll
from tests.waiting import DEADLINE_S
from warpwatch_telemetry.catalogue import CATALOGUE, DCGM_NAMES

Golden = Callable[[str, bytes], None]

PROFILES = ("v100", "a100", "a100-mig", "h100", "b200", "rtx4090", "t4")
EVERYTHING = {"prometheus": {"dcgm_names": True, "profile": "full"}}
# Gauges that move with time; counters do anyway.
MOVING = re.compile(r"bytes_per_second|timestamp_seconds")


@pytest.fixture(scope="module")
def scrape(fake_nvml: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One page of a node that holds a GPU of every kind, after everything slow was read."""
    folder = tmp_path_factory.mktemp("profiles")
    driver = FakeDriver(fake_nvml, folder, gpus=len(PROFILES))
    for gpu, name in enumerate(PROFILES):
        driver.set(gpu, profile=name.partition("-")[0], load=60)
        # A PID that no process has, so that its name is unknown everywhere.
        driver.processes(gpu, "4194303/1024")
    driver.mig(PROFILES.index("a100-mig"), "default")
    driver.processes(PROFILES.index("a100-mig"))
    with device_node(folder, driver, exporters=EVERYTHING) as node:
        wait_all_up(node, len(PROFILES))
        pages: list[frozenset[str]] = []

        def settled() -> str | None:
            text = node.http.get("/metrics").text
            pages.append(frozenset(_series(text)))
            return text if len(pages) > 30 and len(set(pages[-30:])) == 1 else None

        yield poll(settled, "no new series any more")


def _series(page: str) -> Iterator[str]:
    return (line.rpartition(" ")[0] for line in _own(page) if not line.startswith("#"))


def _own(page: str) -> list[str]:
    return [line for line in page.splitlines() if "DCGM_FI_" not in line]


def _of_gpu(page: str, gpu: int) -> list[str]:
    """The lines of one GPU, in order; what moves has no value."""
    lines = [line for line in _own(page) if f'{{gpu="{gpu}",' in line]
    return sorted(_without_moving_value(line) for line in lines)


def _without_moving_value(line: str) -> str:
    series, _, value = line.rpartition(" ")
    name = series.partition("{")[0].removeprefix("warpwatch_")
    still = CATALOGUE[name].kind == "gauge" and not MOVING.search(name)
    return f"{series} {value if still else '…'}"


@pytest.mark.parametrize("name", PROFILES)
def test_a_gpu_of_each_kind_tells_what_the_golden_scrape_says(scrape, golden, name):
    lines = _of_gpu(scrape, PROFILES.index(name))
    golden(f"devices/{name}.prom", "\n".join([*lines, ""]).encode())


def test_every_name_is_in_the_catalogue(scrape):
    names = {series.partition("{")[0] for series in _series(scrape)}
    known = {row.full_name for row in CATALOGUE.values()}
    histogram = {name for name in names if name.startswith("warpwatch_step_duration_seconds")}
    assert names - histogram <= known


def test_promtool_finds_nothing_to_say_about_the_scrape(scrape):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    # The names of dcgm-exporter are not Prometheus' style.
    text = "\n".join([*_own(scrape), ""]).encode()
    command = [promtool, "check", "metrics"]
    checked = subprocess.run(command, input=text, capture_output=True, timeout=DEADLINE_S)
    assert (checked.returncode, checked.stderr) == (0, b"")


@pytest.mark.parametrize("name", ["h100", "b200"])
def test_a_gpu_with_gpm_gives_the_whole_list_of_dcgm_exporter(scrape, name):
    gpu = f'{{gpu="{PROFILES.index(name)}",'
    found = {line.partition("{")[0] for line in scrape.splitlines() if gpu in line}
    assert found >= {row.name for row in DCGM_NAMES.values() if row.default}
