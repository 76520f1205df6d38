"""Joins the steps that single ranks report into steps of the job.

A step is complete when every live rank has reported it. The records of ranks arrive in batches, so
up to MAX_PENDING steps wait for the slower rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from msgspec.structs import replace

from warpwatch_detection.detector import JobIteration, JobStep
from warpwatch_detection.signals.peers import stages
from warpwatch_telemetry.captures import CAPTURE_TIMEOUT_S
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, RankEvent, RankSeen, Record, Serve, Step

# The most steps that wait for a rank; then they are evaluated without it.
MAX_PENDING = 64
# The export and the end of tracing still slow the steps that follow a capture.
STEPS_AFTER_CAPTURE = 20
# A step number this far back is a restart, not a late or repeated record.
RESTART_STEPS = MAX_PENDING
START_EVENTS = frozenset({"capture_armed", "capture_started"})
END_EVENTS = frozenset(
    {"capture_finished", "capture_failed", "capture_disarmed", "capture_late", "died"}
)


# The fields of a server's step that make its work.
WORK = ("work_class", "prefill_tokens", "decode_requests", "kv_tokens")


@dataclass(slots=True)
class CaptureWindows:
    """The running captures, which slow their jobs.

    since: by job and rank, when the capture started. A capture whose end is not reported ends after
    CAPTURE_TIMEOUT_S.
    """

    since: dict[JobId, dict[int, float]] = field(default_factory=dict)

    def observe(self, event: RankEvent) -> bool:
        """Return whether the event ended a capture of its rank."""
        ranks = self.since.get(event.job_id)
        if event.event in START_EVENTS:
            self.since.setdefault(event.job_id, {})[event.rank] = event.time
        elif event.event in END_EVENTS and ranks and ranks.pop(event.rank, None) is not None:
            return True
        return False

    def runs_until(self, job: JobId, now: float) -> float | None:
        """Return the latest end of the job's running captures; None if none runs."""
        ranks = self.since.get(job)
        if not ranks:
            return None
        until = max(ranks.values()) + CAPTURE_TIMEOUT_S
        if until > now:
            return until
        self.forget(job)
        return None

    def forget(self, job: JobId) -> None:
        self.since.pop(job, None)


@dataclass(slots=True)
class JoinedJob:
    """The steps of one job.

    newest: the newest step of each live rank. pending: the steps that wait for a rank, by number.
    index: of the next joined step. emitted: the newest joined step. masked_until: the last step
    that a capture slows. left_at: the newest joined step when a rank left; its successor may count
    from 0.
    """

    newest: dict[int, int] = field(default_factory=dict)
    pending: dict[int, dict[int, Step]] = field(default_factory=dict)
    index: int = 0
    emitted: int = -1
    masked_until: int = -1
    left_at: int = -1

    def is_restart(self, record: Step) -> bool:
        """Return whether the step is the first of a program that was started again."""
        number, newest = record.step, self.newest.get(record.rank, self.left_at)
        return number <= newest and (number == 0 or number <= newest - RESTART_STEPS)

    def add(self, record: Step) -> dict[int, Step] | None:
        """Add a rank's step. Return the step that is complete or has waited too long, by rank."""
        number = record.step
        ranks = self.pending.setdefault(number, {})
        ranks[record.rank] = record
        if len(ranks) >= len(self.newest):
            del self.pending[number]
            if self.pending:
                # Older steps that still wait have lost a record.
                self.pending = {n: steps for n, steps in self.pending.items() if n > number}
        elif len(self.pending) > MAX_PENDING:
            number = min(self.pending)
            ranks = self.pending.pop(number)
        else:
            return None
        self.emitted = number
        return ranks


@dataclass(slots=True)
class SummaryJoin:
    """Joins the seconds of a server's processes into mean iterations.

    ranks: the newest second of each rank that computes. index: of the next mean iteration. step:
    the number of iterations so far. running, kv: the newest numbers of the engine's requests, and
    of the thousandths of its KV cache in use.
    """

    ranks: dict[int, Serve] = field(default_factory=dict)
    index: int = 0
    step: int = 0
    running: int = 0
    kv: int = 0

    def add(self, seen: Serve) -> JobIteration | None:
        """Add a second of a process; return the iteration once a rank reports its next second."""
        if seen.running or seen.kv_usage is not None:
            self.running, self.kv = seen.running, round(1000 * (seen.kv_usage or 0.0))
        count, _ = seen.iterations.get("decode", (0, 0.0))
        if not count:
            self.ranks.pop(seen.rank, None)
            return None
        joined = self._joined() if seen.rank in self.ranks else None
        if joined is not None:
            self.ranks.clear()
        self.ranks[seen.rank] = seen
        return joined

    def _joined(self) -> JobIteration:
        steps = {}
        for rank, seen in self.ranks.items():
            count, seconds = seen.iterations["decode"]
            total_s = sum(s for _, s in seen.iterations.values())
            comm_s = seen.comm_s * (seconds / total_s if total_s else 0.0) / count
            steps[rank] = Step(
                seen.time, seen.job, rank, self.step, seconds / count, phases_s={"comm": comm_s},
                owner=seen.owner, run=seen.run, work_class="decode", decode_requests=self.running,
                kv_tokens=self.kv,
            )  # fmt: skip
        self.index += 1
        self.step += count
        joined = join(steps, self.index - 1, {}, True)
        assert isinstance(joined, JobIteration)
        return replace(joined, step=self.step, count=count)


@dataclass(slots=True)
class JobStepsState:
    """The jobs.

    places: by job and rank, the position in each kind of parallelism, if it is known. summaries:
    the servers of which only summaries of seconds are known, as in a fleet.
    """

    jobs: dict[JobId, JoinedJob] = field(default_factory=dict)
    places: dict[JobId, dict[int, dict[str, tuple[int, int]]]] = field(default_factory=dict)
    captures: CaptureWindows = field(default_factory=CaptureWindows)
    summaries: dict[JobId, SummaryJoin] = field(default_factory=dict)


class JobSteps:
    """Joins records into steps of whole jobs. It keeps at most MAX_PENDING steps per rank."""

    state_version, state_form = 1, JobStepsState

    def __init__(self) -> None:
        self.state = JobStepsState()
        # By job, computed once after the last rank was reported.
        self._stages: dict[JobId, tuple[dict[int, int], bool | None]] = {}

    def observe(self, record: Record) -> JobStep | None:
        """Return the step of the job that the record completes."""
        if type(record) is Step:
            return self._step(record)
        if isinstance(record, Serve):
            return self._summary(record)
        if isinstance(record, RankEvent):
            self._event(record)
        elif isinstance(record, RankSeen):
            if record.parallel or record.job_id in self.state.places:
                places = self.state.places.setdefault(record.job_id, {})
                places[record.rank] = _place(record)
                self._stages.pop(record.job_id, None)
        elif isinstance(record, End) and record.rank is not None:
            self._remove(record.job_id, record.rank)
        return None

    def forget(self, job: JobId) -> None:
        self.state.jobs.pop(job, None)
        self.state.places.pop(job, None)
        self.state.summaries.pop(job, None)
        self._stages.pop(job, None)
        self.state.captures.forget(job)

    def _summary(self, record: Serve) -> JobStep | None:
        """Return the mean iteration of a second, if single iterations are not reported."""
        name = record.job_id
        if name in self.state.jobs:
            self.state.summaries.pop(name, None)
            return None
        joined = self.state.summaries.setdefault(name, SummaryJoin()).add(record)
        is_captured = self.state.captures.runs_until(name, record.time) is not None
        return None if is_captured else joined

    def _event(self, record: RankEvent) -> None:
        job = self.state.jobs.get(record.job_id)
        if self.state.captures.observe(record) and job is not None:
            job.masked_until = max(job.newest.values(), default=-1) + STEPS_AFTER_CAPTURE
        if record.event == "died":
            self._remove(record.job_id, record.rank)

    def _remove(self, name: JobId, rank: int) -> None:
        job = self.state.jobs.get(name)
        if job is not None and job.newest.pop(rank, None) is not None:
            job.left_at = job.emitted

    def _step(self, record: Step) -> JobStep | None:
        """Add a step, whose duration is finite. Return the joined step that it completes."""
        name, rank, number = record.job_id, record.rank, record.step
        job = self.state.jobs.get(name)
        if job is None or job.is_restart(record):
            job = self.state.jobs[name] = JoinedJob()
        if number <= job.newest.get(rank, -1):
            return None
        job.newest[rank] = number
        ranks = job.add(record) if number > job.emitted else None
        if ranks is None:
            return None
        grouped = self._stages.get(name)
        if grouped is None:
            grouped = self._stages[name] = stages(self.state.places.get(name, {}))
        joined = join(same_work(ranks) if record.work_class else ranks, job.index, *grouped)
        if joined is None:
            job.masked_until = max(job.masked_until, job.emitted + STEPS_AFTER_CAPTURE)
        time = next(iter(ranks.values())).time
        if job.emitted <= job.masked_until or self.state.captures.runs_until(name, time):
            return None
        job.index += 1
        return joined


def _place(record: RankSeen) -> dict[str, tuple[int, int]]:
    """Return the rank's position in each kind of parallelism.

    It is empty if the program reports only copies of the model, and fewer copies than ranks: then
    it splits the model in a way that it does not report.
    """
    place = dict(record.parallel)
    _, copies = place.get("data", (0, 0))
    return {} if place.keys() == {"data"} and copies < record.world_size else place


def join(
    ranks: dict[int, Step], index: int, stages: dict[int, int], alike: bool | None
) -> JobStep | None:
    """Return the joined step of several ranks, or None if one of them was profiled.

    Phases must be disjoint parts of a rank's duration.
    """
    compute_s: dict[int, float] = {}
    data_wait_s: dict[int, float] = {}
    comm_s: dict[int, float] = {}
    tokens: dict[int, int] = {}
    samples: dict[int, int] = {}
    durations: list[float] = []
    for rank, step in ranks.items():
        if step.profiled:
            return None
        phases = step.phases_s
        pauses_s = phases.get("checkpoint", 0.0) + phases.get("eval", 0.0)
        duration_s = step.duration_s - pauses_s
        comm_s[rank] = comm = phases.get("comm", 0.0)
        # A server's ranks wait for their scheduler.
        data_wait_s[rank] = wait = phases.get("wait" if step.work_class else "data_wait", 0.0)
        own_s = duration_s - comm - wait
        compute_s[rank] = own_s if own_s > 0.0 else 0.0
        durations.append(duration_s)
        if step.tokens:
            tokens[rank] = step.tokens
        elif step.samples:
            samples[rank] = step.samples
    return (JobIteration if step.work_class else JobStep)(
        time=max([step.time for step in ranks.values()]),
        job_id=step.job_id,
        step=step.step,
        index=index,
        duration_s=_middle(durations),
        common_s=_middle(compute_s.values()) + min(comm_s.values()),
        compute_s=compute_s,
        data_wait_s=data_wait_s,
        comm_s=comm_s,
        tokens=tokens,
        samples=samples,
        work=float(_middle((tokens or samples or {0: 0}).values())),
        stages=stages,
        alike=True if step.work_class else alike,
        **({name: getattr(step, name) for name in WORK} if step.work_class else {}),
    )


def same_work(ranks: dict[int, Step]) -> dict[int, Step]:
    """Return the ranks with the most frequent work: engines that are copies have other work."""
    if len(ranks) == 1:
        return ranks
    works = {rank: (s.prefill_tokens, s.decode_requests, s.kv_tokens) for rank, s in ranks.items()}
    usual, count = Counter(works.values()).most_common(1)[0]
    if count == len(ranks):
        return ranks
    return {rank: step for rank, step in ranks.items() if works[rank] == usual}


def _middle(values: Collection[float]) -> float:
    """Return the lower median, so that time and work of a step belong to the same rank."""
    return sorted(values)[(len(values) - 1) // 2]
