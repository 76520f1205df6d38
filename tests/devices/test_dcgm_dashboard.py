"""Dashboard 12239, written for dcgm-exporter, on a real Prometheus that scrapes the daemon."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.devices.node import device_node, wait_all_up
from tests.fakenvml.driver import FakeDriver
from tests.loop.node import poll
from warpwatch.daemon.demo.processes import free_port

# The metrics of the dashboard's panels; it selects by the labels instance and gpu.
METRICS = (
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_DEV_FB_USED",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
)


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[httpx.Client]:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed")
    job = {
        "job_name": "gpus",
        "scrape_interval": "1s",
        "static_configs": [{"targets": [f"127.0.0.1:{target}"]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
    port = free_port()
    command = [
        binary,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            yield client
    finally:
        process.kill()
        process.wait()


def query(client: httpx.Client, expression: str) -> list[Any]:
    answer = client.get("/api/v1/query", params={"query": expression}).json()
    result: list[Any] = answer.get("data", {}).get("result", [])
    return result


def gpus_of(client: httpx.Client, selector: str) -> bool:
    """Whether there is a series for each of the two GPUs."""
    return sorted(series["metric"]["gpu"] for series in query(client, selector)) == ["0", "1"]


def test_every_metric_of_the_dashboard_has_data_for_every_gpu(
    fake_nvml: Path, tmp_path: Path
) -> None:
    driver = FakeDriver(fake_nvml, tmp_path, gpus=2)
    exporters = {"prometheus": {"dcgm_names": True}}
    with device_node(tmp_path, driver, exporters=exporters) as node:
        wait_all_up(node, 2)
        with prometheus(tmp_path, node.port) as client:
            instance = f"127.0.0.1:{node.port}"
            for metric in METRICS:
                selector = f'{metric}{{instance=~"{instance}", gpu=~"0|1"}}'
                poll(partial(gpus_of, client, selector), 30, selector)
            gpus = client.get("/api/v1/label/gpu/values").json()["data"]
            assert gpus == ["0", "1"]
            same = "sum(DCGM_FI_DEV_POWER_USAGE) / sum(warpwatch_device_power_watts)"
            assert float(query(client, same)[0]["value"][1]) == pytest.approx(1.0)
