"""The fleet as one of several workers: any of them answers for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from warpwatch_detection.anomalies.tracked import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_fleet.bus.peers import Peers, WorkerView
from warpwatch_fleet.bus.worker import BusSource
from warpwatch_fleet.config import FleetFile
from warpwatch_fleet.fleet import Fleet
from warpwatch_fleet.source import Source
from warpwatch_runtime import bus
from warpwatch_telemetry.bus_messages import partition_of
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.state import State


class WorkerFleet(Fleet):
    """Implements ``peers.Backend``, too."""

    def __init__(self, config: FleetFile) -> None:
        self._peers: Peers
        self._bus_source: BusSource
        super().__init__(config)
        self.captures.are_shared = True
        self._bus_source.busy = self._busy
        self.captures.is_mine = lambda job: str(partition_of(job)) in self._bus_source.judged()

    def _source_of(self, config: FleetFile) -> Source:
        bus.check(config.bus)
        source = BusSource(config, lambda anomalies: self.push_exporters.know(anomalies))
        self._peers, self._bus_source = Peers(source, self), source
        return source

    # --- its own part ---

    def own_view(self) -> WorkerView:
        detectors, suppressed = super().detector_statuses()
        return WorkerView(
            super().state(),
            self._captured(),
            tuple(super().run_summaries()),
            {kind: tuple(readings) for kind, readings in detectors.items()},
            tuple(suppressed),
        )

    def own_capture(self, request: CaptureRequest) -> Capture:
        return super().request_capture(request)

    def own_file(
        self, capture_id: str, name: str, owner: str | None
    ) -> Path | Iterator[bytes] | None:
        return super().capture_file(capture_id, name, owner)

    # --- what HTTP asks ---

    async def prepare(self) -> None:
        """Ask the other workers what they show."""
        await self._peers.refresh()

    def state(self) -> State:
        return self._peers.joined(WorkerView(super().state(), self._captured()))

    def _captured(self) -> frozenset[str]:
        return frozenset(one.id for one in self.captures.service.captures())

    def _busy(self) -> set[int]:
        """Return the partitions of jobs that are being captured."""
        running = (one for one in self.captures.service.captures() if one.outcome is None)
        return {partition_of(one.request.job_id) for one in running}

    def run_summaries(self) -> Sequence[RunSummary]:
        found = [*super().run_summaries(), *(one for v in self._peers.views for one in v.runs)]
        return sorted(found, key=lambda run: run.first_time)

    def detector_statuses(
        self,
    ) -> tuple[Mapping[str, Sequence[DetectorStatus]], Sequence[Suppressed]]:
        detectors, suppressed = super().detector_statuses()
        joined = {kind: list(readings) for kind, readings in detectors.items()}
        for view in self._peers.views:
            for kind, readings in view.detectors.items():
                joined.setdefault(kind, []).extend(readings)
            suppressed = [*suppressed, *view.suppressed]
        return joined, suppressed

    def request_capture(self, request: CaptureRequest) -> Capture:
        return self._peers.capture(request)

    def capture_file(
        self, capture_id: str, name: str, owner: str | None
    ) -> Path | Iterator[bytes] | None:
        return self._peers.file(capture_id, name, owner)
