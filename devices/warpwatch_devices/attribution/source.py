"""Runs the loops that query each origin. Scrapes read only published attributions."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from warpwatch_devices.attribution.control_groups import DeviceProcessesOrigin
from warpwatch_devices.attribution.folders import PodFoldersOrigin, SlurmFolderOrigin, folder_of
from warpwatch_devices.attribution.kubelet import KubeletOrigin
from warpwatch_devices.config import AttributionConfig
from warpwatch_devices.source import (
    AttributionOrigin,
    OriginAnswer,
    OriginError,
    Sink,
    SourceContext,
)
from warpwatch_runtime.supervisor import LoopRunner
from warpwatch_telemetry.samples import DeviceSample, SourceHealth

logger = logging.getLogger(__name__)

# The time between two queries of the kubelet, and of control groups.
INTERVAL_S = 10.0
# The delay of the first query after the first device, and the interval of origins without devices.
TICK_S = 1.0


class AttributionSource:
    name = "attribution"

    def __init__(
        self,
        config: AttributionConfig,
        context: SourceContext,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clocks = monotonic, wall
        self._devices = context.devices
        self._origins = origins_of(config)
        self._lock = threading.Lock()
        self._failures: dict[str, str] = {}
        self._errors = 0

    def start(self, supervisor: LoopRunner, sink: Sink) -> None:
        """Start a loop per origin, so that one without a reply delays no other."""
        sink.publish_health(SourceHealth(self.name, up=True))
        for origin in self._origins:
            interval_s = INTERVAL_S if origin.needs_devices else 0.0
            asked = (origin, interval_s, self._devices, sink, self._report(sink))
            asker = OriginPoller(*asked, *self._clocks)
            supervisor.every(f"attribution-{origin.name}", TICK_S, asker.step)

    def close(self) -> None:
        for origin in self._origins:
            origin.close()

    def _report(self, sink: Sink) -> Callable[[str, str, float], None]:
        def report(origin: str, failure: str, duration_s: float) -> None:
            with self._lock:
                self._errors += bool(failure)
                self._failures[origin] = failure
                failures = [f"{name}: {text}" for name, text in self._failures.items() if text]
                errors = self._errors
            reason = "; ".join(failures)
            sink.publish_health(SourceHealth(self.name, not failures, reason, duration_s, errors))

        return report


def origins_of(config: AttributionConfig) -> list[AttributionOrigin]:
    """Return the configured origins."""
    origins: list[AttributionOrigin] = [DeviceProcessesOrigin(slurm=config.slurm == "auto")]
    if config.kubelet_socket == "auto":
        origins.append(KubeletOrigin())
    elif config.kubelet_socket != "off":
        origins.append(KubeletOrigin(Path(config.kubelet_socket), optional=False))
    pod_logs = folder_of(config.pod_logs)
    if pod_logs is not None:
        origins.append(PodFoldersOrigin(pod_logs))
    if config.slurm not in ("auto", "off"):
        origins.append(SlurmFolderOrigin(Path(config.slurm)))
    return origins


class OriginPoller:
    """Queries an origin every ``interval_s``, once there are devices, and publishes its reply.

    The last reply stays published and ages while the origin fails. Each failure is counted, and
    logged when it changes; a refused part is counted and logged when it is new.
    """

    def __init__(
        self,
        origin: AttributionOrigin,
        interval_s: float,
        devices: Callable[[], tuple[DeviceSample, ...]],
        sink: Sink,
        report: Callable[[str, str, float], None],
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._origin = origin
        self._interval_s = interval_s
        self._devices = devices
        self._sink = sink
        self._report = report
        self._due = 0.0
        self._failure = ""
        self._refused: frozenset[str] = frozenset()

    def step(self) -> None:
        begun = self._monotonic()
        if begun < self._due:
            return
        samples = self._devices()
        if not samples and self._origin.needs_devices:
            return
        self._due = begun + self._interval_s
        try:
            self._publish(self._origin.read(samples, self._wall()))
            failure = ""
        except OriginError as error:
            failure = str(error)
            self._sink.count("attribution_errors_total", self._origin.name)
        self._log(failure)
        self._report(self._origin.name, failure, self._monotonic() - begun)

    def _publish(self, answer: OriginAnswer) -> None:
        for attribution in answer.attributions:
            self._sink.publish_attribution(attribution)
        new = answer.refused - self._refused
        self._refused = answer.refused
        if new:
            self._sink.count("attribution_errors_total", self._origin.name, by=len(new))
            shown = ", ".join(sorted(new)[:5])
            logger.warning("%s: %d not understood: %s", self._origin.name, len(new), shown)

    def _log(self, failure: str) -> None:
        if failure == self._failure:
            return
        self._failure = failure
        if failure:
            logger.warning("%s cannot be asked whose work runs: %s", self._origin.name, failure)
        else:
            logger.info("%s answers again", self._origin.name)
