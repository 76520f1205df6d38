"""Counts a rank's steps, time and memory over its processes and over restarts of the daemon.

A process of an inference server also has its seconds, as records and in its totals.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from warpwatch import protocol
from warpwatch.protocol import MAX_PHASES
from warpwatch_daemon.ranks import claims
from warpwatch_runtime.files import StateFile
from warpwatch_runtime.log_output import Complaint
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import Serve, Step
from warpwatch_telemetry.state import LATENCY_BOUNDS_S, Histogram, ServeState, StepDurations

logger = logging.getLogger(__name__)

_NO_TOTALS = protocol.RingTotals(0, 0, None, 0, 0, 0, ())


class RankTotals(msgspec.Struct, frozen=True):
    """Counts over several processes. recorded: from records and the kernel, by name."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    phases_s: dict[str, float] = {}
    recorded: dict[str, int] = {}


class SavedCounts(msgspec.Struct, frozen=True):
    """The counts of a rank as a restart finds them. base: of the processes before this one."""

    base: RankTotals = RankTotals()
    recorded: dict[str, int] = {}
    lost: int = 0
    counts: tuple[int, ...] | None = None
    sum_s: float = 0.0


class RankCounts:
    """The counts of a rank. header: the totals in the ring of its present process.

    recorded: counts from its records and from the kernel, by name; unknown ones are absent.
    """

    def __init__(self) -> None:
        self.header = _NO_TOTALS
        self.recorded: dict[str, int] = {}
        self.lost = 0
        self.durations = StepDurations()
        # The counts of the processes before this one.
        self._before = RankTotals()

    def begin_process(self, phases: Sequence[str]) -> None:
        """Count another process. ``phases``: the phase names of the last one."""
        self._before = self.totals(phases)
        self.header, self.recorded = _NO_TOTALS, {}

    def put(self, counts: Mapping[str, int]) -> None:
        """Set counts since the process began; a count never falls."""
        for name, count in counts.items():
            self.recorded[name] = max(count, self.recorded.get(name, 0))

    def grow(self, counts: Mapping[str, int]) -> None:
        """Add counts since the last call."""
        self.recorded = _sums(self.recorded, counts)

    def totals(self, phases: Sequence[str]) -> RankTotals:
        """Return the counts over all processes."""
        before, now = self._before, self.header
        return RankTotals(
            before.steps + now.steps,
            before.samples + now.samples,
            before.tokens + now.tokens,
            added(phases, [ns / 1e9 for ns in now.phases_ns], before.phases_s),
            _sums(before.recorded, self.recorded),
        )

    def shown(self, phases: Sequence[str]) -> dict[str, Any]:
        """Return the counts as fields of RankState."""
        totals = self.totals(phases)
        recorded = totals.recorded
        return {
            "steps_total": totals.steps,
            "samples_total": totals.samples,
            "tokens_total": totals.tokens,
            "phases_s": totals.phases_s,
            "durations": self.durations.histogram(),
            "lost_records": self.lost,
            "gc_s": _seconds(recorded.get("gc_ns")),
            "gc_collections_total": recorded.get("gc_collections"),
            "allocation_retries_total": recorded.get("allocation_retries"),
            "out_of_memory_errors_total": recorded.get("out_of_memory_errors"),
            "core_wait_s": _seconds(recorded.get("core_wait_ns")),
            "throttled_s": _seconds(recorded.get("throttled_ns")),
        }

    def save(self) -> SavedCounts:
        counts = tuple(self.durations.counts)
        return SavedCounts(self._before, self.recorded, self.lost, counts, self.durations.sum_s)

    def restore(self, saved: SavedCounts, names: PhaseNames) -> None:
        """Continue from ``save``. Raises ValueError if the histogram has other buckets."""
        self.durations = StepDurations(saved.counts, saved.sum_s)
        phases_s = saved.base.phases_s
        named_s = added(names.admit(phases_s), phases_s.values())
        self._before = msgspec.structs.replace(saved.base, phases_s=named_s)
        self.recorded, self.lost = dict(saved.recorded), saved.lost


Name = TypeVar("Name", str, int)


def _sums(*counts: Mapping[Name, int]) -> dict[Name, int]:
    sums: Counter[Name] = Counter()
    for some in counts:
        sums.update(some)
    return dict(sums)


def added(
    names: Iterable[str], values: Iterable[float], to: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the sums by name; a name may come more than once."""
    sums = dict(to or {})
    for name, value in zip(names, values, strict=False):
        sums[name] = sums.get(name, 0.0) + value
    return sums


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9


MAX_PHASES_PER_JOB = 64
OTHER = "other"


class PhaseNames:
    """The phase names of one rank, a bounded number; further names become ``other``.

    Each name is a series, and is kept for as long as the rank. ``of_job``: the names of all ranks
    of the job, shared by them.
    """

    def __init__(self, of_job: set[str]) -> None:
        self.of_job = of_job
        self._own: set[str] = set()

    def admit(self, names: Iterable[str]) -> list[str]:
        """Return each name as it is shown."""
        return [self._admit(name) for name in names]

    def _admit(self, name: str) -> str:
        if name in self._own or name == OTHER:
            return name
        is_new = name not in self.of_job
        if len(self._own) >= MAX_PHASES or (is_new and len(self.of_job) >= MAX_PHASES_PER_JOB):
            return OTHER
        self._own.add(name)
        self.of_job.add(name)
        return name


class SavedHistogram(msgspec.Struct, frozen=True):
    """A histogram over serving.LATENCY_BOUNDS_S as a restart finds it."""

    counts: tuple[int, ...]
    sum_s: float


FILE = "positions.json"
VERSION = 1
# 1,024 rings with 64 phases each.
MAX_BYTES = 64 << 20

# The pod whose folder a ring lies in, None for the folder of all, and the ring's name.
Key = tuple[str | None, str]


class SavedRank(SavedCounts, frozen=True, kw_only=True):
    """A rank as it was saved, with the position in its ring. ``left``: it continues in another."""

    pod: str | None
    ring: str
    left: bool = False
    position: int = 0
    owner: str = ""
    job: str = ""
    run: str = ""
    ended: bool = False
    ended_at: float | None = None
    first_time: float = 0.0
    serve_counts: dict[str, int] = {}
    serve_idle_s: float = 0.0
    histograms: dict[str, SavedHistogram] = {}

    @property
    def key(self) -> Key:
        return self.pod, self.ring

    @property
    def job_id(self) -> JobId:
        return JobId(self.owner, self.job, self.run)


class _Content(msgspec.Struct, frozen=True):
    """The file. Its ranks are decoded one by one: a bad one does not cost the others."""

    version: int
    ranks: tuple[msgspec.Raw, ...]


class Positions:
    """The saved ranks: the pipeline calls ``put``, which waits for no disk, a loop ``write``.

    ``fail``: called if there is no space. ``wake``: called if there is something to write.
    """

    def __init__(
        self,
        folder: Path,
        fail: Callable[[], None] = lambda: None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        # Rings do not survive a power cut either.
        self._file: StateFile[_Content] = StateFile(folder / FILE, _Content, MAX_BYTES)
        self._fail = fail
        self._wake = wake
        # Between the pipeline and the loop.
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._complaint = Complaint(logger, logging.WARNING)
        self._newest = b""
        self._waiting: bytes | None = None
        self._puts = 0
        # Every ``put`` up to this number is on disk.
        self.written = 0

    def load(self) -> dict[Key, SavedRank]:
        """Return the saved ranks; counts start again if there are none."""
        content = self._file.read()
        if content is None or content.version != VERSION:
            return {}
        found: dict[Key, SavedRank] = {}
        for raw in content.ranks:
            try:
                saved = msgspec.json.decode(raw, type=SavedRank)
                found[saved.key] = saved
            except (ValueError, RecursionError) as error:
                logger.warning("%s: a rank is ignored: %s", self._file.path, error)
        return found

    def put(self, ranks: Iterable[SavedRank]) -> int:
        """Replace what is saved unless it is the same; return the number of this content."""
        encoded = (msgspec.Raw(msgspec.json.encode(rank)) for rank in ranks)
        body = self._file.encode(_Content(VERSION, tuple(encoded)))
        with self._lock:
            if body != self._newest:
                self._newest = self._waiting = body
                self._puts += 1
            is_waiting, number = self._waiting is not None, self._puts
        if is_waiting:
            self._wake()
        return number

    def write(self) -> None:
        with self._writing:
            with self._lock:
                body, number = self._waiting, self._puts
            if body is None:
                return
            try:
                self._file.write(body)
            except OSError as error:
                self._fail()
                self._complaint.make("cannot save positions: %s", error)
                return
            self._complaint.clear()
            with self._lock:
                self.written = number
                if self._puts == number:
                    self._waiting = None


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
        found = claims.parse_serve(record.payload, time, job, rank)
        if found is None:
            return
        second, knows_requests = found
        self._waiting.append(second)
        if record.flags & protocol.FLAG_CONTINUES:
            del self._waiting[:-MAX_PARTS]
            return
        parts, self._waiting = self._waiting, []
        merged = {
            name: _sums(*(getattr(part, name) for part in parts)) for name in protocol.LATENCIES
        }
        second = msgspec.structs.replace(
            second, iterations=self._iterations, comm_s=self._comm_s, **merged
        )
        self._iterations, self._comm_s, self._newest = {}, 0.0, second
        self._schedules = knows_requests
        if not counted:
            self._count(second)
        yield second

    def _count(self, second: Serve) -> None:
        self._idle_s += second.idle_s
        for name in protocol.SERVE_COUNTS if self._schedules else ():
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
        return self._newest is not None and self._newest.is_idle

    def state(self, said: claims.Claims, replica: str, live: bool) -> ServeState:
        return ServeState(
            said.role,
            replica,
            said.server,
            said.note,
            **ServeState.now(self._newest if live else None, self._schedules),
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
        self.counts = {name: known[name] for name in protocol.SERVE_COUNTS if name in known}
        self._histograms = {
            name: StepDurations(one.counts, one.sum_s, LATENCY_BOUNDS_S)
            for name, one in saved.histograms.items()
            if name in (*_CLASSES, *protocol.LATENCIES)
        }
