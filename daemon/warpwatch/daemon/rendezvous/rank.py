"""One rank, accumulated over the rings of its processes: a successor continues its counters."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from typing import Any

from warpwatch.client import protocol
from warpwatch.daemon.rendezvous import claims
from warpwatch.daemon.rendezvous.ring import RingNews
from warpwatch.daemon.rendezvous.table import OpenRing
from warpwatch.telemetry.records import End, RankEvent, Record, Step
from warpwatch.telemetry.state import STEP_DURATION_BOUNDS_S, Histogram, RankState

RECENT_STEPS = 120
# Where locks cannot be seen (another kernel) a heartbeat that stands still this long is a death.
FOREIGN_DEAD_AFTER_S = 30.0
CAPTURE_GRACE_S = 120.0
# After a restart the newest records are read again, for the detectors alone: they learn from them
# what a step takes and when the last one was.
REWIND_RECORDS = 200
# What the daemon alone may say of a process.
RESERVED_EVENTS = frozenset({"died", "stopped", "resumed"})

_NO_TOTALS = protocol.Totals(0, 0, None, 0, 0, 0, ())


class Rank:
    """``job`` is the label: the claimed name, with ``#2`` where another job has it already."""

    def __init__(self, job: str, ring: OpenRing, at: float) -> None:
        self.job = job
        self.rank = ring.claims.rank
        self.owner_uid = ring.owner_uid
        self.ring: OpenRing | None = None
        self.status = "running"
        # Monotonic.
        self.ended_at: float | None = None
        self.first_time = ring.created_time
        self.last_step_time: float | None = None
        self.lost = 0
        self.claims = ring.claims
        self.pid = 0
        self.step_begun: int | None = None
        self.recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self.bucket_counts = [0] * (len(STEP_DURATION_BOUNDS_S) + 1)
        self.bucket_sum_s = 0.0
        self.memory: tuple[int | None, int | None] = (None, None)
        # What the processes before this one counted: steps, samples, tokens, seconds per phase.
        self.base: dict[str, Any] = {"steps": 0, "samples": 0, "tokens": 0, "phases_s": {}}
        self._totals = _NO_TOTALS
        self._metadata_sequence = 0
        self._heartbeat = (0, 0.0)
        self._stopped = False
        self._capture_begun: float | None = None
        # Records up to this one are in the counts already; so many of them are read again.
        self._counted = self._rewound = 0
        self._seen_alive = self._end_told = False
        self._refused = 0
        self.adopt(ring, at)

    # --- whose ring it is ---

    def adopt(self, ring: OpenRing, at: float) -> None:
        """A process of this rank: the first, or the successor of one that is gone."""
        if self.ring is not None:
            self.base = self.totals()
        self.ring = ring
        self.claims = ring.claims
        self._totals = _NO_TOTALS
        self._metadata_sequence = 0
        self.phases = list(ring.claims.phases)
        self._heartbeat = (0, at)
        self._stopped = self._seen_alive = self._end_told = False
        self._capture_begun = None
        self._counted = self._rewound = 0
        self.status = "running"
        self.ended_at = None

    @property
    def live(self) -> bool:
        return self.ended_at is None

    # --- reading ---

    def update(
        self, now: float, at: float, stopped_after_s: float, boot_id: bytes
    ) -> Iterator[Record]:
        """Read what is new and say what happened. Raises ProtocolError for a broken ring."""
        assert self.ring is not None
        news = self.ring.reader.read()
        self._take_header(news, at)
        self.lost += max(0, news.lost - self._rewound)
        self._rewound = 0
        for record in news.records:
            # A clock that was set, or a lie: never before the process, never in the future.
            time = min(max(record.wall_ns / 1e9, self.ring.created_time), now)
            yield from self._take_record(record, time, at)
        yield from self._judge_life(news, now, at, stopped_after_s, boot_id)

    def take_refused(self) -> int:
        """How many events were unreadable since the last call."""
        refused, self._refused = self._refused, 0
        return refused

    def _take_header(self, news: RingNews, at: float) -> None:
        header = news.header
        self._totals = header.totals
        self.step_begun = header.step_begun
        self.pid = header.identity.pid
        if header.metadata_sequence != self._metadata_sequence:
            self.claims = claims.parse(header.metadata_text)
            self._metadata_sequence = header.metadata_sequence
            self.phases = list(self.claims.phases)
        if header.heartbeat_ns != self._heartbeat[0]:
            self._heartbeat = (header.heartbeat_ns, at)

    def _take_record(self, record: protocol.RecordHead, time: float, at: float) -> Iterator[Record]:
        counted = record.sequence <= self._counted
        if record.type == protocol.RECORD_STEP:
            yield self._take_step(record.payload, time, counted)
        elif counted:
            return
        elif record.type == protocol.RECORD_EVENT:
            yield from self._take_event(record.payload, time, at)
        elif record.type == protocol.RECORD_PHASE:
            # Steps can name a phase before the metadata does.
            self.phases = claims.with_phase(self.phases, record.payload)
        elif record.type == protocol.RECORD_MEMORY and len(record.payload) >= protocol.MEMORY.size:
            allocated, reserved, *_ = protocol.MEMORY.unpack_from(record.payload)
            self.memory = (_known(allocated), _known(reserved))

    def _take_step(self, payload: bytes, time: float, counted: bool) -> Step:
        if len(payload) < protocol.STEP.size:
            raise protocol.ProtocolError("bad_record", "a step record is too short")
        number, ns, gpu_ns, memory, samples, tokens = protocol.STEP.unpack_from(payload)
        if ns > claims.MAX_DURATION_S * 1e9:
            raise protocol.ProtocolError("bad_record", f"a step of {ns} ns")
        duration_s = ns / 1e9
        self.recent.append(duration_s)
        self.last_step_time = max(time, self.last_step_time or 0.0)
        if not counted:
            self.bucket_counts[bisect.bisect_left(STEP_DURATION_BOUNDS_S, duration_s)] += 1
            self.bucket_sum_s += duration_s
        allocated = _known(memory)
        if allocated is not None:
            self.memory = (allocated, self.memory[1])
        return Step(
            time,
            self.job,
            self.rank,
            number,
            duration_s,
            gpu_s=None if gpu_ns == protocol.ABSENT else gpu_ns / 1e9,
            phases_s=self._phases(payload),
            memory_allocated_bytes=allocated,
            samples=samples,
            tokens=tokens,
        )

    def _phases(self, payload: bytes) -> dict[str, float]:
        raw = payload[protocol.STEP.size :]
        words = memoryview(raw[: len(raw) // 8 * 8]).cast("Q")
        return {
            name: ns / 1e9
            for name, ns in zip(self.phases, words, strict=False)
            if 0 < ns <= claims.MAX_DURATION_S * 1e9
        }

    def _take_event(self, payload: bytes, time: float, at: float) -> Iterator[Record]:
        try:
            fields = claims.parse_event(payload)
        except protocol.ProtocolError:
            self._refused += 1
            return
        name = str(fields.pop("event"))
        if name == "capture_started":
            self._capture_begun = at
        elif name in ("capture_finished", "capture_failed", "capture_disarmed"):
            self._capture_begun = None
        if name in RESERVED_EVENTS:
            self._refused += 1
        elif name != "exit":
            yield RankEvent(time, self.job, self.rank, name, fields)

    # --- life and death ---

    def _judge_life(
        self, news: RingNews, now: float, at: float, stopped_after_s: float, boot_id: bytes
    ) -> Iterator[Record]:
        silent_s = at - self._heartbeat[1]
        foreign = news.header.identity.boot_id != boot_id
        alive = silent_s < FOREIGN_DEAD_AFTER_S if foreign else news.alive
        if not alive:
            yield self._ended(news.header.ended, now, at)
            return
        self._seen_alive = True
        # Profiler and export hold the GIL: no heartbeat then is no sign of a stop.
        begun = self._capture_begun
        capturing = begun is not None and at - begun < CAPTURE_GRACE_S
        stopped = silent_s >= stopped_after_s and not capturing
        if stopped != self._stopped:
            self._stopped = stopped
            self.status = "stopped" if stopped else "running"
            yield RankEvent(now, self.job, self.rank, "stopped" if stopped else "resumed")

    def _ended(self, in_order: bool, now: float, at: float) -> Record:
        self.ended_at = at
        self.status = "exited" if in_order else "died"
        if not self._seen_alive and self.ring is not None:
            # It ended while no daemon looked: before its successor came, whenever that was.
            now = min(now, max(self.last_step_time or 0.0, self.ring.created_time))
        if in_order or self._end_told:
            return End(now, self.job, self.rank)
        return RankEvent(now, self.job, self.rank, "died")

    # --- what is known ---

    def totals(self) -> dict[str, Any]:
        """Counts of this rank over all its processes."""
        phases = dict(self.base["phases_s"])
        for name, ns in zip(self.phases, self._totals.phases_ns, strict=False):
            phases[name] = phases.get(name, 0.0) + ns / 1e9
        return {
            "steps": self.base["steps"] + self._totals.steps,
            "samples": self.base["samples"] + self._totals.samples,
            "tokens": self.base["tokens"] + self._totals.tokens,
            "phases_s": phases,
        }

    def state(self) -> RankState:
        totals = self.totals()
        return RankState(
            job=self.job,
            rank=self.rank,
            name=str(self.rank),
            owner_uid=self.owner_uid,
            pid=self.pid,
            host=self.claims.host,
            local_rank=self.claims.local_rank,
            world_size=self.claims.world_size,
            device=self.claims.device,
            pod_uid=self.claims.pod_uid,
            framework=self.claims.framework,
            status=self.status,
            first_time=self.first_time,
            last_step_time=self.last_step_time,
            step=self._totals.newest_step,
            step_begun=self.step_begun,
            steps_total=totals["steps"],
            samples_total=totals["samples"],
            tokens_total=totals["tokens"],
            lost_records=self.lost,
            phases_s=totals["phases_s"],
            durations=Histogram(tuple(self.bucket_counts), self.bucket_sum_s),
            recent_s=tuple(self.recent),
            memory_allocated_bytes=self.memory[0],
            memory_reserved_bytes=self.memory[1],
        )

    # --- what survives a restart ---

    def save(self) -> dict[str, Any]:
        assert self.ring is not None
        return {
            "ring": self.ring.name,
            "position": self.ring.reader.position,
            "job": self.job,
            "base": self.base,
            "lost": self.lost,
            "ended": not self.live,
            "first_time": self.first_time,
            "counts": self.bucket_counts,
            "sum_s": self.bucket_sum_s,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from ``save``'s answer. Raises KeyError, TypeError or ValueError on nonsense."""
        counts = [int(count) for count in saved["counts"]]
        if len(counts) != len(self.bucket_counts) or self.ring is None:
            raise ValueError("saved with other buckets")
        base = saved["base"]
        self.base = {key: base[key] for key in ("steps", "samples", "tokens", "phases_s")}
        self.bucket_counts = counts
        self.bucket_sum_s = float(saved["sum_s"])
        self.lost = int(saved["lost"])
        self.first_time = float(saved["first_time"])
        self._counted = int(saved["position"])
        self._end_told = bool(saved["ended"])
        self.ring.reader.position = max(0, self._counted - REWIND_RECORDS)
        self._rewound = self._counted - self.ring.reader.position


def _known(value: int) -> int | None:
    return None if value == protocol.ABSENT else value
