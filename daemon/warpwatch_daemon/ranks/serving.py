"""One process of an inference server: its seconds as records, and its totals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from warpwatch import protocol
from warpwatch_daemon.ranks import claims
from warpwatch_daemon.ranks.counts import SavedHistogram, SavedRank
from warpwatch_telemetry.jobs import JobId, run_mark
from warpwatch_telemetry.records import Serve, Step
from warpwatch_telemetry.state import LATENCY_BOUNDS_S, Histogram, ServeState, StepDurations

COUNTS = (
    "preemptions", "prefix_hit_tokens", "prefix_query_tokens", "prompt_tokens", "generated_tokens",
)  # fmt: skip
# All buckets of the three latencies are in fewer records.
MAX_PARTS = 20
_CLASSES = ("prefill", "decode", "mixed")


class ServingProcess:
    """Joins the iterations and the records of type 7 of a rank's processes.

    Totals go on over a restart of the daemon and of the process.
    """

    def __init__(self) -> None:
        self._histograms: dict[str, StepDurations] = {}
        self._idle_s = 0.0
        self._newest: Serve | None = None
        # Since the newest record: buckets of a continued record, iterations by class, their waits.
        self._waiting: list[Serve] = []
        self._iterations: dict[Any, tuple[int, float]] = {}
        self._comm_s = 0.0
        self._schedules = False
        # Empty unless the process knows the requests.
        self.counts: dict[str, int] = {}

    def begin_process(self) -> None:
        """Forget what another process had not finished."""
        self._newest, self._waiting, self._iterations, self._comm_s = None, [], {}, 0.0

    def add_iteration(self, step: Step) -> None:
        number, seconds = self._iterations.get(step.work_class, (0, 0.0))
        self._iterations[step.work_class] = number + 1, seconds + step.duration_s
        self._comm_s += step.phases_s.get("comm", 0.0)
        self._of(step.work_class).add(step.duration_s)

    def take_second(
        self, record: protocol.RecordHead, time: float, job: JobId, rank: int, counted: bool
    ) -> Iterator[Serve]:
        """Yield the second that a record ends, if it does."""
        second = claims.parse_serve(record.payload, time, job, rank)
        if second is None:
            return
        self._waiting.append(second)
        if record.flags & protocol.FLAG_CONTINUES:
            del self._waiting[:-MAX_PARTS]
            return
        parts, self._waiting = self._waiting, []
        merged = {name: _sum(getattr(part, name) for part in parts) for name in protocol.LATENCIES}
        second = msgspec.structs.replace(
            second, iterations=self._iterations, comm_s=self._comm_s, **merged
        )
        self._iterations, self._comm_s, self._newest = {}, 0.0, second
        self._schedules = claims.knows_requests(record.payload)
        if not counted:
            self._count(second)
        yield second

    def _count(self, second: Serve) -> None:
        self._idle_s += second.idle_s
        for name in COUNTS if self._schedules else ():
            self.counts[name] = self.counts.get(name, 0) + getattr(second, name)
        for name in protocol.LATENCIES:
            if buckets := getattr(second, name):
                histogram = self._of(name)
                for bucket, number in buckets.items():
                    histogram.counts[bucket] += number
                histogram.sum_s += getattr(second, f"{name}_s")

    def _of(self, name: str) -> StepDurations:
        found = self._histograms.get(name)
        if found is None:
            found = self._histograms[name] = StepDurations(bounds=LATENCY_BOUNDS_S)
        return found

    # --- what is known ---

    @property
    def is_idle(self) -> bool:
        second = self._newest
        return second is not None and second.idle_s >= second.interval_s > 0

    def state(self, said: claims.Claims, replica: str, live: bool) -> ServeState:
        second = self._newest if live else None
        now: dict[str, Any] = {}
        if second is not None:
            now = {
                "idle": self.is_idle,
                "running": second.running if self._schedules else None,
                "waiting": second.waiting if self._schedules else None,
                "kv_usage": second.kv_usage,
            }
        return ServeState(
            said.role,
            replica,
            said.server,
            said.note,
            **now,
            counts=dict(self.counts),
            idle_s=self._idle_s,
            iterations=self._shown(_CLASSES),
            latencies=self._shown(protocol.LATENCIES),
        )

    def _shown(self, names: tuple[str, ...]) -> Mapping[str, Histogram]:
        known = self._histograms
        return {name: known[name].histogram() for name in names if name in known}

    # --- what survives a restart ---

    def save(self) -> dict[str, Any]:
        """Return fields of SavedRank."""
        return {
            "serve_counts": dict(self.counts),
            "serve_idle_s": self._idle_s,
            "histograms": {
                name: SavedHistogram(tuple(one.counts), one.sum_s)
                for name, one in self._histograms.items()
            },
        }

    def restore(self, saved: SavedRank) -> None:
        """Continue from ``save``. Raises ValueError for other buckets."""
        self._idle_s = saved.serve_idle_s
        known = saved.serve_counts
        self.counts = {name: known[name] for name in COUNTS if name in known}
        self._histograms = {
            name: StepDurations(one.counts, one.sum_s, LATENCY_BOUNDS_S)
            for name, one in saved.histograms.items()
            if name in (*_CLASSES, *protocol.LATENCIES)
        }


def _sum(parts: Any) -> dict[int, int]:
    sums: dict[int, int] = {}
    for part in parts:
        for bucket, number in part.items():
            sums[bucket] = sums.get(bucket, 0) + number
    return sums


def replica_name(job: JobId, pod_name: str) -> str:
    """Return the short name of a replica: its pod's, else six digits of its run."""
    return pod_name or run_mark(job.run)[1:]
