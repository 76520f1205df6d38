"""The exporter that one writes first: pynvml, prometheus_client and a loop of one second.

    python benchmarks/plain_loop.py PORT

Eight samples a GPU of four NVML calls; nothing else, and no care for errors.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import pynvml
from prometheus_client import CollectorRegistry, Gauge, start_http_server

INTERVAL_S = 1.0
NAMES = (
    "utilization_ratio",
    "memory_utilization_ratio",
    "memory_used_bytes",
    "memory_free_bytes",
    "memory_total_bytes",
    "power_watts",
    "temperature_celsius",
    "sample_timestamp_seconds",
)


def read(handle: Any) -> tuple[float, ...]:
    """In the order of NAMES."""
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    power_w = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    celsius = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    shares = (rates.gpu / 100, rates.memory / 100)
    return (*shares, memory.used, memory.free, memory.total, power_w, celsius, time.time())


def main() -> None:
    registry = CollectorRegistry()
    labels = ("gpu", "uuid")
    gauges = [
        Gauge(f"gpu_{name}", f"The GPU's {name}.", labels, registry=registry) for name in NAMES
    ]
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    identities = [(str(i), pynvml.nvmlDeviceGetUUID(handle)) for i, handle in enumerate(handles)]
    start_http_server(int(sys.argv[1]), addr="127.0.0.1", registry=registry)
    due = time.monotonic()
    while True:
        for identity, handle in zip(identities, handles, strict=True):
            for gauge, value in zip(gauges, read(handle), strict=True):
                gauge.labels(*identity).set(value)
        due += INTERVAL_S
        time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main()
