"""One rank, accumulated over the rings of its processes: a successor continues its counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from warpwatch import protocol
from warpwatch_daemon.ranks import claims, payloads
from warpwatch_daemon.ranks.counts import PhaseNames, RankCounts
from warpwatch_daemon.ranks.process import OomKills, Silence
from warpwatch_daemon.ranks.ring import RingNews
from warpwatch_daemon.ranks.table import OpenRing
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.recent_steps import RecentSteps
from warpwatch_telemetry.records import End, RankEvent, Record, Step
from warpwatch_telemetry.state import RankState

# Where locks cannot be seen (another kernel) a heartbeat that stands still this long is a death.
FOREIGN_DEAD_AFTER_S = 30.0
CAPTURE_GRACE_S = 120.0
# After a restart the newest records are read again, for the detectors alone: they learn from them
# what a step takes and when the last one was.
REWIND_RECORDS = 200
# What the daemon alone may say of a process.
RESERVED_EVENTS = frozenset(
    {"died", "stopped", "resumed", "process", "memory", "training", "finished", "compared"}
)
# That a rank trains without a step is said once in so long: often enough for any time-out.
TRAINING_S = 2.0
# Calls without a step that are no first step yet: the shim's last clock takes over before.
STEPLESS_CALLS = 96


class Rank:
    """``job_phases``: the names of phases of all ranks of the job."""

    def __init__(
        self, job: JobId, ring: OpenRing, now: float, at: float, job_phases: set[str]
    ) -> None:
        self.job = job
        self.rank = ring.claims.rank
        self.claimed_job = ring.claims.job
        self.ring: OpenRing | None = None
        self.status = "running"
        # Monotonic.
        self.ended_at: float | None = None
        self.first_time = ring.created_time
        self.seen_time = now
        self.last_step_time: float | None = None
        self.counts = RankCounts()
        self.claims = ring.claims
        self.pid = 0
        self.step_begun: int | None = None
        self.recent = RecentSteps()
        self.phase_names = PhaseNames(job_phases)
        self.phases: list[str] = []
        self._refused = 0
        self.adopt(ring, at)

    # --- whose ring it is ---

    def adopt(self, ring: OpenRing, at: float) -> None:
        """A process of this rank: the first, or the successor of one that is gone."""
        if self.pid:
            self.counts.begin_process(self.phases)
        self.ring = ring
        self.owner_uid = ring.owner_uid
        self.claims = ring.claims
        self.phases = self.phase_names.admit(ring.claims.phases)
        self.memory = payloads.AllocatorMemory()
        self._metadata_sequence = 0
        self._heartbeat_ns = 0
        # Calls that the hooks saw, and when (monotonic) a step or the event said that it trains.
        self._calls: int | None = None
        self._trained_at = at
        self.silence = Silence(at)
        self._seen_alive = self._end_reported = self._finished = False
        # When the daemon before this one saw it end; monotonic time is the same for both.
        self._ended_before: float | None = None
        self._capture_begun: float | None = None
        # PID and start time where the kernel confirms that this very process holds the ring.
        self.seen_process: tuple[int, int] | None = None
        self.oom_kills = OomKills()
        # Records up to this one are in the counts already; so many of them are read again.
        self._counted = self._rewound = 0
        self.status = "running"
        self.ended_at = None

    @property
    def live(self) -> bool:
        return self.ended_at is None

    @property
    def world_size(self) -> int:
        return self.claims.world_size

    @property
    def device(self) -> str | None:
        return self.claims.device

    # --- reading ---

    def update(
        self, now: float, at: float, limit: int, stopped_after_s: float, boot_id: bytes
    ) -> Iterator[Record]:
        """Read what is new and say what happened. Raises ProtocolError for a broken ring.

        ``limit``: how many records may be read; of the older ones only the totals are known.
        """
        assert self.ring is not None
        news = self.ring.reader.read(limit)
        self._take_header(news, at)
        self.counts.lost += max(0, news.lost - self._rewound)
        self._rewound = 0
        for record in news.records:
            # A clock that was set, or a lie: never before the process, never in the future.
            time = min(max(record.wall_ns / 1e9, self.ring.created_time), now)
            yield from self._take_record(record, time, at)
        yield from self._take_calls(news.header.calls, now, at)
        yield from self._judge_life(news, now, at, stopped_after_s, boot_id)

    def take_refused(self) -> int:
        """How many events were unreadable since the last call."""
        refused, self._refused = self._refused, 0
        return refused

    def _take_header(self, news: RingNews, at: float) -> None:
        assert self.ring is not None
        header = news.header
        self.counts.header = header.totals
        self.step_begun = header.step_begun
        self.pid = header.identity.pid
        if header.metadata_sequence != self._metadata_sequence:
            self.claims = claims.parse(header.metadata_text, self.ring.pod_uid)
            self._metadata_sequence = header.metadata_sequence
            self.phases = self.phase_names.admit(self.claims.phases)
        if header.heartbeat_ns != self._heartbeat_ns or news.records:
            self._heartbeat_ns = header.heartbeat_ns
            self.silence.sign(at)

    def _take_record(self, record: protocol.RecordHead, time: float, at: float) -> Iterator[Record]:
        counted = record.sequence <= self._counted
        if record.type == protocol.RECORD_STEP:
            self._trained_at = at
            yield self._take_step(record, time, counted)
        elif record.type == protocol.RECORD_EVENT and not counted:
            yield from self._take_event(record.payload, time, at)
        elif record.type == protocol.RECORD_PHASE and not counted:
            # Steps can name a phase before the metadata does.
            phases = claims.with_phase(self.phases, record.payload)
            self.phases = self.phase_names.admit(phases)
        elif record.type == protocol.RECORD_GC:
            self.counts.take(payloads.gc(record.payload))
        elif record.type == protocol.RECORD_MEMORY:
            memory = payloads.memory(record.payload)
            if memory is not None:
                self.memory, counts = memory
                self.counts.take(counts)
                if not counted:
                    detail = payloads.memory_detail(self.memory, counts)
                    yield self.event(time, "memory", detail)

    def _take_calls(self, calls: int, now: float, at: float) -> Iterator[RankEvent]:
        before, self._calls = self._calls, calls
        if before is not None and calls > before and at - self._trained_at >= TRAINING_S:
            self._trained_at = at
            yield self.event(now, "training", {"calls": calls})

    def _take_step(self, record: protocol.RecordHead, time: float, counted: bool) -> Step:
        step = payloads.step(record, time, self.job, self.rank, self.phases)
        self.recent.add(step)
        self.last_step_time = max(time, self.last_step_time or 0.0)
        if not counted:
            self.counts.durations.add(step.duration_s)
        if step.memory_allocated_bytes is not None:
            self.memory = self.memory._replace(allocated=step.memory_allocated_bytes)
        return step

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
        if name in RESERVED_EVENTS or (name == "gc_pause" and not claims.is_gc_pause(fields)):
            self._refused += 1
        elif name != "exit":
            yield self.event(time, name, fields)

    def event(self, time: float, name: str, detail: Mapping[str, Any]) -> RankEvent:
        return RankEvent(time, rank=self.rank, event=name, detail=detail, **self.job.fields())

    # --- life and death ---

    def _judge_life(
        self, news: RingNews, now: float, at: float, stopped_after_s: float, boot_id: bytes
    ) -> Iterator[Record]:
        silent_s = self.silence.lasts_s(at)
        identity = news.header.identity
        foreign = identity.boot_id != boot_id
        alive = silent_s < FOREIGN_DEAD_AFTER_S if foreign else news.holder_pid is not None
        if not alive:
            yield self._ended(news.header.ended, now, at)
            return
        self._seen_alive = True
        if news.header.ended and not self._finished:
            yield self.event(now, "finished", {})
        self._finished = news.header.ended
        confirmed = not foreign and news.holder_pid == identity.pid
        self.seen_process = (identity.pid, identity.process_start) if confirmed else None
        # Profiler and export hold the GIL: no heartbeat then is no sign of a stop.
        begun = self._capture_begun
        capturing = begun is not None and at - begun < CAPTURE_GRACE_S
        if silent_s < stopped_after_s or capturing:
            if self.silence.over():
                self.status = "running"
                yield self.event(now, "resumed", {})
            return
        is_known = self.silence.reason is not None
        holder_pid = None if foreign else news.holder_pid
        self.silence.look(identity, at, holder_pid, self.owner_uid)
        if not is_known:
            self.status = "stopped"
            detail = {"silent_reason": self.silence.reason}
            yield self.event(now, "stopped", detail)

    def _ended(self, in_order: bool, now: float, at: float) -> Record:
        self.ended_at = at if self._ended_before is None else min(at, self._ended_before)
        self.status = "exited" if in_order else "died"
        self.silence.over()
        self.memory = payloads.AllocatorMemory()
        if not self._seen_alive and self.ring is not None:
            # It ended while no daemon looked: before its successor came, whenever that was.
            now = min(now, max(self.last_step_time or 0.0, self.ring.created_time))
        if in_order or self._end_reported:
            return End(now, rank=self.rank, **self.job.fields())
        detail = {"oom_kill": True} if self.oom_kills.risen() else {}
        return self.event(now, "died", detail)

    # --- what is known ---

    @property
    def calls_without_step(self) -> int:
        """Backwards and optimizer steps in which the end of no step was seen; 0: not so many."""
        calls = self._calls or 0
        return calls if calls >= STEPLESS_CALLS and not self.counts.header.steps else 0

    def state(self) -> RankState:
        return RankState(
            rank=self.rank,
            name=str(self.rank),
            **self.job.fields(),
            pid=self.pid,
            **self.claims.shown(),
            calls_without_step=self.calls_without_step,
            status=self.status,
            silent_reason=self.silence.reason,
            first_time=self.first_time,
            seen_time=self.seen_time,
            last_step_time=self.last_step_time,
            step=self.counts.header.newest_step,
            step_begun=self.step_begun,
            **self.counts.shown(self.phases),
            recent_s=tuple(self.recent),
            **(self.recent.pace() if self.status == "running" else {}),
            **{f"memory_{name}_bytes": size for name, size in self.memory._asdict().items()},
        )

    # --- what survives a restart ---

    def save(self) -> dict[str, Any]:
        assert self.ring is not None
        return {
            "pod": self.ring.pod_uid,
            "ring": self.ring.name,
            "position": self.ring.reader.position,
            **self.job.fields(),
            "ended": not self.live,
            "ended_at": self.ended_at,
            "first_time": self.first_time,
            **self.counts.save(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from ``save``'s answer. Raises KeyError, TypeError or ValueError on nonsense."""
        assert self.ring is not None
        first_time, counted = float(saved["first_time"]), int(saved["position"])
        ended_at = saved["ended_at"]
        self._ended_before = None if ended_at is None else float(ended_at)
        # Names that were shown before the restart stay, whatever this process calls its phases.
        names = PhaseNames(self.phase_names.of_job)
        self.counts.restore(saved, names)
        self.phase_names, self.phases = names, names.admit(self.claims.phases)
        self.first_time, self._counted = first_time, counted
        self._end_reported = bool(saved["ended"])
        self.ring.reader.position = max(0, self._counted - REWIND_RECORDS)
        self._rewound = self._counted - self.ring.reader.position
