"""Dashboard 12239, written for dcgm-exporter, on a real Prometheus that scrapes the daemon."""

from functools import partial

import pytest

from tests.dashboards.monitoring.prometheus import Prometheus, prometheus
from tests.devices.fakenvml.driver import FakeDriver
from tests.loop.devices.node import device_node, wait_all_up
from tests.loop.node import poll

# The metrics of the dashboard's panels; it selects by the labels instance and gpu.
METRICS = (
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_DEV_FB_USED",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
)


def gpus_of(server: Prometheus, selector: str) -> bool:
    """Whether there is a series for each of the two GPUs."""
    return sorted(series["metric"]["gpu"] for series in server.query(selector)) == ["0", "1"]


def test_every_metric_of_the_dashboard_has_data_for_every_gpu(fake_nvml, tmp_path):
    driver = FakeDriver(fake_nvml, tmp_path, gpus=2)
    exporters = {"prometheus": {"dcgm_names": True}}
    with device_node(tmp_path, driver, exporters=exporters) as node:
        wait_all_up(node, 2)
        with prometheus(tmp_path, {node.port: {}}) as server:
            instance = f"127.0.0.1:{node.port}"
            for metric in METRICS:
                selector = f'{metric}{{instance=~"{instance}", gpu=~"0|1"}}'
                poll(partial(gpus_of, server, selector), selector)
            assert server.get("label/gpu/values") == ["0", "1"]
            same = "sum(DCGM_FI_DEV_POWER_USAGE) / sum(warpwatch_device_power_watts)"
            assert float(server.query(same)[0]["value"][1]) == pytest.approx(1.0)
