"""Reads the profiling fields of DCGM's host engine, for GPUs that lack GPM.

It only reads, with one exception: while a capture needs the hardware counters, it pauses profiling.
DCGM's profiling and tools that read the same counters exclude each other. A pause holds for every
client of the host engine and outlives its own client, so it must always be ended.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from warpwatch_devices.config import DcgmConfig
from warpwatch_devices.dcgm.bindings import (
    DcgmRefused,
    DcgmUnavailable,
    Entity,
    FieldValue,
    HostEngine,
    load,
)
from warpwatch_devices.dcgm.values import (
    INSTANCE_ROWS,
    PROFILING_ROWS,
    PublishedDevices,
    device_of,
    in_our_unit,
)
from warpwatch_devices.source import Sink, SourceContext
from warpwatch_runtime.supervisor import LoopHandle, LoopRunner, run_all
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import DeviceSample, SourceHealth

logger = logging.getLogger(__name__)

MAX_PAUSE_S = 600.0


class ProfilingPause:
    """Whether profiling is paused by us. Times are of the monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._since: float | None = None
        # Wanted, but over: it lasted too long, or the host engine does not do it.
        self._given_up = False
        self.reason = ""

    @property
    def active(self) -> bool:
        return self._since is not None

    def follow(self, engine: HostEngine, wanted: bool, now: float) -> bool:
        """Pause or resume as wanted; return whether that changed. Raises DcgmUnavailable."""
        if not wanted:
            self._given_up = False
        if self._since is None:
            return wanted and not self._given_up and self._begin(engine, now)
        too_long = now - self._since > MAX_PAUSE_S
        if wanted and not too_long:
            return False
        if wanted:
            self._given_up = True
            logger.warning("profiling is resumed: a capture kept it paused too long")
        self.end(engine)
        return True

    def connected(self, engine: HostEngine) -> None:
        """End a pause that was active when the connection was lost."""
        if self._since is not None:
            self.end(engine)

    def end(self, engine: HostEngine) -> None:
        """End the pause. Raises DcgmUnavailable, after which it is still to be ended."""
        if self._since is None:
            return
        try:
            engine.resume()
        except DcgmRefused as refused:
            logger.warning("DCGM does not resume profiling: %s", refused)
        self._since = None
        self.reason = ""

    def _begin(self, engine: HostEngine, now: float) -> bool:
        try:
            engine.pause()
        except DcgmRefused as refused:
            self._given_up = True
            logger.warning("DCGM does not pause profiling: %s", refused)
            return False
        self._since = now
        self.reason = "profiling is paused for a capture"
        return True


# How often it is looked whether a capture wants the counters.
PAUSE_INTERVAL_S = 0.5
# How often GPUs and GPU instances are listed again.
DISCOVERY_INTERVAL_S = 15.0
RETRY_FIRST_S = 1.0
RETRY_LONGEST_S = 60.0
STUCK_AFTER_S = 10.0
# The shortest at which DCGM's profiling metrics are sound is 0.1 s.
INTERVAL_S = 1.0
# An older value is stale.
_STALE_S = 3.0
_CLOSE_TIMEOUT_S = 2.0


class DcgmSource:
    """Starts without a host engine and comes up by itself when there is one."""

    name = "dcgm"

    def __init__(
        self,
        config: DcgmConfig,
        context: SourceContext,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._config = config
        self._context = context
        self._retry_s = RETRY_FIRST_S
        self._engine: HostEngine | None = None
        self._entities: tuple[Entity, ...] = ()
        self._pause = ProfilingPause()
        self._published = PublishedDevices(self.name)
        self._next_connect = self._next_discovery = self._next_read = 0.0
        self._refused: dict[int, str] = {}
        self._reason = "not connected yet"
        self._errors = 0

    def start(self, supervisor: LoopRunner, sink: Sink) -> None:
        loop = supervisor.every(self.name, PAUSE_INTERVAL_S, lambda: self._step(sink))
        supervisor.every("dcgm-watchdog", 1.0, lambda: self._watch(loop, sink))

    def close(self) -> None:
        """Resume profiling and disconnect, without waiting for a stuck host engine."""
        run_all({"dcgm-close": self._leave}, _CLOSE_TIMEOUT_S)

    def _step(self, sink: Sink) -> None:
        begun = self._monotonic()
        try:
            engine = self._connected(begun)
            if engine is None:
                return
            if self._pause.follow(engine, self._context.counters_wanted(), begun):
                self._next_read = begun
            if begun < self._next_read:
                return
            self._next_read = begun + INTERVAL_S
            self._publish(engine, sink)
            self._retry_s = RETRY_FIRST_S
            self._reason = ""
        except DcgmUnavailable as unavailable:
            self._unavailable(str(unavailable), begun)
        sink.publish_health(self._health(self._monotonic() - begun))

    def _connected(self, now: float) -> HostEngine | None:
        """Return the engine, or None until the next attempt is due."""
        engine = self._engine
        if engine is not None and now >= self._next_discovery:
            self._next_discovery = now + DISCOVERY_INTERVAL_S
            if engine.entities() != self._entities:
                logger.info("DCGM's devices changed")
                self._drop()
        if self._engine is None and now >= self._next_connect:
            self._connect()
            self._next_discovery = now + DISCOVERY_INTERVAL_S
        return self._engine

    def _connect(self) -> None:
        bindings = load(self._config.bindings)
        self._engine = engine = HostEngine(bindings, self._config.address)
        self._pause.connected(engine)
        self._entities = entities = engine.entities()
        self._refused = {}
        for gpu_id in {entity.gpu_id: None for entity in entities}:
            of_gpu = [entity for entity in entities if entity.gpu_id == gpu_id]
            try:
                engine.watch(of_gpu, list(PROFILING_ROWS), INTERVAL_S)
            except DcgmRefused as refused:
                self._refused[gpu_id] = f"GPU {gpu_id}: {refused}"

    def _publish(self, engine: HostEngine, sink: Sink) -> None:
        known = self._context.devices()
        samples = []
        for entity, readings in engine.latest():
            device = device_of(entity.device, known)
            now = self._wall()
            values = {} if self._pause.active else self._values(entity, readings, now)
            lost = not values and engine.is_lost(entity)
            if device is not None and (values or lost or self._pause.active):
                reason = "lost" if lost else ""
                sample = DeviceSample(device, now, values, not lost, reason, source=self.name)
                samples.append(sample)
        self._published.publish(samples, sink)

    def _values(
        self, entity: Entity, readings: dict[str, FieldValue], now: float
    ) -> dict[SeriesKey, float]:
        oldest = now - _STALE_S
        rows = INSTANCE_ROWS if entity.device.gpu_instance else PROFILING_ROWS
        values: dict[SeriesKey, float] = {}
        for name in rows.keys() & readings.keys():
            row, reading = rows[name], readings[name]
            value = in_our_unit(row, reading.value)
            if value is None:
                self._errors += 1
            elif reading.time >= oldest:
                values[row.series[0]] = value
        return values

    def _unavailable(self, reason: str, now: float) -> None:
        reason = f"DCGM at {self._config.address}: {reason}"
        if reason != self._reason:
            logger.warning("%s", reason)
        self._reason = reason
        self._errors += 1
        self._drop()
        self._next_connect = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_LONGEST_S)

    def _drop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _leave(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            with contextlib.suppress(DcgmUnavailable):
                self._pause.end(engine)
            engine.close()

    def _health(self, duration_s: float) -> SourceHealth:
        if self._engine is None:
            return SourceHealth(self.name, False, self._reason, duration_s, self._errors)
        reasons = [self._pause.reason, *self._refused.values()]
        if not self._entities:
            reasons.append("DCGM supports no GPU here")
        reason = "; ".join(text for text in reasons if text)
        return SourceHealth(self.name, True, reason, duration_s, self._errors)

    def _watch(self, loop: LoopHandle, sink: Sink) -> None:
        """Report a call that does not return."""
        if loop.busy_s > STUCK_AFTER_S:
            reason = f"DCGM at {self._config.address} does not answer"
            sink.publish_health(SourceHealth(self.name, False, reason, errors=self._errors))
