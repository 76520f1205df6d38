"""Simulated devices: the whole daemon without a GPU. They say what they are in name and labels."""

from __future__ import annotations

import time
from collections.abc import Callable

from warpwatch_devices.config import SimulatedConfig
from warpwatch_devices.simulated.device import SimulatedDevice, simulated_uuid
from warpwatch_devices.simulated.profiles import PROFILES
from warpwatch_devices.source import Sink, Source
from warpwatch_runtime.supervisor import LoopRunner
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import Attribution, HostSample, SourceHealth, Workload

_PORT_BYTES_PER_S = 50e9

INTERVAL_S = 1.0

__all__ = ["SimulatedSource", "simulated_uuid"]


def _workload(index: int) -> Workload:
    return Workload("simulated", f"simulated-{index}", "trainer")


class SimulatedSource(Source):
    """``load_of(index)`` says how busy a device is: 0 to 1, None when no rank uses it."""

    name = "simulated"

    def __init__(
        self,
        config: SimulatedConfig,
        load_of: Callable[[int], float | None],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._load_of = load_of
        profile = PROFILES[config.profile]
        self._devices = [SimulatedDevice(index, profile) for index in range(config.devices)]
        self._read_at: float | None = None
        self._sent_bytes = 0.0

    def start(self, supervisor: LoopRunner, sink: Sink) -> None:
        supervisor.every("simulated", INTERVAL_S, lambda: self._read(sink))

    def _read(self, sink: Sink) -> None:
        now, begun = self._wall(), self._monotonic()
        elapsed_s = 0.0 if self._read_at is None else begun - self._read_at
        self._read_at = begun
        for index, device in enumerate(self._devices):
            sink.publish_device(device.advance(now, elapsed_s, self._load_of(index)))
        used = [d.device for d in self._devices if self._load_of(d.device.index) is not None]
        workloads = {device.uuid: (_workload(device.index),) for device in used}
        sink.publish_host(self._network(now, elapsed_s))
        sink.publish_attribution(Attribution("simulated", now, workloads))
        sink.publish_health(SourceHealth(self.name, True, duration_s=self._monotonic() - begun))

    def _network(self, now: float, elapsed_s: float) -> HostSample:
        """One port for all devices, which is as busy as they are."""
        port = ("mlx5_0", "1")
        self._sent_bytes += (
            elapsed_s
            * _PORT_BYTES_PER_S
            * sum(self._load_of(device.device.index) or 0.0 for device in self._devices)
            / len(self._devices)
        )
        values: dict[SeriesKey, float] = {
            ("network_port_info", (*port, "InfiniBand", "simulated", "")): 1,
            ("network_port_up", port): 1,
            ("network_port_rate_bytes_per_second", port): _PORT_BYTES_PER_S,
            ("network_port_receive_bytes_total", port): round(self._sent_bytes),
            ("network_port_transmit_bytes_total", port): round(self._sent_bytes),
            ("network_port_errors_total", (*port, "symbol_error")): 0,
            ("network_port_congestion_total", (*port, "port_xmit_wait")): 0,
        }
        near = {("network_port_gpu_info", (*port, d.device.uuid)): 1.0 for d in self._devices}
        return HostSample(now, values | near, "network", {"/".join(port): values})
