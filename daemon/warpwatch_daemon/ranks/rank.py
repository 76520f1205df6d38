"""One rank, accumulated over the rings of its processes: a successor continues its counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from warpwatch import protocol
from warpwatch.protocol import Identity
from warpwatch_daemon.ranks import claims
from warpwatch_daemon.ranks.counts import PhaseNames, RankCounts, SavedRank, ServingProcess
from warpwatch_daemon.ranks.table import OpenRing, RingNews
from warpwatch_devices.memory_groups import CGROUP, PROC, oom_kills
from warpwatch_devices.processes import read_process
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, RankEvent, Record, Step
from warpwatch_telemetry.state import RankState, RecentSteps

# Where locks cannot be seen (another kernel), a heartbeat this old is a death.
FOREIGN_DEAD_AFTER_S = 30.0
CAPTURE_GRACE_S = 120.0
# After a restart these newest records are read again only for the detectors, which learn from them.
REWIND_RECORDS = 200
# Only the daemon may report these of a process.
RESERVED_EVENTS = frozenset(
    {
        "died", "stopped", "resumed", "process", "memory", "training", "finished", "compared",
        "records_lost",
    }
)  # fmt: skip
# The interval of the event ``training``, often enough for any time-out.
TRAINING_S = 2.0
# A server's front end reports within this time that it has ended its other processes.
SHUTDOWN_S = 3.0
# More calls without a step mean that none will come: the shim's last clock takes over earlier.
STEPLESS_CALLS = 96


class OomKills:
    """The kernel's counts of out-of-memory kills in the control groups of a process."""

    def __init__(self) -> None:
        self._counts: dict[Path, int] = {}

    def update(self, groups: Iterable[Path]) -> None:
        """Read the counts while the process lives. ``groups``: from its own group upwards."""
        self._counts = {group: kills for group in groups if (kills := oom_kills(group)) is not None}

    def have_risen(self) -> bool:
        """Return whether the count of the innermost group that is left rose since ``update``."""
        for group, before in self._counts.items():
            now = oom_kills(group)
            if now is not None:
                return now > before
        return False


def boot_id() -> bytes:
    """Return the kernel's boot id as 16 bytes; zeros if it cannot be read."""
    try:
        text = (PROC / "sys/kernel/random/boot_id").read_text()
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


STOPPED = "stopped"
HOLDS_GIL = "holds the GIL"
UNKNOWN = "unknown"

# The interval at which the reason of a silence is read again.
REASON_S = 1.0


class Silence:
    """The time since a process's last heartbeat, and why it has none. Times are monotonic.

    ``reason`` is None while the process is not reported as silent.
    """

    def __init__(self, at: float) -> None:
        self.reason: str | None = None
        self._heartbeat_at = at
        self._reason_at = at

    def heartbeat(self, at: float) -> None:
        self._heartbeat_at = at

    def duration_s(self, at: float) -> float:
        return at - self._heartbeat_at

    def find_reason(
        self, identity: Identity, at: float, holder_pid: int | None, owner_uid: int
    ) -> None:
        """Read the reason from the kernel, at most every REASON_S."""
        if self.reason is None or at - self._reason_at >= REASON_S:
            self.reason = silent_reason(identity, holder_pid, owner_uid)
            self._reason_at = at

    def end(self) -> bool:
        """Clear the reason. Return whether there was one."""
        was, self.reason = self.reason, None
        return was is not None


def silent_reason(
    identity: Identity,
    holder_pid: int | None,
    owner_uid: int,
    proc: Path = PROC,
    cgroup: Path = CGROUP,
) -> str:
    """Return STOPPED (a signal, a debugger or a frozen control group), HOLDS_GIL or UNKNOWN.

    The identity is the ring's claim and may name any process. The reason is UNKNOWN unless the
    process holds the ring's lock (``holder_pid``) and belongs to the ring's owner. If it runs but
    sends no heartbeat, one of its threads holds the GIL.
    """
    folder = proc / str(identity.pid)
    try:
        is_owners = holder_pid == identity.pid and folder.stat().st_uid == owner_uid
    except OSError:
        return UNKNOWN
    process = read_process(identity.pid, proc) if is_owners else None
    if process is None or process.start_ticks != identity.process_start:
        return UNKNOWN
    stopped = process.state in ("T", "t") or _is_frozen(folder, cgroup)
    return STOPPED if stopped else HOLDS_GIL


def _is_frozen(folder: Path, cgroup: Path) -> bool:
    """Return whether the process's control group is frozen, as by ``docker pause``."""
    try:
        lines = (folder / "cgroup").read_text().splitlines()
        path = next((line[3:] for line in lines if line.startswith("0::")), None)
        if path is None:
            return False
        return "frozen 1" in (cgroup / path.lstrip("/") / "cgroup.events").read_text()
    except (OSError, ValueError):
        return False


class RankProcess:
    """The process that holds a rank's ring, since ``at`` (monotonic)."""

    def __init__(self, ring: OpenRing, at: float) -> None:
        self.ring = ring
        self.memory = claims.AllocatorMemory()
        self.silence = Silence(at)
        self.oom_kills = OomKills()
        self.metadata_sequence = 0
        self.heartbeat_ns = 0
        # Calls that the hooks saw, and when a step or the event ``training`` came.
        self.calls: int | None = None
        self.trained_at = at
        self.seen_alive = self.end_reported = self.finished = False
        # When an earlier daemon saw it end; both use the same monotonic clock.
        self.ended_before: float | None = None
        self.capture_begun: float | None = None
        # PID and start time, if the kernel confirms that this very process holds the ring.
        self.confirmed: tuple[int, int] | None = None
        # The counts contain records up to ``counted``; ``rewound`` of them are read again.
        self.counted = self.rewound = 0

    def is_capturing(self, at: float) -> bool:
        return self.capture_begun is not None and at - self.capture_begun < CAPTURE_GRACE_S


class Rank:
    """One rank of a job. ``job_phases``: the phase names of all ranks of the job."""

    def __init__(
        self, job: JobId, ring: OpenRing, now: float, at: float, job_phases: set[str]
    ) -> None:
        self.job = job
        self.rank = ring.claims.rank
        self.claimed_job = ring.claims.job
        self.process = RankProcess(ring, at)
        # False once the ring of an ended process was closed to make room.
        self.has_ring = True
        self.status = "running"
        # Monotonic.
        self.ended_at: float | None = None
        self.first_time = ring.created_time
        self.seen_time = self._polled_time = now
        self.last_step_time: float | None = None
        self.counts = RankCounts()
        self.serving = ServingProcess()
        # The short name of a server's replica.
        self.replica = ""
        # Since when its process is gone without an exit record; whether it ends its job.
        self.gone_since: float | None = None
        self.shuts_down = False
        self.claims = ring.claims
        self.pid = 0
        self._known_process: tuple[int, bytes, int] | None = None
        self.step_begun: int | None = None
        self.recent = RecentSteps()
        self.phase_names = PhaseNames(job_phases)
        self.phases = self.phase_names.admit(ring.claims.phases)
        self._refused = 0

    def adopt(self, ring: OpenRing, at: float) -> None:
        """Continue with a successor of the process that is gone.

        A process that closes all descriptors looks gone, and makes a ring with all of its totals.
        """
        header = ring.reader.header()
        is_other = header.identity.process != self._known_process
        if is_other or header.totals.steps < self.counts.header.steps:
            self.counts.begin_process(self.phases)
        self.serving.begin_process()
        self.process = RankProcess(ring, at)
        self.has_ring = True
        self.claims = ring.claims
        self.phases = self.phase_names.admit(ring.claims.phases)
        self.status = "running"
        self.ended_at = self.gone_since = None
        self.shuts_down = False

    @property
    def ring(self) -> OpenRing:
        return self.process.ring

    @property
    def owner_uid(self) -> int:
        return self.ring.owner_uid

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
        """Yield what happened since the last call. Raises ProtocolError for a broken ring.

        ``limit``: the number of newest records to read; older ones count in totals only.
        """
        self._polled_time = now
        news = self.ring.reader.read(limit)
        self._take_header(news, at)
        lost = max(0, news.lost - self.process.rewound)
        self.counts.lost += lost
        self.process.rewound = 0
        for record in news.records:
            # A wrong clock never dates a record before the process or in the future.
            time = min(max(record.wall_ns / 1e9, self.ring.created_time), now)
            yield from self._take_record(record, time, at)
        if lost:
            totals = self.counts.totals(self.phases)
            detail = {name: getattr(totals, name) for name in ("steps", "samples", "tokens")}
            yield self.event(now, "records_lost", {"records": lost, **detail})
        yield from self._take_calls(news.header.calls, now, at)
        yield from self._judge_life(news, now, at, stopped_after_s, boot_id)

    def take_refused(self) -> int:
        """Return how many events were unreadable since the last call."""
        refused, self._refused = self._refused, 0
        return refused

    def _take_header(self, news: RingNews, at: float) -> None:
        header = news.header
        self.counts.header = header.totals
        self.step_begun = header.step_begun
        self.pid, self._known_process = header.identity.pid, header.identity.process
        if header.metadata_sequence != self.process.metadata_sequence:
            self.claims = claims.parse(header.metadata_text, self.ring.pod_uid)
            self.process.metadata_sequence = header.metadata_sequence
            self.phases = self.phase_names.admit(self.claims.phases)
        if header.heartbeat_ns != self.process.heartbeat_ns or news.records:
            self.process.heartbeat_ns = header.heartbeat_ns
            self.process.silence.heartbeat(at)

    def _take_record(self, record: protocol.RecordHead, time: float, at: float) -> Iterator[Record]:
        counted = record.sequence <= self.process.counted
        if record.type in (protocol.RECORD_STEP, protocol.RECORD_ITERATION):
            self.process.trained_at = at
            step = self._take_step(record, time, counted)
            # The iterations of a scheduler are those of its workers once more.
            if self.computes:
                yield step
        elif record.type == protocol.RECORD_SERVE:
            yield from self.serving.take_second(record, time, self.job, self.rank, counted)
        elif record.type == protocol.RECORD_EVENT and not counted:
            yield from self._take_event(record.payload, time, at)
        elif record.type == protocol.RECORD_PHASE and not counted:
            # Steps can name a phase before the metadata does.
            phases = claims.with_phase(self.phases, record.payload)
            self.phases = self.phase_names.admit(phases)
        elif record.type == protocol.RECORD_GC:
            self.counts.put(claims.parse_gc(record.payload))
        elif record.type == protocol.RECORD_MEMORY:
            yield from self._take_memory(record.payload, time, counted)

    def _take_memory(self, payload: bytes, time: float, counted: bool) -> Iterator[Record]:
        memory = claims.parse_memory(payload)
        if memory is not None:
            self.process.memory, counts = memory
            self.counts.put(counts)
            if not counted:
                detail = claims.memory_detail(self.process.memory, counts)
                yield self.event(time, "memory", detail)

    def _take_calls(self, calls: int, now: float, at: float) -> Iterator[RankEvent]:
        before, self.process.calls = self.process.calls, calls
        if before is not None and calls > before and at - self.process.trained_at >= TRAINING_S:
            self.process.trained_at = at
            yield self.event(now, "training", {"calls": calls})

    def _take_step(self, record: protocol.RecordHead, time: float, counted: bool) -> Step:
        step = claims.parse_step(record, time, self.job, self.rank, self.phases)
        self.recent.add(step)
        self.last_step_time = max(time, self.last_step_time or 0.0)
        if not counted:
            self.counts.durations.add(step.duration_s)
            if step.work_class:
                self.serving.add_iteration(step)
        if step.memory_allocated_bytes is not None:
            self.process.memory = self.process.memory._replace(
                allocated=step.memory_allocated_bytes
            )
        return step

    def _take_event(self, payload: bytes, time: float, at: float) -> Iterator[Record]:
        try:
            fields = claims.parse_event(payload)
        except protocol.ProtocolError:
            self._refused += 1
            return
        name = str(fields.pop("event"))
        if name == "capture_started":
            self.process.capture_begun = at
        elif name in ("capture_finished", "capture_failed", "capture_disarmed"):
            self.process.capture_begun = None
        if name == "shutdown":
            self.shuts_down = True
            return
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
        silent_s = self.process.silence.duration_s(at)
        identity = news.header.identity
        foreign = identity.boot_id != boot_id
        alive = silent_s < FOREIGN_DEAD_AFTER_S if foreign else news.holder_pid is not None
        if not alive:
            if self.serves and not news.header.ended:
                self.gone_since = at if self.gone_since is None else self.gone_since
            else:
                yield self._ended(news.header.ended, now, at)
            return
        self.process.seen_alive = True
        if news.header.ended and not self.process.finished:
            yield self.event(now, "finished", {})
        self.process.finished = news.header.ended
        confirmed = not foreign and news.holder_pid == identity.pid
        self.process.confirmed = (identity.pid, identity.process_start) if confirmed else None
        # Profiler and export hold the GIL: a missing heartbeat does not mean a stop.
        if silent_s < stopped_after_s or self.process.is_capturing(at):
            if self.process.silence.end():
                self.status = "running"
                yield self.event(now, "resumed", {})
            return
        is_known = self.process.silence.reason is not None
        holder_pid = None if foreign else news.holder_pid
        self.process.silence.find_reason(identity, at, holder_pid, self.owner_uid)
        if not is_known:
            self.status = "stopped"
            detail = {"silent_reason": self.process.silence.reason}
            yield self.event(now, "stopped", detail)

    def settle(self, in_order: bool, now: float, at: float) -> Iterator[Record]:
        """Yield the end of a server's process that is gone, once it is known how it ended.

        ``in_order``: whether a process of its job has reported that it ends the others.
        """
        since = self.gone_since
        if self.live and since is not None and (in_order or at - since >= SHUTDOWN_S):
            yield self._ended(in_order, now, at)

    def _ended(self, in_order: bool, now: float, at: float) -> Record:
        self.ended_at = (
            at if self.process.ended_before is None else min(at, self.process.ended_before)
        )
        self.status = "exited" if in_order else "died"
        self.process.silence.end()
        self.process.memory = claims.AllocatorMemory()
        if not self.process.seen_alive:
            # It ended while no daemon ran, before its successor came.
            now = min(now, max(self.last_step_time or 0.0, self.ring.created_time))
        if in_order or self.process.end_reported:
            return End(now, rank=self.rank, **self.job.fields())
        detail = {"oom_kill": True} if self.process.oom_kills.have_risen() else {}
        return self.event(now, "died", detail)

    # --- what is known ---

    @property
    def calls_without_step(self) -> int:
        """Backwards and optimizer steps in which the end of no step was seen; 0: not so many."""
        calls = self.process.calls or 0
        return calls if calls >= STEPLESS_CALLS and not self.counts.header.steps else 0

    def state(self) -> RankState:
        memory = self.process.memory._asdict()
        return RankState(
            rank=self.rank,
            name=str(self.rank),
            **self.job.fields(),
            pid=self.pid,
            **self.claims.shown(),
            calls_without_step=self.calls_without_step,
            status=self.status,
            silent_reason=self.process.silence.reason,
            first_time=self.first_time,
            seen_time=self.seen_time,
            last_step_time=self.last_step_time,
            step=self.counts.header.newest_step,
            step_begun=self.step_begun,
            **self.counts.shown(self.phases),
            recent_s=tuple(self.recent),
            **(self.recent.pace(self._polled_time) if self.status == "running" else {}),
            **{f"memory_{name}_bytes": size for name, size in memory.items()},
            serve=self.serving.state(self.claims, self.replica, self.status == "running")
            if self.serves
            else None,
        )

    @property
    def serves(self) -> bool:
        return self.claims.kind == "serve"

    @property
    def computes(self) -> bool:
        """Whether it has steps or iterations: not a server's scheduler or front end."""
        return self.claims.role == "rank"

    @property
    def is_idle(self) -> bool:
        """Whether it is a server's process that had no request in flight for a second."""
        return self.serves and self.serving.is_idle

    # --- what survives a restart ---

    def save(self) -> SavedRank:
        counts = msgspec.structs.asdict(self.counts.save())
        return SavedRank(
            **counts,
            **self.job.fields(),
            pod=self.ring.pod_uid,
            ring=self.ring.name,
            position=self.ring.reader.position,
            ended=not self.live,
            ended_at=self.ended_at,
            first_time=self.first_time,
            **(self.serving.save() if self.serves else {}),
        )

    def restore(self, saved: SavedRank) -> None:
        """Continue from ``save``. Raises ValueError for counts of another form."""
        # Names from before the restart stay, even if this process has other phases.
        names = PhaseNames(self.phase_names.of_job)
        self.counts.restore(saved, names)
        self.serving.restore(saved)
        self.phase_names, self.phases = names, names.admit(self.claims.phases)
        process, reader = self.process, self.ring.reader
        self.first_time, process.counted = saved.first_time, saved.position
        process.ended_before, process.end_reported = saved.ended_at, saved.ended
        reader.position = max(0, saved.position - REWIND_RECORDS)
        process.rewound = saved.position - reader.position
