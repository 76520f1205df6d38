"""Keeps a summary of each run, on disk as ``<store>/runs/<owner>/<job>/<run>.json``.

It is copied under the same name into the remote store at its end, and every ten minutes before. The
daemon with rank 0 of a multi-node job copies it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import msgspec

from warpwatch._version import __version__
from warpwatch_capturing.remote_store import RemoteStore, RemoteStoreError
from warpwatch_daemon.state.hub import Hub
from warpwatch_detection.anomalies.register import Change
from warpwatch_detection.detectors.run_regression import EVENT
from warpwatch_detection.runs import RunFigures, compared, earlier, has_enough, name_of
from warpwatch_runtime import files
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.files import StateFile
from warpwatch_runtime.supervisor import Pause
from warpwatch_telemetry.captures import UPLOAD_OUTCOMES
from warpwatch_telemetry.jobs import SCHEMA, JobId, RunSummary
from warpwatch_telemetry.records import End, RankEvent, Record, Serve, Step
from warpwatch_telemetry.state import RankState

logger = logging.getLogger(__name__)

FOLDER = "runs"
# Bytes of one name in a path.
MAX_SEGMENT = 128
# A summary of a run with 1,000 ranks and a full histogram.
MAX_BYTES = 256 << 10


def key_of(job: JobId) -> str:
    """Return the path below ``runs/``, also in the remote store."""
    return "/".join(map(_segment, job)) + ".json"


def _segment(text: str) -> str:
    """Return the text percent-encoded as a name of a path; a long one is cut, with a digest."""
    name = quote(text, safe="")
    if not name.strip("."):
        # A name cannot be empty, "." or "..".
        name = name.replace(".", "%2E") or "%00"
    if len(name) <= MAX_SEGMENT - len(".json"):
        return name
    return name[: MAX_SEGMENT - 16] + "-" + hashlib.sha256(text.encode()).hexdigest()[:10]


class RunFiles:
    """The summaries on disk, below ``store``."""

    def __init__(self, store: Path) -> None:
        self._store = store

    def load(self) -> list[RunSummary]:
        """Return the summaries that can be read, oldest first."""
        paths = (self._store / FOLDER).glob("*/*/*.json")
        found = [run for path in paths if (run := self._file(path).read()) is not None]
        kept = (run for run in found if run.schema == SCHEMA)
        return sorted(kept, key=lambda summary: summary.first_time)

    def save(self, summary: RunSummary) -> None:
        """Write a summary. Raises OSError."""
        file = self._file(self._store / FOLDER / key_of(summary.job_id))
        files.make_folders(self._store, file.path.parent)
        file.write(file.encode(summary))

    def remove(self, job: JobId) -> None:
        path = self._store / FOLDER / key_of(job)
        path.unlink(missing_ok=True)
        # Folders with other runs stay.
        with contextlib.suppress(OSError):
            path.parent.rmdir()
            path.parent.parent.rmdir()

    def _file(self, path: Path) -> StateFile[RunSummary]:
        return StateFile(path, RunSummary, MAX_BYTES)


REFRESH_S = 10.0
URGENT_S = 1.0
# Summing up takes at most this share of the pipeline's time.
REFRESH_SHARE = 0.02
# A killed daemon loses at most this much of a running run.
SAVE_S = 60.0
# All owners together: about 5 kB each.
MAX_RUNS = 1000
MAX_CAPTURES = 20
# Runs from before a start may show up again until this time.
RETURN_S = 60.0
_LIVE = ("running", "stopped")


class RunTable:
    """The summaries of running and ended runs. ``node``: its name in alerts.

    ``observe``, ``note_change`` and ``advance`` are the pipeline's and touch no disk; a loop calls
    ``write``.
    """

    def __init__(
        self, files: RunFiles, hub: Hub, node: str, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._files = files
        self._hub = hub
        self._node = node
        self._monotonic = monotonic
        self._figures: dict[JobId, RunFigures] = {}
        self._lock = threading.Lock()
        # All summaries, also of running runs; dirty ones are written.
        self._runs = {summary.job_id: summary for summary in files.load()}
        self._dirty: set[JobId] = set()
        self._dropped: set[JobId] = set()
        # Changed summaries, for a fleet.
        self._changed = dict(self._runs)
        self._saved_at: dict[JobId, float] = {}
        # Comparisons with earlier runs, for the detectors.
        self._events: list[RankEvent] = []
        self._began_at = monotonic()
        self._refreshed_at = -math.inf
        self._took_s = 0.0
        # A run began or ended, and is shown soon.
        self._is_urgent = False

    # --- the pipeline ---

    def observe(self, record: Record) -> None:
        if type(record) is Step:
            figures = self._figures.get(record.job_id) or self._begin(record)
            if figures is not None:
                figures.add(record)
        elif type(record) is Serve:
            if record.job_id in self._figures:
                self._figures[record.job_id].add_second(record)
        elif type(record) is End or (type(record) is RankEvent and record.event == "died"):
            self._is_urgent = True
            if record.job_id in self._figures:
                self._figures[record.job_id].note_end(record.time)

    def note_change(self, change: Change) -> None:
        job = change.anomaly.job_id
        if change.what == "opened" and job in self._figures:
            self._figures[job].anomalies[change.anomaly.kind] += 1

    def advance(self, now: float) -> None:
        """Sum up runs if it is time. Call once a round; ``now``: wall clock in seconds."""
        at = self._monotonic()
        wait_s = REFRESH_S
        if self._is_urgent:
            wait_s = min(wait_s, max(URGENT_S, self._took_s / REFRESH_SHARE))
        if at - self._refreshed_at < wait_s:
            return
        self._refreshed_at, self._is_urgent = at, False
        self._refresh(now, at)
        self._took_s = self._monotonic() - at

    def _refresh(self, now: float, at: float) -> None:
        ranks: dict[JobId, list[RankState]] = {}
        for rank in self._hub.ranks():
            ranks.setdefault(rank.job_id, []).append(rank)
        models = {one.device.uuid: one.device.name for one in self._hub.devices()}
        for job in list(self._figures):
            of_job = ranks.get(job, [])
            self._sum_up(job, of_job, models, now)
            if not _is_live(of_job):
                self._end(job, of_job)
        self._compare(now)
        if at - self._began_at > RETURN_S:
            self._end_interrupted({job for job, of_job in ranks.items() if _is_live(of_job)})
        self._make_room()

    def take_events(self) -> list[RankEvent]:
        """Return comparisons with earlier runs since the last call."""
        events, self._events = self._events, []
        return events

    def take_changed(self) -> list[RunSummary]:
        """Return summaries that changed since the last call, at first all; as rarely as on disk."""
        with self._lock:
            changed, self._changed = self._changed, {}
        return list(changed.values())

    def _compare(self, now: float) -> None:
        known: dict[tuple[str, str], list[RunSummary]] = {}
        for summary in self.all():
            known.setdefault(name_of(summary.job_id), []).append(summary)
        for job in self._figures:
            run = next((one for one in known.get(name_of(job), ()) if one.job_id == job), None)
            before = earlier(run, known[name_of(job)]) if run and has_enough(run) else ()
            if run is not None and before:
                detail, rank = compared(run, before), run.ranks[0]
                event = RankEvent(now, rank=rank, event=EVENT, detail=detail, **job.fields())
                self._events.append(event)

    def _begin(self, step: Step) -> RunFigures | None:
        """Start the figures of a run; None if it ended and the step is read again."""
        with self._lock:
            before = self._runs.get(step.job_id)
        if before is not None and before.end_time is not None and step.time <= before.time:
            return None
        figures = self._figures[step.job_id] = RunFigures(before) if before else RunFigures()
        if before is not None and before.end_time is not None:
            # The hub goes on with what it counted before the ranks came back.
            figures.energy_before_j -= self._hub.job_energy(step.job_id) or 0.0
        self._is_urgent = True
        return figures

    def _sum_up(
        self, job: JobId, ranks: Sequence[RankState], models: Mapping[str, str], now: float
    ) -> None:
        if not ranks:
            return
        figures = self._figures[job]
        energy_j = self._hub.job_energy(job)
        captures = [c.id for c in self._hub.captures() if c.request.job_id == job]
        said = ranks[0]
        first_time = min(rank.first_time for rank in ranks)
        steps = max(rank.steps_total for rank in ranks)
        if (before := figures.before) is not None:
            if before.end_time is not None and first_time > before.end_time:
                # Resumed by other processes.
                steps += before.steps
            first_time = min(first_time, before.first_time)
        self._put(
            RunSummary(
                **job.fields(),
                time=now,
                first_time=first_time,
                node=self._node,
                world_size=max(rank.world_size for rank in ranks),
                ranks=tuple(sorted(rank.rank for rank in ranks)),
                gpu_model=_model(ranks, models),
                framework=said.framework,
                step_clock=said.step_clock,
                version=__version__,
                steps=steps,
                energy_j=None if energy_j is None else figures.energy_before_j + energy_j,
                captures=tuple(captures[-MAX_CAPTURES:]),
                **figures.fields(sum(rank.computes for rank in ranks)),
            )
        )

    def _put(self, summary: RunSummary) -> None:
        job, at = summary.job_id, self._monotonic()
        with self._lock:
            before = self._runs.get(job)
            # The copy is older and renewed in its turn.
            self._runs[job] = replace(summary, remote=before.remote if before else None)
            if at - self._saved_at.get(job, -SAVE_S) >= SAVE_S:
                self._saved_at[job] = at
                self._note(job)

    def _end(self, job: JobId, ranks: Iterable[RankState]) -> None:
        """End a run without a living rank; a rank that comes back continues it."""
        ended = self._figures.pop(job).end_time
        with self._lock:
            summary = self._runs.get(job)
            self._saved_at.pop(job, None)
            if summary is not None:
                # It may have ended while no daemon ran.
                steps = (rank.last_step_time or 0.0 for rank in ranks)
                end_time = max(ended, *steps) if ended else summary.time
                self._runs[job] = replace(summary, end_time=end_time, remote=None)
                self._note(job)

    def _end_interrupted(self, live: Container[JobId]) -> None:
        """End runs that ended while no daemon ran; a server without load has no figures."""
        with self._lock:
            gone = [s for s in self._runs.values() if s.end_time is None]
            for summary in gone:
                if summary.job_id not in self._figures and summary.job_id not in live:
                    ended = replace(summary, end_time=summary.time, remote=None)
                    self._runs[summary.job_id] = ended
                    self._note(summary.job_id)

    def _note(self, job: JobId) -> None:
        """Mark a run as changed; the lock is held."""
        self._dirty.add(job)
        self._changed[job] = self._runs[job]

    def _make_room(self) -> None:
        """Evict the oldest runs of the owner with the most."""
        with self._lock:
            while len(self._runs) > MAX_RUNS:
                owners = Counter(job.owner for job in self._runs)
                greediest = owners.most_common(1)[0][0]
                job = min(
                    (job for job in self._runs if job.owner == greediest),
                    key=lambda job: self._runs[job].first_time,
                )
                del self._runs[job]
                self._dropped.add(job)
                self._dirty.discard(job)

    # --- any thread ---

    def all(self) -> list[RunSummary]:
        """Return ended and running runs, oldest first."""
        with self._lock:
            return sorted(self._runs.values(), key=lambda summary: summary.first_time)

    def copied(self, copy: RunSummary, address: str) -> None:
        """Note that the remote store has ``copy``."""
        job = copy.job_id
        with self._lock:
            summary = self._runs.get(job)
            if summary is not None and summary.end_time == copy.end_time:
                self._runs[job] = replace(summary, remote=address)
                self._dirty.add(job)

    # --- the writer ---

    def close(self, now: float) -> None:
        """Sum up and write all runs once the pipeline has ended. Raises OSError."""
        self._saved_at.clear()
        self._refresh(now, self._monotonic())
        self.write()

    def write(self) -> None:
        """Write changed summaries. Raises OSError for the first failure, which is tried again."""
        with self._lock:
            dirty = [self._runs[job] for job in self._dirty if job in self._runs]
            dropped, self._dropped = self._dropped, set()
            self._dirty.clear()
        failure: OSError | None = None
        for job in dropped:
            try:
                self._files.remove(job)
            except OSError as error:
                failure = failure or error
                with self._lock:
                    if job not in self._runs:
                        self._dropped.add(job)
        for summary in dirty:
            try:
                self._files.save(summary)
            except OSError as error:
                failure = failure or error
                with self._lock:
                    self._dirty.add(summary.job_id)
        if failure is not None:
            raise failure


def _is_live(ranks: Iterable[RankState]) -> bool:
    return any(rank.status in _LIVE for rank in ranks)


def _model(ranks: Sequence[RankState], models: Mapping[str, str]) -> str | None:
    found = {models.get(rank.device or "") for rank in ranks}
    return ", ".join(sorted(filter(None, found))) or None


UPLOAD_INTERVAL_S = 600.0


class RunUploads:
    """The uploads of runs. ``advance`` waits for the network, in a loop of its own."""

    def __init__(
        self,
        remote: RemoteStore,
        runs: RunTable,
        metrics: AgentMetrics,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._remote = remote
        self._runs = runs
        self._wall = wall
        outcomes = metrics.counter("uploads_total")
        self._outcomes = {outcome: outcomes.labels("run", outcome) for outcome in UPLOAD_OUTCOMES}
        self._bytes = metrics.counter("upload_bytes_total")
        self._pending = metrics.gauge("uploads_pending").labels("run")
        self._pause = Pause(monotonic)
        self._waiting: set[JobId] = set()
        # When a running run was copied, wall clock.
        self._copied: dict[JobId, float] = {}

    def advance(self) -> None:
        waiting = self._look()
        if self._pause.lasts:
            return
        for summary in waiting:
            try:
                self._upload(summary)
            except RemoteStoreError as error:
                self._outcomes["failed"].inc()
                if self._pause.begin():
                    logger.error("cannot upload a summary, trying again: %s", error)
                break
            self._pause.reset()
        self._look()

    def _look(self) -> list[RunSummary]:
        now = self._wall()
        known = {summary.job_id: summary for summary in self._runs.all()}
        self._outcomes["given_up"].inc(len(self._waiting - known.keys()))
        waiting = [summary for summary in known.values() if self._is_due(summary, now)]
        self._waiting = {summary.job_id for summary in waiting}
        self._copied = {job: at for job, at in self._copied.items() if job in known}
        self._pending.set(len(waiting))
        return waiting

    def _is_due(self, summary: RunSummary, now: float) -> bool:
        if 0 not in summary.ranks:
            return False
        if summary.end_time is not None:
            return summary.remote is None
        return now - self._copied.get(summary.job_id, summary.first_time) >= UPLOAD_INTERVAL_S

    def _upload(self, summary: RunSummary) -> None:
        """Copy a summary. Raises RemoteStoreError."""
        key = f"{FOLDER}/{key_of(summary.job_id)}"
        content = msgspec.json.encode(replace(summary, remote=None))
        self._remote.put(key, content)
        self._bytes.inc(len(content))
        self._outcomes["uploaded"].inc()
        self._copied[summary.job_id] = self._wall()
        self._runs.copied(summary, f"{self._remote.url}/{key}")
