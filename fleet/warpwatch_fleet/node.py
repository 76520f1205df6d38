"""One agent's state: its lines, validated and bounded, in the fleet's time."""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from warpwatch._version import __version__
from warpwatch_fleet.agent_link import AgentError
from warpwatch_fleet.runs import RunPart
from warpwatch_fleet.targets import Target
from warpwatch_telemetry.anomalies import KINDS, Anomaly
from warpwatch_telemetry.bus_messages import partition_of
from warpwatch_telemetry.captures import CAPTURE_ID, Capture
from warpwatch_telemetry.jobs import SCHEMA, JobId, RunSummary
from warpwatch_telemetry.newest import put_newest
from warpwatch_telemetry.records import (
    Clock,
    DeviceReading,
    JobRecord,
    PortReading,
    RankSeen,
    Record,
)
from warpwatch_telemetry.samples import NOT_ASKED, Device, DeviceSample, SourceHealth
from warpwatch_telemetry.stream import (
    AnomalyLine,
    CaptureLine,
    CursorLine,
    GapLine,
    RunLine,
    StreamLine,
    decode_stream_line,
    has_newer_fields,
)

# A node's clock is corrected by what it is ahead or behind; less than this is the network's.
LEAST_SKEW_S = 0.5
# Worth a word to a person.
TOLD_SKEW_S = TOLD_LAG_S = 5.0
# How long all ranks, and all active anomalies, are awaited after a restart: of the fleet, or of an
# agent.
REPORTS_AWAITED_S = 30.0
# Limits per agent: as many rings as its own limit, as many anomalies as it keeps.
MAX_RANKS = 1024
MAX_ANOMALIES = 1000
# Lines that come before the agent has reported its time: as much as it keeps for a new reader.
MAX_EARLY_BYTES = 32 * 2**20
# The longest line of a step, rank or event.
MAX_RECORD_BYTES = 4096
MAX_TEXT = 500
# The longest anomaly, and the longest summary of a run.
MAX_ANOMALY_BYTES = MAX_RUN_BYTES = 64 << 10
# Year 5138: what a calendar can show.
MAX_TIME = 1e11
MAX_SENTENCES = 16
# The newest that are shown; of their diagnosis only what fits a line.
MAX_CAPTURES = 20
MAX_RUNS = 20
MAX_DEVICES = 128
# The series that are kept of a device.
MAX_SERIES = 64
_OF_DEVICE = frozenset(
    f"device_{name}"
    for name in (
        "utilization_ratio",
        "graphics_active_ratio",
        "temperature_celsius",
        "temperature_threshold_celsius",
        "throttle_active",
        "power_watts",
        "power_limit_watts",
        "xid_last_timestamp_seconds",
    )
)
_OF_DIAGNOSIS = ("verdict", "summary")
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._#-]{0,199}(?<!\.html)")


class Node:
    """One agent's node. Call ``feed`` with every line in order.

    name: the agent's name for its node, its address until then. up, reason: whether the agent can
    be followed, and why not. clock: until this time, in the fleet's clock, all is reported.
    refused: untrusted lines by reason; newer: lines of types or with fields of newer versions.
    """

    def __init__(self, target: Target, names: NodeNames | None = None) -> None:
        self.target = target
        self._names = names or NodeNames()
        self.name = target.node if target.owner is None and target.node else target.address
        self.cursor: str | None = None
        self.up = False
        self.reason = NOT_ASKED
        self.clock = float("-inf")
        self.lost = 0
        self.refused: Counter[str] = Counter()
        self.newer = 0
        # The agent's version, as it claims.
        self.version = ""
        self._is_newer = False
        self._anomalies: dict[str, Anomaly] = {}
        # As its agent says them, by id, the one that has changed last at the end.
        self.captures: dict[str, Capture] = {}
        # The newest of each device by UUID, in the fleet's time; their source is the node.
        self.samples: dict[str, DeviceSample] = {}
        # As JSON; by its own name, and what the fleet calls those that it has joined.
        self._runs: dict[JobId, bytes] = {}
        self._joined: dict[JobId, JobId] = {}
        # Lines that come before the agent's name, which decides whether they are trusted, and time.
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        # A tenant's agent is called by its address: it may have no name of a node.
        self._is_named = target.owner is not None or target.node is not None
        self._skew_s: float | None = None
        self._ranks: set[tuple[object, ...]] = set()
        # The ranks and anomalies that are to be reported again since ``gap_at``, wall clock.
        self.unreported: set[tuple[object, ...]] = set()
        self._unreported_anomalies: set[str] = set()
        self._unreported_devices: set[str] = set()
        self.gap_at = float("-inf")
        # Wall clock of its first line.
        self._since: float | None = None

    @property
    def skew_s(self) -> float:
        """By how much its clock is behind the fleet's."""
        return self._skew_s or 0.0

    def begin(self) -> None:
        """Start a new connection, on which the agent tells its name anew."""
        self._waiting, self._waiting_bytes = deque(), 0
        self._is_named = self.target.owner is not None

    def feed(self, line: bytes, now: float) -> list[JobRecord]:
        """Return the records that the line completes, in the fleet's time. ``now``: wall clock.

        Lines wait for the first that name the agent and report its time. Raises AgentError for a
        name that it may not have.
        """
        self._since = self._since or now
        decoded = self._decoded(line)
        if isinstance(decoded, CursorLine) and not self._is_named:
            self._names.claim(decoded.node, self)
            self._is_named, self.name = True, decoded.node
        elif isinstance(decoded, Clock) and _is_time(decoded.time):
            skew_s = now - decoded.time
            if self._skew_s is None or abs(skew_s - self._skew_s) > LEAST_SKEW_S:
                self._skew_s = skew_s
        is_ready = self._is_named and self._skew_s is not None
        if is_ready and not self._waiting:
            record = self._apply(decoded, len(line), now)
            return [] if record is None else [record]
        if decoded is not None:
            self._wait(line)
        records = []
        while is_ready and self._waiting:
            # The agent's version, which decides what is new to us, may be in a line before.
            one = self._waiting.popleft()
            records.append(self._apply(self._decoded(one), len(one), now))
        return [record for record in records if record is not None]

    def _wait(self, line: bytes) -> None:
        self._waiting_bytes += len(line)
        self._waiting.append(line)
        while self._waiting_bytes > MAX_EARLY_BYTES:
            self._waiting_bytes -= len(self._waiting.popleft())
            self.lost += 1

    def _decoded(self, line: bytes) -> Record | StreamLine | None:
        """Return what the line says, or None, counted, for one that is not to be used."""
        try:
            decoded = decode_stream_line(line)
        except Exception:
            # A bad line is dropped alone.
            self.refused["unreadable"] += 1
            return None
        # Lines of other agents are read once.
        if decoded is None or (self._is_newer and has_newer_fields(line)):
            self.newer += 1
        return decoded

    def _apply(
        self, decoded: Record | StreamLine | None, size: int, now: float
    ) -> JobRecord | None:
        """Keep what the line says of the node, or return its record of a job if it is valid."""
        # Most lines are steps.
        if isinstance(decoded, JobRecord):
            return self._admitted(decoded, size, now)
        if isinstance(decoded, CursorLine):
            self._apply_cursor(decoded)
            if now - self.gap_at >= REPORTS_AWAITED_S:
                self._end_unreported()
        elif isinstance(decoded, GapLine):
            self.lost += max(0, decoded.lost or 0)
            self.await_reports(now)
        elif isinstance(decoded, AnomalyLine):
            self._keep_anomaly(decoded.anomaly, size)
        elif isinstance(decoded, CaptureLine):
            self.keep_capture(decoded.capture)
        elif isinstance(decoded, RunLine):
            self._keep_run(decoded.run)
        elif isinstance(decoded, Clock):
            self._apply_clock(decoded, now)
        elif isinstance(decoded, DeviceReading):
            self._keep_device(decoded)
        return None

    def _apply_cursor(self, line: CursorLine) -> None:
        """Keep the end of a batch. Raises AgentError for another node than before."""
        self.cursor, version = line.cursor[:64], line.version[:64]
        if version != self.version:
            self.version = version
            self._is_newer = _numbers(version) > _numbers(__version__)
        # A tenant's agent over HTTP is called by its address.
        has_any_name = self.target.owner is not None and self.target.node is None
        if line.node != (self.target.node or self.name) and not has_any_name:
            raise AgentError(f"the agent of {self.name} now says that it is on {line.node!r}")

    def _apply_clock(self, clock: Clock, now: float) -> None:
        if _is_time(clock.time):
            self.clock = min(clock.time + self.skew_s, now)
        else:
            self.refused["bad_time"] += 1

    def _admitted(self, record: JobRecord, size: int, now: float) -> JobRecord | None:
        """Return the record in the fleet's time, None, counted, if it is refused."""
        refused = "too_long" if size > MAX_RECORD_BYTES else self._why_refused(record)
        if refused:
            self.refused[refused] += 1
            return None
        time = min(record.time + self.skew_s, now)
        return record if time == record.time else msgspec.structs.replace(record, time=time)

    def _why_refused(self, record: JobRecord) -> str | None:
        if self.target.owner is not None and record.owner != self.target.owner:
            return "other_owner"
        if max(len(record.job), len(record.owner), len(record.run)) > MAX_TEXT:
            return "too_long"
        if self.target.node and partition_of(record.job_id) != self.target.partition:
            return "other_partition"
        if not _is_time(record.time):
            return "bad_time"
        if not isinstance(record, RankSeen):
            return None
        if not 0 <= record.rank < record.world_size:
            return "no_such_rank"
        key = (*record.job_id, record.rank)
        if key not in self._ranks and len(self._ranks) >= MAX_RANKS:
            return "too_many_ranks"
        self._ranks.add(key)
        self.unreported.discard(key)
        return None

    def await_reports(self, now: float) -> None:
        """Await a new report of all that is live: lines were lost, or the agent was restarted."""
        self._unreported_devices = set(self.samples)
        self.unreported, self.gap_at = set(self._ranks), now
        active = {name for name, one in self._anomalies.items() if one.end_time is None}
        self._unreported_anomalies = active

    def _end_unreported(self) -> None:
        """End the anomalies that the agent no longer has, and forget exchanged devices."""
        for name in self._unreported_anomalies & self._anomalies.keys():
            ended = replace(self._anomalies[name], end_time=self.clock - self.skew_s)
            self._anomalies[name] = ended
        for device in self._unreported_devices:
            del self.samples[device]
        self._unreported_anomalies, self._unreported_devices = set(), set()

    def _keep_anomaly(self, anomaly: Anomaly, size: int) -> None:
        owner = self.target.owner
        if size > MAX_ANOMALY_BYTES:
            self.refused["too_long"] += 1
            return
        if (
            anomaly.kind not in KINDS
            or (owner is not None and anomaly.owner not in ("", owner))
            or not _is_time(anomaly.time)
            or not _is_time(anomaly.end_time or 0.0)
        ):
            self.refused["bad_anomaly"] += 1
            return
        put_newest(self._anomalies, anomaly.id, anomaly, MAX_ANOMALIES)
        self._unreported_anomalies.discard(anomaly.id)

    def has_active(self, found: Anomaly, job: JobId, of_fleet: str) -> bool:
        """Return whether it has raised the same; ``job``: as it is called there.

        of_fleet: the end of the ids that are not its own.
        """
        return any(
            one.kind == found.kind
            and one.job_id == job
            and one.end_time is None
            and not one.id.endswith(of_fleet)
            and (one.kind != "straggler" or one.rank == found.rank)
            for one in self._anomalies.values()
        )

    def anomalies(self) -> Iterator[Anomaly]:
        """Yield those that it has opened, with its name, in the fleet's time and not after it.

        Yield none before it has reported its time.
        """
        for anomaly in self._anomalies.values() if math.isfinite(self.clock) else ():
            end = anomaly.end_time
            yield replace(
                anomaly,
                id=f"{anomaly.id[:64]}@{self.name}",
                node=self.name,
                summary=anomaly.summary[: 2 * MAX_TEXT],
                first_summary=anomaly.first_summary[: 2 * MAX_TEXT],
                effects=tuple(text[:MAX_TEXT] for text in anomaly.effects[:MAX_SENTENCES]),
                evidence=tuple(text[:MAX_TEXT] for text in anomaly.evidence[:MAX_SENTENCES]),
                time=min(anomaly.time + self.skew_s, self.clock),
                end_time=None if end is None else min(end + self.skew_s, self.clock),
            )

    def keep_capture(self, capture: Capture) -> None:
        """Keep a capture that has changed; refuse another owner's, or one with an invalid id."""
        owner = self.target.owner
        foreign = owner is not None and capture.request.owner != owner
        timely = _is_time(capture.time) and _is_time(capture.end_time or 0.0)
        if foreign or not timely or not CAPTURE_ID.fullmatch(capture.id):
            self.refused["bad_capture"] += 1
            return
        diagnosis = capture.diagnosis or {}
        kept = {
            name: str(diagnosis[name])[:MAX_TEXT] for name in _OF_DIAGNOSIS if name in diagnosis
        }
        capture = replace(capture, diagnosis=kept or None)
        put_newest(self.captures, capture.id, capture, MAX_CAPTURES)

    def shown_captures(self) -> Iterator[Capture]:
        """Yield captures with the node's name, in the fleet's time, without HTML files."""
        for capture in self.captures.values():
            end = capture.end_time
            yield replace(
                capture,
                time=capture.time + self.skew_s,
                end_time=None if end is None else end + self.skew_s,
                ranks=tuple(replace(rank, node=self.name) for rank in capture.ranks[:MAX_RANKS]),
                folder=None,
                files=tuple(filter(FILE.fullmatch, capture.files[:MAX_RANKS])),
            )

    def _keep_device(self, reading: DeviceReading) -> None:
        """Keep the values that the page shows; network ports are ignored."""
        if isinstance(reading, PortReading):
            return
        name, reason = reading.device[:MAX_TEXT], reading.reason[:MAX_TEXT]
        before = self.samples.get(name)
        if not _is_time(reading.time) or (before is None and len(self.samples) >= MAX_DEVICES):
            self.refused["bad_device"] += 1
            return
        shown = [(key, value) for key, value in reading.metrics.items() if key[0] in _OF_DEVICE]
        # An agent of the version before reports no index.
        index = len(self.samples) if reading.index is None else reading.index
        device = before.device if before else Device(name, index, "")
        time = reading.time + self.skew_s
        values = dict(shown[:MAX_SERIES])
        self._unreported_devices.discard(name)
        self.samples[name] = DeviceSample(
            device, time, values, reading.up, reason, source=self.name
        )

    def devices(self) -> Iterator[DeviceSample]:
        """Yield the newest samples; like a daemon's they are stale once they are no longer read."""
        for one in self.samples.values():
            is_stale = one.up and not self.up
            yield replace(one, values={}, up=False, reason="stale") if is_stale else one

    def _keep_run(self, run: RunSummary) -> None:
        owner = self.target.owner
        texts = (*run.job_id, run.gpu_model or "", run.framework, run.version, run.remote or "")
        encoded = msgspec.json.encode(run)
        if (
            (owner is not None and run.owner != owner)
            or run.schema != SCHEMA
            or not 0 <= run.first_time <= min(run.time, MAX_TIME)
            or max(map(len, texts)) > MAX_TEXT
            or len(encoded) > MAX_RUN_BYTES
        ):
            self.refused["bad_run"] += 1
            return
        put_newest(self._runs, run.job_id, encoded, MAX_RUNS)

    def join_run(self, run: JobId, as_run: JobId) -> None:
        """Note the fleet's name of a run on several nodes."""
        put_newest(self._joined, run, as_run, MAX_RANKS)

    def runs(self) -> Iterator[RunPart]:
        """Yield the newest runs, in the agent's own time."""
        for run, encoded in self._runs.items():
            yield RunPart(self._joined.get(run, run), self.name, self.skew_s, encoded)

    def health(self, now: float) -> SourceHealth:
        reason = self.reason
        clock = max(self.clock, self._since or now)
        lag_s = max(0.0, now - clock) if self.up else 0.0
        refused = sum(self.refused.values())
        if self.up and lag_s > TOLD_LAG_S:
            reason = f"it is {lag_s:.0f} s behind"
        elif self.up and refused:
            ((why, _),) = self.refused.most_common(1)
            reason = f"{refused} lines were refused, most of them: {why}"
        elif self.up and self.newer:
            reason = (
                f"its agent is {self.version or 'newer'}, this fleet {__version__}: "
                f"{self.newer} lines have types or fields that it ignores; upgrade the fleet"
            )
        elif self.up and abs(self.skew_s) > TOLD_SKEW_S:
            side = "behind" if self.skew_s > 0 else "ahead"
            reason = f"its clock is {abs(self.skew_s):.0f} s {side}"
        elif self.up and self.lost:
            reason = f"{self.lost} lines were lost: the fleet came too late for them"
        return SourceHealth(self.name, self.up, reason, errors=refused, lag_s=lag_s)

    def forget_rank(self, seen: RankSeen) -> None:
        """Forget a rank that its job has on another node."""
        self._ranks.discard((*seen.job_id, seen.rank))

    def forget_ranks(self, job: tuple[object, ...]) -> None:
        """Forget the ranks of a job that has ended there."""
        self._ranks = {key for key in self._ranks if key[:-1] != job}


def _is_time(time: float) -> bool:
    return 0 <= time <= MAX_TIME


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]{1,9}", version)[:3]]


# A DNS name as hosts have it, with underscores. It is safe in a path, a label and a sentence.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


class NodeNames:
    """The agent that has each name. A name is free again once its agent cannot be followed."""

    def __init__(self) -> None:
        self._holders: dict[str, Node] = {}

    def claim(self, name: str, agent: Node) -> None:
        """Give the name to the agent, in the place of the one that it had. Raises AgentError."""
        if not _NAME.fullmatch(name):
            raise AgentError(f"{name[:64]!r} is not a node's name; set `node` to a DNS name")
        holder = self._holders.get(name)
        if holder is not None and holder is not agent and holder.up:
            raise AgentError(f"another agent says that it is on {name}")
        self.release(agent)
        self._holders[name] = agent

    def release(self, agent: Node) -> None:
        """Free the name that the agent has."""
        if self._holders.get(agent.name) is agent:
            del self._holders[agent.name]

    def has(self, name: str) -> bool:
        """Return whether an agent of a node has the name."""
        return name in self._holders
